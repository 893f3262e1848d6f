// SPDX-License-Identifier: Apache-2.0
//! A host as it is described, made into one that runs.

use viola_policy::slices::{
    Class, Credit, DEFAULT_WEIGHT, Interleaved, InterleavedConfig, MS, Machine, Nanos, Paper,
    Params, US,
};
use viola_policy::turbo::{RegularConfig, RegularCore, TURBO_SLOT, TurboConfig, TurboCore};

use crate::cpu::{Cpus, Hog, Pool};
use crate::lanes::{LaneControl, LaneSetup};
use crate::net::{Nic, NicCosts};
use crate::sched::{Driver, Eevdf, EevdfConfig, Scheduler, Slots, Xen, XenConfig};
use crate::work::{GuestCosts, Lookbusy};
use crate::world::{Help, Simulation, Vm, Wires, Workload, World};

/// Who schedules the vCPUs of a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// `policy`'s credit scheduler with slices of this length: 30 ms, or uniformly short.
    Credit {
        /// Slice, ns.
        slice: Nanos,
        /// Whether waking VMs are boosted.
        boost: bool,
    },
    /// Xen's own credit scheduler, as the papers' hosts had it.
    Xen(XenConfig),
    /// vSlicer as the dissertation has it, T_NLSVM in ns.
    Paper {
        /// T_NLSVM.
        slice: Nanos,
    },
    /// viola's slices.
    Interleaved {
        /// Slice of batch VMs, ns.
        batch_slice: Nanos,
    },
    /// Stock Linux.
    Eevdf,
    /// The same with settings of its own.
    Linux(EevdfConfig),
    /// vTurbo's two pools: regular cores, then turbo cores.
    Turbo {
        /// Slice of the regular cores, ns.
        slice: Nanos,
        /// Slot of the turbo cores, ns.
        slot: Nanos,
        /// What a VM keeps of its regular core in each 150 ms whatever its turbo vCPU uses, ns. The papers have none.
        floor: Nanos,
        /// What a VM keeps of its share for its regular vCPUs while they wait, thousandths. The papers have none.
        reserve: u32,
    },
}

impl Policy {
    /// The papers' baseline.
    pub const XEN: Policy = Policy::Credit {
        slice: 30 * MS,
        boost: true,
    };
    /// vTurbo as its paper sets it.
    pub const VTURBO: Policy = Policy::Turbo {
        slice: 30 * MS,
        slot: TURBO_SLOT,
        floor: 0,
        reserve: 0,
    };

    fn scheduler(self, turbo: bool, cost: Nanos) -> Box<dyn Scheduler + Send> {
        let alone = |m: Box<dyn Machine + Send>, io| -> Box<dyn Scheduler + Send> {
            Box::new(Slots::new(Driver::Alone(m), cost, io))
        };
        match self {
            Policy::Credit { slice, boost } => {
                let mut m = Credit::new(boost);
                m.set_slice(slice);
                alone(Box::new(m), false)
            }
            Policy::Xen(config) => Box::new(Xen::new(config)),
            Policy::Paper { slice } => alone(Box::new(Paper::new(slice)), false),
            Policy::Interleaved { batch_slice } => {
                let config = InterleavedConfig {
                    batch_slice,
                    ..InterleavedConfig::default()
                };
                alone(Box::new(Interleaved::new(config)), true)
            }
            Policy::Eevdf => Box::new(Eevdf::new(EevdfConfig::default())),
            Policy::Linux(config) => Box::new(Eevdf::new(config)),
            Policy::Turbo {
                slice,
                floor,
                reserve,
                ..
            } => {
                let driver = if turbo {
                    let config = TurboConfig {
                        reserve,
                        ..TurboConfig::default()
                    };
                    Driver::Pooled(Box::new(TurboCore::new(config)))
                } else {
                    let config = RegularConfig {
                        slice,
                        floor,
                        ..RegularConfig::default()
                    };
                    Driver::Pooled(Box::new(RegularCore::new(config)))
                };
                Box::new(Slots::new(driver, cost, false))
            }
        }
    }
}

/// A VM of one vCPU, with a turbo vCPU where the policy has turbo cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VmSetup {
    /// Latency-sensitive or not.
    pub class: Class,
    /// Share.
    pub weight: u32,
    /// Cap, thousandths of a core.
    pub cap_permille: Option<u32>,
    /// Length of its microslices, ns.
    pub microslice: Nanos,
    /// Regular core that it is on, from 0.
    pub core: usize,
    /// Turbo core of its turbo vCPU, from 0.
    pub turbo_core: usize,
    /// What it computes besides.
    pub hog: Hog,
    /// Time it needs for its caches after another VM ran, ns.
    pub refill: Nanos,
}

impl Default for VmSetup {
    fn default() -> Self {
        Self {
            class: Class::Batch,
            weight: DEFAULT_WEIGHT,
            cap_permille: None,
            microslice: 5 * MS,
            core: 0,
            turbo_core: 0,
            hog: Hog::None,
            refill: 0,
        }
    }
}

/// A host.
#[derive(Debug, Clone, PartialEq)]
pub struct HostSetup {
    /// Cores for VMs (regular cores).
    pub cores: usize,
    /// Turbo cores; only with [`Policy::Turbo`].
    pub turbo_cores: usize,
    /// Who schedules.
    pub policy: Policy,
    /// VMs.
    pub vms: Vec<VmSetup>,
    /// Bandwidth of the NIC, bits per second.
    pub bits: u64,
    /// Longest queue of the wire and of the host's packet work, ns.
    pub queue: Nanos,
    /// What receiving costs.
    pub nic: NicCosts,
    /// What a guest's own work for I/O costs.
    pub costs: GuestCosts,
    /// A switch from one vCPU to another, ns.
    pub switch: Nanos,
    /// A decision of the scheduler, ns.
    pub decision: Nanos,
    /// VMs begin to compute at a random moment within this, ns, so that cores are not in step.
    pub phase: Nanos,
    /// Data paths.
    pub help: Help,
    /// VFs of the NIC, and who gets them; `None`: it has none.
    pub lanes: Option<LaneSetup>,
}

impl Default for HostSetup {
    fn default() -> Self {
        Self {
            cores: 1,
            turbo_cores: 0,
            policy: Policy::Eevdf,
            vms: Vec::new(),
            bits: 1_000_000_000,
            queue: 5 * MS,
            nic: NicCosts {
                ring: 256,
                queue: 0,
                interrupt: 2 * US,
                packet: 1_500,
                budget: 64,
                host_packet: US,
                coalesce: 0,
                slow: None,
                merge: 0,
            },
            costs: GuestCosts {
                call: 2 * US,
                wake: 0,
                copy: 0.3,
                send: US,
            },
            switch: 2 * US,
            decision: 0,
            phase: 0,
            help: Help::default(),
            lanes: None,
        }
    }
}

impl HostSetup {
    /// Whether a VM that wants so many percent of a core cannot have them, as all that compute there share it fairly.
    fn starved(&self, core: usize, percent: u32) -> bool {
        let wants = |vm: &VmSetup| match vm.hog {
            Hog::None => 0.0,
            Hog::Busy => 100.0,
            Hog::Lookbusy(percent) => f64::from(percent),
            Hog::Duty { period, on } => 100.0 * on as f64 / period.max(1) as f64,
        };
        let on = self.vms.iter().filter(|vm| vm.core == core);
        // With this much for each of them at most, is the core full?
        on.map(|vm| wants(vm).min(f64::from(percent))).sum::<f64>() > 100.0
    }

    /// Makes it run, with these workloads (which number VMs as this list does).
    pub fn simulation(
        &self,
        mut workloads: Vec<Box<dyn Workload + Send>>,
        seed: u64,
    ) -> Simulation {
        let turbo = matches!(self.policy, Policy::Turbo { .. }) && self.turbo_cores > 0;
        let mut cpus = Cpus::default();
        cpus.switch_cost = self.switch;
        for _ in 0..self.cores {
            let pool = if turbo { Pool::Regular } else { Pool::Alone };
            cpus.add_core(self.policy.scheduler(false, self.decision), pool);
        }
        if turbo {
            for _ in 0..self.turbo_cores {
                cpus.add_core(self.policy.scheduler(true, self.decision), Pool::Turbo);
            }
        }
        let (mut vms, mut nics) = (Vec::new(), Vec::new());
        for (k, vm) in self.vms.iter().enumerate() {
            let params = Params {
                id: k as u32,
                class: if turbo { Class::Batch } else { vm.class },
                weight: vm.weight,
                cap_permille: vm.cap_permille,
                microslice: vm.microslice,
            };
            let app = cpus.add_vcpu(k, vm.core, params, vm.refill);
            let irq = match self.policy {
                Policy::Turbo { slot, .. } if turbo => {
                    let class = Class::Ls;
                    let params = Params {
                        class,
                        microslice: slot,
                        ..params
                    };
                    cpus.add_vcpu(k, self.cores + vm.turbo_core, params, 0)
                }
                _ => app,
            };
            vms.push(Vm { irq, app });
            nics.push(Nic::new(self.nic, irq));
        }
        let mut world = World::new(cpus, Wires::new(self.bits, self.queue), turbo, seed);
        world.help = self.help;
        world.vms = vms;
        world.nics = nics;
        for (k, vm) in self.vms.iter().enumerate() {
            if let Hog::Lookbusy(percent) = vm.hog {
                let starved = self.starved(vm.core, percent);
                workloads.push(Box::new(Lookbusy::new(k, percent, starved)));
            } else if vm.hog != Hog::None {
                let at = world.random.within(0, self.phase);
                world.hogs.push((at, world.vms[k].app, vm.hog));
            }
        }
        if let Some(lanes) = &self.lanes {
            workloads.push(Box::new(LaneControl::new(*lanes)));
        }
        Simulation::new(world, workloads)
    }
}

/// lookbusy at so many percent of a core. 100 is always.
pub fn lookbusy(percent: u64) -> Hog {
    match percent {
        0 => Hog::None,
        100.. => Hog::Busy,
        _ => Hog::Lookbusy(percent as u32),
    }
}
