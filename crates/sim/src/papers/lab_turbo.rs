// SPDX-License-Identifier: Apache-2.0
//! Predictions of what the lab measured of turbo cores (bench/results/turbo.json): four guests on a core, one of which
//! does I/O. They have two vCPUs, the first for interrupts and the second for programs.

use viola_policy::slices::{MS, Nanos};
use viola_policy::turbo::{TURBO_SLOT, TurboConfig};

use super::vslicer::run_workloads;
use super::{LAB, Papers, SECOND, Testbed, figure};
use crate::cpu::CpuLoad;
use crate::net::wire_time;
use crate::setup::{HostSetup, Policy, VmSetup};
use crate::work::{Ping, Tcp, TcpConfig, Udp};

/// A scheduler with the medians of five rounds: ping (median and 99th percentile, ms), datagrams received at 5,000,
/// 20,000 and 50,000 per second (percent), TCP over 1 Gbit/s (MB/s), the others' work (units per second).
struct Side {
    name: &'static str,
    policy: Policy,
    ping: [f64; 2],
    udp: [f64; 3],
    tcp: f64,
    others: f64,
}

const RATES: [f64; 3] = [5_000.0, 20_000.0, 50_000.0];

pub(super) fn run(all: &mut Papers) {
    let bed = &Testbed::lab();
    let slice = bed.ms("slice_ms");
    let sides = [
        Side {
            name: "stock",
            policy: bed.stock_linux(),
            ping: [3.4316, 12.5959],
            udp: [47.2, 25.7467, 8.2987],
            tcp: 9.7204,
            others: 39_409.72,
        },
        Side {
            name: "30 ms slices",
            policy: Policy::Credit { slice, boost: true },
            ping: [41.0026, 120.1629],
            udp: [35.32, 24.68, 16.22],
            tcp: 16.6027,
            others: 40_405.96,
        },
        Side {
            name: "turbo",
            policy: Policy::Turbo {
                slice: viola_policy::turbo::REGULAR_SLICE,
                slot: TURBO_SLOT,
                floor: MS,
                reserve: TurboConfig::default().reserve,
            },
            ping: [0.1883, 0.5524],
            udp: [100.0, 56.8, 20.8973],
            tcp: 48.2502,
            others: 43_428.45,
        },
    ];
    let mut work = Vec::new();
    for side in &sides {
        one(all, bed, side);
        let computed = others(bed, side.policy);
        work.push((computed, side.others));
    }
    // The model has no such units: each scheduler is compared with stock.
    for (side, (ours, measured)) in sides[1..].iter().zip(&work[1..]) {
        let what = format!("others' work against stock, {}", side.name);
        let measured = measured / work[0].1;
        all.value(LAB, "turbo", what, "x", measured, ours / work[0].0);
    }
}

fn host(bed: &Testbed, policy: Policy) -> HostSetup {
    let turbo = matches!(policy, Policy::Turbo { .. });
    let vm = VmSetup {
        load: CpuLoad::Busy,
        // In a slot softirqs go first: viola ranks the kernel of a UML guest above its programs.
        irq_vcpu: matches!(policy, Policy::Linux(_)),
        ..VmSetup::default()
    };
    let mut setup = HostSetup {
        policy,
        turbo_cores: usize::from(turbo),
        vms: vec![vm; 4],
        ..bed.host()
    };
    setup.nic.slow = Some((
        bed.get("slow_one_of") as u32,
        bed.get("slow_percent") as u32,
    ));
    setup
}

fn one(all: &mut Papers, bed: &Testbed, side: &Side) {
    let turbo = matches!(side.policy, Policy::Turbo { .. });
    let setup = host(bed, side.policy);
    let mut asked = setup.clone();
    // The time UML takes to stop a computing vCPU. Turbo vCPUs do not compute; in a flood UML stops it for the
    // interrupts.
    if !turbo {
        asked.nic.interrupt += bed.get("exit_ns") as Nanos;
    }
    let pause = (bed.ms("turbo_pause_low_ms"), bed.ms("turbo_pause_high_ms"));
    let mut ping = Ping::new(0, pause, 0, bed.costs());
    ping.waits_for_answer = false;
    let sim = run_workloads(&asked, vec![Box::new(ping)], 300 * SECOND);
    let of = sim.workloads[0].figures(&sim.world);
    for (name, measured) in ["p50", "p99"].into_iter().zip(side.ping) {
        let what = format!("ping {name}, {}", side.name);
        let ours = figure(&of, &format!("round trip {name} ms"));
        all.value(LAB, "turbo", what, "ms", measured, ours)
            .explain(match side.policy {
                Policy::Turbo { .. } => {
                    "With the first vCPUs pinned by hand (turbo.json, pinned) it is 0.13 and 0.69 ms. In the \
                 lab the load runs on the turbo core too; in the model nothing else runs there."
                }
                Policy::Credit { .. } => {
                    "In the lab slots end late, which lengthens every turn, the more so the more threads of a \
                 VM move at each."
                }
                _ => "In the lab a vCPU is two threads or more of a control group; in the model it is one.",
            });
    }
    for (rate, measured) in RATES.into_iter().zip(side.udp) {
        let buffer = if turbo {
            bed.get("socket_agent_mb") * 1e6
        } else {
            bed.get("socket_kb") * 1024.0
        };
        let bytes = bed.get("flood_bytes") as u32;
        let every = (SECOND as f64 / rate) as Nanos;
        let mut udp = Udp::new(0, every, bytes, buffer as u64, bed.costs());
        udp.head = bed.get("socket_head_bytes") as u32;
        udp.burst = 1;
        let sim = run_workloads(&setup, vec![Box::new(udp)], 10 * SECOND);
        let of = sim.workloads[0].figures(&sim.world);
        let ours = 100.0 * figure(&of, "read") / figure(&of, "sent");
        let what = format!("UDP received at {rate}/s, {}", side.name);
        all.value(LAB, "turbo", what, "%", measured, ours)
            .explain(if rate < 10_000.0 {
                "Larger buffers do not help there (turbo.json: 43 %). In the lab each datagram wakes the \
                 guest; in the model waiting datagrams are handled together."
            } else {
                "In the model softirqs run before the process within a slot, which gets nothing of a flood."
            });
    }
    let mut setup = setup;
    setup.bits = (bed.get("gigabit_mbit") * 1e6) as u64;
    // The sender's kernel passes on merged segments.
    setup.nic.merge = bed.get("tap_merge_bytes") as u32;
    setup.nic.coalesce = wire_time(u64::from(setup.nic.merge), setup.bits);
    let buffer = if turbo {
        bed.get("socket_agent_mb") * 1e6
    } else {
        bed.get("tcp_kb") * 1024.0
    };
    let config = TcpConfig {
        buffer: buffer as u64,
        ..TcpConfig::default()
    };
    let tcp = Tcp::new(0, config, bed.costs());
    let sim = run_workloads(&setup, vec![Box::new(tcp)], 20 * SECOND);
    let ours = figure(&sim.workloads[0].figures(&sim.world), "throughput Mbit/s") / 8.0;
    let what = format!("TCP over 1 Gbit/s, {}", side.name);
    all.value(LAB, "turbo", what, "MB/s", side.tcp, ours)
        .explain(
            "The guest of the lab drops 66 packets per MB before they cost it anything, and its sender continues. In the \
             model each segment costs as much as a datagram, which leaves no time for more.",
        );
}

/// Computing time of the three other VMs, per second.
fn others(bed: &Testbed, policy: Policy) -> f64 {
    let sim = run_workloads(&host(bed, policy), Vec::new(), 20 * SECOND);
    let of = |vm: usize| sim.world.cpus.usage(sim.world.vms[vm].app).computed;
    (1..4).map(of).sum::<Nanos>() as f64 / (20 * SECOND) as f64
}
