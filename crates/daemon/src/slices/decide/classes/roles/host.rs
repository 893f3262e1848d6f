// SPDX-License-Identifier: Apache-2.0
//! A simulated core that stock and viola schedule in turn, as the classes of its VMs ask for.

use viola_policy::slices::simulate::{Behaviour, Core, Driver, SimVm};
use viola_policy::slices::{
    Class, CoreScheduler, Credit, Interleaved, InterleavedConfig, MS, Nanos, Params,
};

use super::MICROSLICE;

/// A core whose VMs are scheduled by viola while one of them has class ls, and as by a stock kernel otherwise.
pub(super) struct Host {
    core: Core<Box<dyn CoreScheduler>>,
    vms: Vec<SimVm>,
    /// Number of wake-up waits and preemption waits that were read of each VM.
    read: Vec<(usize, usize)>,
}

/// What a VM got in some time.
#[derive(Clone, Default)]
pub(super) struct Usage {
    pub(super) run: Nanos,
    pub(super) wait: Nanos,
    pub(super) wakes: Vec<Nanos>,
    pub(super) preempted: Vec<Nanos>,
}

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
    pub(super) fn new(roles: &[Behaviour], seed: u64) -> Self {
        let vm = |(id, behaviour): (usize, &Behaviour)| SimVm {
            params: Params {
                id: id as u32,
                class: Class::Batch,
                weight: 256,
                cap_permille: None,
                microslice: MICROSLICE,
            },
            behaviour: *behaviour,
        };
        let vms: Vec<SimVm> = roles.iter().enumerate().map(vm).collect();
        Self {
            core: Core::new(scheduler(false), &vms, Driver::default(), seed),
            read: vec![(0, 0); vms.len()],
            vms,
        }
    }

    pub(super) fn set_roles(&mut self, roles: &[Behaviour]) {
        for (vm, behaviour) in self.vms.iter_mut().zip(roles) {
            vm.behaviour = *behaviour;
        }
        self.core.configure(&self.vms);
    }

    pub(super) fn set_classes(&mut self, ls: &[bool]) {
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
    pub(super) fn run(&mut self, time: Nanos) -> Vec<Usage> {
        let report = self.core.report();
        let before: Vec<_> = report.vms.iter().map(|vm| (vm.ran, vm.waited)).collect();
        let end = self.core.now() + time;
        let report = self.core.run_until(end).unwrap();
        let vms = report.vms.iter().zip(before).zip(&mut self.read);
        vms.map(|((vm, (ran, waited)), read)| {
            let got = Usage {
                run: vm.ran - ran,
                wait: vm.waited - waited,
                wakes: vm.wake_waits[read.0..].to_vec(),
                preempted: vm.preempt_waits[read.1..].to_vec(),
            };
            *read = (vm.wake_waits.len(), vm.preempt_waits.len());
            got
        })
        .collect()
    }
}
