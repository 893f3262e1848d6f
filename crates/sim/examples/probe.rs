//! Probe.
use viola_policy::slices::{Class, MS};
use viola_sim::papers::Bed;
use viola_sim::setup::*;
use viola_sim::work::*;
fn host(bed: &Bed, vms: usize, ls: usize, tm: u64) -> HostSetup {
    let slice = 30 * MS;
    let (policy, t_m) = match ls {
        0 => (bed.xen(slice), MS),
        1 => (Policy::Paper { slice }, slice / (vms as u64 - 1)),
        _ => (Policy::Paper { slice }, tm),
    };
    let vm = |k| VmSetup {
        class: if k < ls { Class::Ls } else { Class::Batch },
        microslice: t_m,
        hog: lookbusy(40),
        ..VmSetup::default()
    };
    HostSetup {
        policy,
        vms: (0..vms).map(vm).collect(),
        ..bed.host()
    }
}
fn main() {
    if std::env::args().nth(1).as_deref() == Some("disk") {
        let bed = Bed::xen_4_1();
        for vms in [3usize, 4, 5] {
            for own in [0u64, 30, 100] {
                for load in [20u64, 30, 60, 100] {
                    for rate in [40.0, 70.0, 100.0] {
                        let run = |turbo: bool, write: bool| {
                            let vm = VmSetup {
                                class: Class::Batch,
                                hog: lookbusy(load),
                                ..VmSetup::default()
                            };
                            let mut h = HostSetup {
                                policy: if turbo {
                                    Policy::VTURBO
                                } else {
                                    bed.xen(30 * MS)
                                },
                                turbo_cores: usize::from(turbo),
                                vms: vec![vm; vms],
                                ..bed.host()
                            };
                            h.vms[0].hog = lookbusy(own);
                            let disk = Disk {
                                rate: rate * 1e6,
                                request: 44 << 10,
                                depth: 32,
                                submit: 5000,
                                complete: 10000,
                            };
                            let work: Box<dyn viola_sim::world::Workload + Send> = if write {
                                Box::new(Write::new(0, disk, 1_000_000_000, 200 << 20, bed.costs()))
                            } else {
                                Box::new(Read::new(0, Disk { depth: 3, ..disk }, bed.costs()))
                            };
                            let mut sim = h.simulation(vec![work], 1);
                            sim.run(60_000 * MS);
                            sim.workloads[0].figures(&sim.world)[0].1
                        };
                        let (a, b, c, d) = (
                            run(false, true),
                            run(true, true),
                            run(false, false),
                            run(true, false),
                        );
                        println!(
                            "vms {vms} own {own} others {load} disk {rate}: write {a:.1} {b:.1} {:+.0} %  read {c:.1} {d:.1} {:+.0} %",
                            100.0 * (b / a - 1.0),
                            100.0 * (d / c - 1.0)
                        );
                    }
                }
            }
        }
        return;
    }
    if let Some(what) = std::env::args().nth(1) {
        let bed = Bed::xen_4_1();
        if what == "tcp" {
            for fast in [false, true] {
                for scp in [false, true] {
                    for others in [2usize, 3, 4] {
                        for turbo in [false, true] {
                            let slice = 30 * MS;
                            let vm = VmSetup {
                                class: Class::Batch,
                                hog: viola_sim::cpu::Hog::Busy,
                                ..VmSetup::default()
                            };
                            let mut h = HostSetup {
                                policy: if turbo {
                                    Policy::VTURBO
                                } else {
                                    bed.xen(slice)
                                },
                                turbo_cores: usize::from(turbo),
                                vms: vec![vm; others + 1],
                                ..bed.host()
                            };
                            if fast {
                                h.bits = 10_000_000_000;
                            }
                            if scp {
                                h.costs.copy +=
                                    std::env::args().nth(2).map_or(10.0, |g| g.parse().unwrap());
                            }
                            let config = TcpConfig {
                                buffer: if scp && std::env::args().len() > 3 {
                                    2 << 20
                                } else if turbo {
                                    40_000_000
                                } else {
                                    4 << 20
                                },
                                beta: 0.7,
                                early_ack: turbo,
                                total: if fast { 500_000_000 } else { 200_000_000 } / 1448,
                                ..TcpConfig::default()
                            };
                            let mut sim =
                                h.simulation(vec![Box::new(Tcp::new(0, config, h.costs))], 1);
                            sim.run(60_000 * MS);
                            let w = &sim.world;
                            println!(
                                "{} {} others {others} turbo {turbo} {:.1?} ring {} of {} wires {} app {:.1} irq {:.1} %",
                                if fast { "10G" } else { "1G" },
                                if scp { "scp" } else { "tcp" },
                                sim.workloads[0].figures(w),
                                w.nics[0].dropped,
                                w.nics[0].came,
                                w.wires.dropped(),
                                w.cpus.usage(w.vms[0].app).ran as f64 / 6e8,
                                w.cpus.usage(w.vms[0].irq).ran as f64 / 6e8
                            );
                        }
                    }
                }
            }
            return;
        }
    }
    if std::env::args().nth(1).as_deref() == Some("mpi") {
        let bed = Bed::xen_3_4();
        for pattern in [Pattern::Alltoall, Pattern::Sendrecv] {
            for kb in [1u64, 4, 16, 64, 256, 1024] {
                for ls in [0usize, 2] {
                    let one = host(&bed, 4, ls, 5);
                    let mut setup = HostSetup {
                        cores: 2,
                        phase: 300 * MS,
                        vms: Vec::new(),
                        ..one
                    };
                    for core in 0..2 {
                        for k in 0..4 {
                            setup.vms.push(VmSetup {
                                class: if k < ls { Class::Ls } else { Class::Batch },
                                microslice: 5 * MS,
                                core,
                                hog: viola_sim::cpu::Hog::Busy,
                                ..VmSetup::default()
                            });
                        }
                    }
                    let mut all = Vec::new();
                    let mut again = 0.0;
                    let mut drops = 0;
                    for seed in 1..=24 {
                        let job = Mpi::new(
                            vec![(0, 0), (4, 1), (1, 0), (5, 1)],
                            pattern,
                            kb << 10,
                            bed.costs(),
                        );
                        let mut sim = setup.simulation(vec![Box::new(job)], seed);
                        sim.run(30_000 * MS);
                        let f = sim.workloads[0].figures(&sim.world);
                        all.push(f[0].1);
                        again += f[2].1 / f[1].1 / 24.0;
                        drops += sim.world.nics.iter().map(|n| n.dropped).sum::<u64>();
                    }
                    let m = all.iter().sum::<f64>() / 24.0;
                    all.sort_by(f64::total_cmp);
                    println!(
                        "{pattern:?} {kb} KB ls {ls} mean {m:.1} min {:.1} med {:.1} max {:.1} again/round {again:.2} drops {drops}",
                        all[0], all[12], all[23]
                    );
                }
            }
        }
        return;
    }
    let bed = Bed::xen_3_4();
    if std::env::args().len() > 1 {
        for (vms, ls) in [(3, 0), (4, 0), (5, 0), (5, 1)] {
            for buffer in [256u64 << 10, 1 << 20] {
                for secs in [1u64, 2, 5, 20] {
                    let config = TcpConfig {
                        buffer,
                        beta: 0.5,
                        delay: 50_000,
                        ..TcpConfig::default()
                    };
                    let h = host(&bed, vms, ls, 5 * MS);
                    let mut sim = h.simulation(vec![Box::new(Tcp::new(0, config, bed.costs()))], 1);
                    sim.run(secs * 1000 * MS);
                    println!(
                        "LAN buf {buffer} {vms} {ls} {secs}s {:.2?} ringdrop {} of {} wires {}",
                        sim.workloads[0].figures(&sim.world),
                        sim.world.nics[0].dropped,
                        sim.world.nics[0].came,
                        sim.world.wires.dropped()
                    );
                }
            }
        }
        return;
    }
    for (ring, queue) in [(64usize, 32usize), (256, 32)] {
        for buffer in [256u64 << 10, 1 << 20] {
            for (vms, ls) in [(3, 0), (3, 1), (5, 0), (5, 1)] {
                for secs in [10u64, 120] {
                    let config = TcpConfig {
                        buffer,
                        beta: 0.5,
                        delay: 15 * MS,
                        ..TcpConfig::default()
                    };
                    let mut h = host(&bed, vms, ls, 5 * MS);
                    h.nic.ring = ring;
                    h.nic.queue = queue;
                    let mut sim = h.simulation(vec![Box::new(Tcp::new(0, config, bed.costs()))], 1);
                    sim.run(secs * 1000 * MS);
                    println!(
                        "ring {ring} buf {buffer} {vms} {ls} {secs}s {:.2?} ringdrop {} of {}",
                        sim.workloads[0].figures(&sim.world),
                        sim.world.nics[0].dropped,
                        sim.world.nics[0].came
                    );
                }
            }
        }
    }
    for ls in [0, 2] {
        for tm in [5u64, 10] {
            for side in [Side::Up, Side::Down] {
                for delays in [
                    ((20 * MS, 40 * MS), (50_000, 50_000)),
                    ((50_000, 50_000), (20 * MS, 40 * MS)),
                    ((20 * MS, 40 * MS), (20 * MS, 40 * MS)),
                ] {
                    let mut sums = [0.0; 3];
                    for seed in 1..=24 {
                        let mut m = Media::voice(0, side, delays.0, bed.costs());
                        m.process = 100_000;
                        m.delay_from = delays.1;
                        let mut sim =
                            host(&bed, 4, ls, tm * MS).simulation(vec![Box::new(m)], seed);
                        sim.run(30_000 * MS);
                        let f = sim.workloads[0].figures(&sim.world);
                        for (s, n) in
                            sums.iter_mut()
                                .zip(["jitter ms", "transit mean ms", "discarded %"])
                        {
                            *s += f.iter().find(|x| x.0 == n).unwrap().1 / 24.0;
                        }
                    }
                    println!(
                        "voice ls {ls} tm {tm} {side:?} {:?} {sums:.2?}",
                        delays.0.0 > MS
                    );
                }
            }
        }
    }
}
