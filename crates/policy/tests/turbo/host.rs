// SPDX-License-Identifier: Apache-2.0
//! A simulated host with cores of both pools ([`viola_policy::slices::simulate::Core`] each), whose drivers exchange
//! what VMs ran on other cores. Equal inputs give equal reports.

use viola_policy::slices::simulate::{Behaviour, Core, Driver, NoProgress, Report, SimVm};
use viola_policy::slices::{Class, Nanos, Params};
use viola_policy::turbo::{
    OtherCoreUsage, PoolScheduler, RegularConfig, RegularCore, TurboConfig, TurboCore, portion,
};

/// A VM on the simulated host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostVm {
    /// Identity, unique.
    pub id: u32,
    /// Proportional share over both pools, 1..=65535.
    pub weight: u32,
    /// Cap on both pools together, thousandths of one core.
    pub cap_permille: Option<u32>,
    /// Its regular vCPUs: the regular core (from 0) and the behaviour; at most one per core.
    pub regular: Vec<(usize, Behaviour)>,
    /// Its turbo vCPU: the turbo core (from 0) and the behaviour.
    pub turbo: Option<(usize, Behaviour)>,
}

/// The simulated host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostConfig {
    /// Number of regular cores.
    pub regular_cores: usize,
    /// Number of turbo cores.
    pub turbo_cores: usize,
    /// Settings of the regular cores.
    pub regular: RegularConfig,
    /// Settings of the turbo cores.
    pub turbo: TurboConfig,
    /// Slot of turbo vCPUs, 20 us ..= 10 ms.
    pub slot: Nanos,
    /// Cost and accuracy of driving the schedulers.
    pub driver: Driver,
    /// Interval of the exchange between cores, ns, more than 0.
    pub exchange: Nanos,
    /// Seed of all random numbers.
    pub seed: u64,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self {
            regular_cores: 1,
            turbo_cores: 1,
            regular: RegularConfig::default(),
            turbo: TurboConfig::default(),
            slot: viola_policy::turbo::TURBO_SLOT,
            driver: Driver::default(),
            exchange: 1_000_000,
            seed: 1,
        }
    }
}

struct OneCore {
    core: Core<Box<dyn PoolScheduler>>,
    turbo: bool,
    /// Index of the VM and its run time at the last exchange, in the scheduler's order.
    vms: Vec<(usize, Nanos)>,
}

/// Cores of both pools. See the module's text.
pub struct Host {
    cores: Vec<OneCore>,
    vms: Vec<HostVm>,
    exchange: Nanos,
    now: Nanos,
    /// By VM: all it ever ran on turbo cores.
    on_turbo: Vec<Nanos>,
    /// By VM: all it was ever due on regular cores.
    due: Vec<Nanos>,
}

impl Host {
    /// A host with these VMs at time 0. vCPUs on missing cores are left out.
    pub fn new(config: HostConfig, vms: &[HostVm]) -> Self {
        let regular = (0..config.regular_cores).map(|k| (false, k));
        let turbo = (0..config.turbo_cores).map(|k| (true, k));
        let cores = regular
            .chain(turbo)
            .enumerate()
            .map(|(n, (turbo, k))| one_core(&config, vms, turbo, k, n as u64))
            .collect();
        Self {
            cores,
            vms: vms.to_vec(),
            exchange: config.exchange.max(1),
            now: 0,
            on_turbo: vec![0; vms.len()],
            due: vec![0; vms.len()],
        }
    }

    /// Runs until simulated time `end`, ns.
    ///
    /// # Errors
    /// [`NoProgress`] if a scheduler does not let time pass.
    pub fn run_until(&mut self, end: Nanos) -> Result<(), NoProgress> {
        while self.now < end {
            self.now = end.min(self.now + self.exchange);
            for one in &mut self.cores {
                one.core.run_until(self.now)?;
            }
            self.tell();
        }
        Ok(())
    }

    fn tell(&mut self) {
        let mut ran = vec![0; self.vms.len()];
        let mut turbo = vec![0; self.vms.len()];
        let mut dues = vec![(0, false); self.vms.len()];
        let mut here: Vec<Vec<Nanos>> = Vec::new();
        for one in &mut self.cores {
            let report = one.core.report();
            let mut deltas = Vec::new();
            for (i, last) in &mut one.vms {
                let all = report.vm(self.vms[*i].id).map_or(0, |vm| vm.ran);
                let delta = all - *last;
                *last = all;
                ran[*i] += delta;
                turbo[*i] += if one.turbo { delta } else { 0 };
                deltas.push(delta);
            }
            here.push(deltas);
            for (k, (i, _)) in one.vms.iter().enumerate() {
                let (due, waits) = one.core.scheduler_mut().due(k);
                dues[*i] = (dues[*i].0 + due, dues[*i].1 || waits);
            }
        }
        for (one, deltas) in self.cores.iter_mut().zip(here) {
            let told: Vec<_> = std::iter::zip(&one.vms, deltas)
                .map(|(&(i, _), delta)| {
                    let all = self.vms[i].regular.len() as u32;
                    let (before, after) = (self.on_turbo[i], self.on_turbo[i] + turbo[i]);
                    OtherCoreUsage {
                        turbo: portion(after, 1, all) - portion(before, 1, all),
                        total: ran[i] - delta,
                        due: dues[i].0 - self.due[i],
                        waits: dues[i].1,
                    }
                })
                .collect();
            one.core.scheduler_mut().add_other_cores(&told);
        }
        self.due = dues.into_iter().map(|(due, _)| due).collect();
        for (sum, turbo) in self.on_turbo.iter_mut().zip(turbo) {
            *sum += turbo;
        }
    }

    /// Cores (1.0 = one) of the regular and of the turbo pool that a VM used on average.
    pub fn used(&self, id: u32) -> (f64, f64) {
        let mut used = (0.0, 0.0);
        for one in &self.cores {
            let share = one.core.report().share(id);
            if one.turbo {
                used.1 += share;
            } else {
                used.0 += share;
            }
        }
        used
    }

    /// The reports of all cores, regular cores first.
    pub fn reports(&self) -> impl Iterator<Item = &Report> {
        self.cores.iter().map(|one| one.core.report())
    }
}

fn one_core(config: &HostConfig, vms: &[HostVm], turbo: bool, k: usize, n: u64) -> OneCore {
    let mut here = Vec::new();
    let mut sims = Vec::new();
    for (i, vm) in vms.iter().enumerate() {
        let places = if turbo {
            vm.turbo.as_slice()
        } else {
            vm.regular.as_slice()
        };
        for &(_, behaviour) in places.iter().filter(|&&(core, _)| core == k) {
            here.push((i, 0));
            sims.push(SimVm {
                params: Params {
                    id: vm.id,
                    class: if turbo { Class::Ls } else { Class::Batch },
                    weight: vm.weight,
                    cap_permille: vm.cap_permille,
                    microslice: config.slot,
                },
                behaviour,
            });
        }
    }
    let scheduler: Box<dyn PoolScheduler> = if turbo {
        Box::new(TurboCore::new(config.turbo))
    } else {
        Box::new(RegularCore::new(config.regular))
    };
    OneCore {
        core: Core::new(scheduler, &sims, config.driver, config.seed.wrapping_add(n)),
        turbo,
        vms: here,
    }
}
