// SPDX-License-Identifier: Apache-2.0
//! lookbusy, after its source: it computes, sleeps, measures what its guest used meanwhile, and computes longer by what
//! was missing. If it does not get its percentage, it soon hardly sleeps.

use viola_policy::slices::{MS, Nanos};

use crate::cpu::Level;
use crate::world::{Workload, World};

/// Length of a round without contention.
const ROUND: Nanos = 100 * MS;

/// Computing time of a starved load before it sleeps again, ns; it keeps growing.
const STARVED_BUSY: f64 = 1e12;

/// One lookbusy process.
#[derive(Debug)]
pub struct Lookbusy {
    vm: usize,
    percent: f64,
    owner: usize,
    busy: f64,
    sleep: Nanos,
    began: Nanos,
    ran_before: Nanos,
    rounds: u64,
}

impl Lookbusy {
    /// A process that uses `percent` percent of a core, 1 to 99. `starved`: it begins in the state
    /// of one that has long got less, and hardly sleeps.
    pub fn new(vm: usize, percent: u32, starved: bool) -> Self {
        let percent = f64::from(percent.clamp(1, 99));
        let busy = ROUND as f64 * percent / 100.0;
        Self {
            vm,
            percent,
            owner: 0,
            busy: if starved { STARVED_BUSY } else { busy },
            sleep: ROUND - busy as Nanos,
            began: 0,
            ran_before: 0,
            rounds: 0,
        }
    }

    fn used(&self, world: &World) -> Nanos {
        world.cpus.usage(world.vms[self.vm].app).ran
    }

    fn start_round(&mut self, world: &mut World) {
        self.began = world.now;
        self.ran_before = self.used(world);
        let vcpu = world.vms[self.vm].app;
        world.work(vcpu, Level::Compute, self.busy as Nanos, self.owner, 0);
    }
}

impl Workload for Lookbusy {
    fn start(&mut self, world: &mut World, owner: usize) {
        self.owner = owner;
        // Loads of different VMs are not in step.
        let first = world.random.within(1, ROUND);
        world.set_timer(first, owner, 0);
    }

    fn on_timer(&mut self, world: &mut World, _tag: u64) {
        if self.rounds > 0 {
            let used = (self.used(world) - self.ran_before) as f64;
            let actual = 100.0 * used / (world.now - self.began).max(1) as f64;
            self.busy += (self.percent - actual) * self.busy / 100.0;
            self.busy = self.busy.max(1e4);
        }
        self.rounds += 1;
        self.start_round(world);
    }

    fn on_work_done(&mut self, world: &mut World, _tag: u64) {
        world.set_timer(world.now + self.sleep, self.owner, 0);
    }

    fn figures(&self, _world: &World) -> Vec<(String, f64)> {
        vec![("rounds".into(), self.rounds as f64)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setup::{HostSetup, VmSetup, lookbusy};

    /// Parts of a core that VMs with these percentages get.
    fn parts(percent: &[u64]) -> Vec<f64> {
        let vm = |&p: &u64| VmSetup {
            load: lookbusy(p),
            ..VmSetup::default()
        };
        let setup = HostSetup {
            vms: percent.iter().map(vm).collect(),
            ..HostSetup::default()
        };
        let mut sim = setup.simulation(Vec::new(), 1);
        let part = |sim: &crate::world::Simulation, vm: usize| {
            sim.world.cpus.usage(sim.world.vms[vm].app).ran as f64
        };
        sim.run(30_000 * MS);
        let before: Vec<f64> = (0..percent.len()).map(|vm| part(&sim, vm)).collect();
        sim.run(60_000 * MS);
        let after = (0..percent.len()).map(|vm| part(&sim, vm));
        after.zip(before).map(|(a, b)| (a - b) / 30e9).collect()
    }

    #[test]
    fn lookbusy_gets_its_percentage_if_the_core_has_it() {
        for (percent, expected) in [
            (vec![40], vec![0.4]),
            (vec![20, 30, 40], vec![0.2, 0.3, 0.4]),
            (vec![40, 40, 40, 40], vec![0.25; 4]),
        ] {
            for (got, expected) in parts(&percent).into_iter().zip(expected) {
                assert!((got - expected).abs() < 0.02, "{percent:?}: {got}");
            }
        }
    }
}
