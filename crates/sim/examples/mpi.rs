//! Scratch.
use viola_policy::slices::{Class, MS};
use viola_sim::papers::Bed;
use viola_sim::setup::*;
use viola_sim::cpu::Hog;
use viola_sim::work::*;
fn main() {
    let bed = Bed::xen_3_4();
    let slice = 30 * MS;
    for ls in [0usize, 2] {
        for seed in 1..=8 {
            let policy = if ls == 0 { bed.xen(slice) } else { Policy::Paper { slice } };
            let mut h = HostSetup { policy, cores: 2, phase: 300 * MS, vms: vec![], ..bed.host() };
            for core in 0..2 {
                for k in 0..4 {
                    h.vms.push(VmSetup {
                        class: if k < ls { Class::Ls } else { Class::Batch },
                        microslice: 5 * MS,
                        core,
                        hog: Hog::Busy,
                        ..VmSetup::default()
                    });
                }
            }
            let mut job = Mpi::new(vec![(0, 0), (1, 0), (4, 1), (5, 1)], Pattern::Sendrecv, 4 << 10, bed.costs());
            job.window = 64 << 10;
            let mut sim = h.simulation(vec![Box::new(job)], seed);
            print!("ls {ls} seed {seed}:");
            let mut last = 0.0;
            for k in 1..=15 {
                sim.run(k * 2000 * MS);
                let f = sim.workloads[0].figures(&sim.world);
                let g = |n: &str| f.iter().find(|x| x.0 == n).unwrap().1;
                print!(" {}", g("rounds") - last);
                last = g("rounds");
                if k == 15 { print!("  again {}", g("sent again")); }
            }
            println!();
        }
    }
}
