// SPDX-License-Identifier: Apache-2.0
//! A simulated core that stock and viola schedule in turn, as the classes of its VMs ask for.

use super::{Behaviour, Core, Driver, NoProgress, SimVm};
use crate::slices::{
    Class, CoreScheduler, Credit, Interleaved, InterleavedConfig, MS, Nanos, Params,
};

/// A core whose VMs are scheduled by viola while one of them has class ls, and as by a stock kernel otherwise.
pub struct Host {
    core: Core<Box<dyn CoreScheduler>>,
    vms: Vec<SimVm>,
    /// Number of wake-up waits and preemption waits that were read of each VM.
    read: Vec<(usize, usize)>,
}

/// What a VM got in some time, ns.
#[derive(Debug, Clone, Default)]
pub struct Usage {
    /// Run time.
    pub run: Nanos,
    /// Time in which it wanted to run and did not.
    pub wait: Nanos,
    /// The wait after each wake-up.
    pub wakes: Vec<Nanos>,
    /// The wait after each preemption.
    pub preempted: Vec<Nanos>,
}

/// The mean of the slowest twentieth of these waits, ns; 0 of none.
pub fn slowest_mean(mut waits: Vec<Nanos>) -> f64 {
    waits.sort_unstable_by(|a, b| b.cmp(a));
    let slowest = &waits[..waits.len().div_ceil(20)];
    slowest.iter().sum::<Nanos>() as f64 / slowest.len().max(1) as f64
}

/// viola's default, or slices of 4 ms in turn, about as long as those of a stock kernel.
fn scheduler(ls: bool) -> Box<dyn CoreScheduler> {
    match ls {
        true => Box::new(Interleaved::new(InterleavedConfig::default())),
        false => {
            let mut stock = Credit::new(false);
            stock.set_slice(4 * MS);
            Box::new(stock)
        }
    }
}

impl Host {
    /// A core with a VM of class batch for each behaviour; the VM's id is its index.
    pub fn new(behaviours: &[Behaviour], microslice: Nanos, seed: u64) -> Self {
        let vm = |(id, behaviour): (usize, &Behaviour)| SimVm {
            params: Params {
                id: id as u32,
                class: Class::Batch,
                weight: 256,
                cap_permille: None,
                microslice,
            },
            behaviour: *behaviour,
        };
        let vms: Vec<SimVm> = behaviours.iter().enumerate().map(vm).collect();
        Self {
            core: Core::new(scheduler(false), &vms, Driver::default(), seed),
            read: vec![(0, 0); vms.len()],
            vms,
        }
    }

    /// Changes what the VMs do.
    pub fn set_behaviours(&mut self, behaviours: &[Behaviour]) {
        let before = self.vms.clone();
        for (vm, behaviour) in self.vms.iter_mut().zip(behaviours) {
            vm.behaviour = *behaviour;
        }
        if self.vms != before {
            self.core.configure(&self.vms);
        }
    }

    /// Gives each VM class ls or batch.
    pub fn set_classes(&mut self, ls: &[bool]) {
        let had_ls = self.has_ls();
        let before = self.vms.clone();
        for (vm, ls) in self.vms.iter_mut().zip(ls) {
            vm.params.class = match ls {
                true => Class::Ls,
                false => Class::Batch,
            };
        }
        if self.vms == before {
            return;
        }
        if had_ls != self.has_ls() {
            *self.core.scheduler_mut() = scheduler(self.has_ls());
        }
        self.core.configure(&self.vms);
    }

    fn has_ls(&self) -> bool {
        self.vms.iter().any(|vm| vm.params.class == Class::Ls)
    }

    /// Lets time pass, and returns what each VM got.
    ///
    /// # Errors
    /// [`NoProgress`] if the scheduler lets no VM run.
    pub fn run(&mut self, time: Nanos) -> Result<Vec<Usage>, NoProgress> {
        let report = self.core.report();
        let before: Vec<_> = report.vms.iter().map(|vm| (vm.ran, vm.waited)).collect();
        let end = self.core.now() + time;
        let report = self.core.run_until(end)?;
        let vms = report.vms.iter().zip(before).zip(&mut self.read);
        let usage = vms.map(|((vm, (ran, waited)), read)| {
            let got = Usage {
                run: vm.ran - ran,
                wait: vm.waited - waited,
                wakes: vm.wake_waits[read.0..].to_vec(),
                preempted: vm.preempt_waits[read.1..].to_vec(),
            };
            *read = (vm.wake_waits.len(), vm.preempt_waits.len());
            got
        });
        Ok(usage.collect())
    }
}
