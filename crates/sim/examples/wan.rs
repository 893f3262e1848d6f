//! Scratch.
use viola_policy::slices::{Class, MS};
use viola_sim::papers::Bed;
use viola_sim::setup::*;
use viola_sim::work::*;
fn main() {
    let bed = Bed::xen_3_4();
    let slice = 30 * MS;
    for (n, from) in [(24, 1), (24, 1001), (96, 1), (96, 1001), (192, 1), (192, 1001), (480, 1), (480, 1001), (480, 5001), (2000, 1)] { let stream = false;
        for (ls, tm) in [(0, 10), (2, 10), (2,5)] {
            let policy = if ls == 0 { bed.xen(slice) } else { Policy::Paper { slice } };
            let vm = |k| VmSetup {
                class: if k < ls { Class::Ls } else { Class::Batch },
                microslice: tm * MS,
                hog: lookbusy(40),
                ..VmSetup::default()
            };
            let h = HostSetup { policy, vms: (0..4).map(vm).collect(), ..bed.host() };
            let (mut t, mut r, mut j) = (0.0, 0.0, 0.0);
            for seed in from..from + n {
                let mut m = Media::voice(0, Side::Down, (20 * MS, 40 * MS), bed.costs());
                m.every = 50 * MS;
                m.bytes = 226;
                m.echo = true;
                m.stream = stream;
                m.delay_from = (50_000, 50_000);
                m.process = 100_000;
                let mut sim = h.simulation(vec![Box::new(m)], seed);
                sim.run(30_000 * MS);
                let f = sim.workloads[0].figures(&sim.world);
                let g = |n: &str| f.iter().find(|x| x.0 == n).unwrap().1;
                t += g("trip mean ms") / n as f64;
                j += g("jitter ms") / n as f64;
                r += g("transit mean ms") / n as f64;
            }
            println!("{n} {from} stream {stream} ls {ls} tm {tm}: trip {t:.1} due->peer {r:.1} send->back {:.1} jitter {j:.1}", t - r);
        }
    }
}
