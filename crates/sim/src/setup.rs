// SPDX-License-Identifier: Apache-2.0
//! Descriptions of hosts, and the simulations that they become.

use viola_policy::slices::{
    Class, CoreScheduler, Credit, DEFAULT_WEIGHT, Interleaved, InterleavedConfig, MS, Nanos, Paper,
    Params, US,
};
use viola_policy::turbo::{RegularConfig, RegularCore, TURBO_SLOT, TurboConfig, TurboCore};

use crate::cpu::{CpuLoad, Cpus, Pool};
use crate::lanes::{LaneControl, LaneSetup};
use crate::net::{Nic, NicCosts};
use crate::sched::{Eevdf, EevdfConfig, PolicyCore, PolicyDriver, Scheduler, Xen, XenConfig};
use crate::work::{GuestCosts, Lookbusy};
use crate::world::{DataPaths, Simulation, Vm, Wires, Workload, World};

/// The scheduler of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// The credit scheduler of `viola-policy` with slices of this length: 30 ms, or uniformly short.
    Credit {
        /// Slice, ns.
        slice: Nanos,
        /// Whether waking VMs are boosted.
        boost: bool,
    },
    /// Xen's own credit scheduler, as on the papers' hosts.
    Xen(XenConfig),
    /// vSlicer as in the dissertation.
    Paper {
        /// T_NLSVM, ns.
        slice: Nanos,
    },
    /// viola's slices.
    Interleaved {
        /// Slice of batch VMs, ns.
        batch_slice: Nanos,
    },
    /// Stock Linux.
    Eevdf,
    /// Stock Linux with other settings.
    Linux(EevdfConfig),
    /// vTurbo's two pools: regular cores, then turbo cores.
    Turbo {
        /// Slice of the regular cores, ns.
        slice: Nanos,
        /// Slot of the turbo cores, ns.
        slot: Nanos,
        /// Minimum run of a VM on its regular core in each 150 ms, ns; 0 in the papers.
        floor: Nanos,
        /// Part of its share that a VM keeps for its regular vCPUs while they wait, thousandths; 0 in the papers.
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
        let alone = |m: Box<dyn CoreScheduler + Send>, io| -> Box<dyn Scheduler + Send> {
            Box::new(PolicyDriver::new(PolicyCore::Single(m), cost, io))
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
                    PolicyCore::Pooled(Box::new(TurboCore::new(config)))
                } else {
                    let config = RegularConfig {
                        slice,
                        floor,
                        ..RegularConfig::default()
                    };
                    PolicyCore::Pooled(Box::new(RegularCore::new(config)))
                };
                Box::new(PolicyDriver::new(driver, cost, false))
            }
        }
    }
}

/// A VM with one vCPU, and one turbo vCPU if the policy has turbo cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VmSetup {
    /// Scheduling class.
    pub class: Class,
    /// Weight, 1 ..= 65535.
    pub weight: u32,
    /// Cap, thousandths of a core.
    pub cap_permille: Option<u32>,
    /// Microslice, ns.
    pub microslice: Nanos,
    /// Its regular core, from 0.
    pub core: usize,
    /// The turbo core of its turbo vCPU, from 0.
    pub turbo_core: usize,
    /// Computing load.
    pub load: CpuLoad,
    /// Time to refill its caches after another VM ran, ns.
    pub refill: Nanos,
    /// Whether a second vCPU on the same core runs its interrupts and softirqs.
    pub irq_vcpu: bool,
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
            load: CpuLoad::None,
            refill: 0,
            irq_vcpu: false,
        }
    }
}

/// A host to be simulated.
#[derive(Debug, Clone, PartialEq)]
pub struct HostSetup {
    /// Cores for VMs (regular cores).
    pub cores: usize,
    /// Turbo cores; only with [`Policy::Turbo`].
    pub turbo_cores: usize,
    /// Scheduler.
    pub policy: Policy,
    /// VMs.
    pub vms: Vec<VmSetup>,
    /// Bandwidth of the NIC, bits per second.
    pub bits: u64,
    /// Maximum queue of the wire and of the host's packet work, ns.
    pub queue: Nanos,
    /// Costs of receiving.
    pub nic: NicCosts,
    /// Costs of the guests' own I/O work.
    pub costs: GuestCosts,
    /// Cost of a switch from one vCPU to another, ns.
    pub switch: Nanos,
    /// Cost of a decision of the scheduler, ns.
    pub decision: Nanos,
    /// Computing loads start at a random time within this, ns, so that cores are not in step.
    pub phase: Nanos,
    /// Data paths.
    pub paths: DataPaths,
    /// VFs of the NIC and how they are assigned; `None`: no VFs.
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
            paths: DataPaths::default(),
            lanes: None,
        }
    }
}

impl HostSetup {
    /// Whether a load of `percent` of this core does not get that much, because the loads there share it fairly.
    fn starved(&self, core: usize, percent: u32) -> bool {
        let wants = |vm: &VmSetup| match vm.load {
            CpuLoad::None => 0.0,
            CpuLoad::Busy => 100.0,
            CpuLoad::Lookbusy(percent) => f64::from(percent),
            CpuLoad::Duty { period, on } => 100.0 * on as f64 / period.max(1) as f64,
        };
        let on = self.vms.iter().filter(|vm| vm.core == core);
        // The core is full even if each load gets at most `percent`.
        on.map(|vm| wants(vm).min(f64::from(percent))).sum::<f64>() > 100.0
    }

    /// Makes a simulation with these workloads, which number VMs in the order of [`HostSetup::vms`].
    pub fn simulation(
        &self,
        mut workloads: Vec<Box<dyn Workload + Send>>,
        seed: u64,
    ) -> Simulation {
        let turbo = matches!(self.policy, Policy::Turbo { .. }) && self.turbo_cores > 0;
        let mut cpus = Cpus::default();
        cpus.switch_cost = self.switch;
        for _ in 0..self.cores {
            let pool = if turbo { Pool::Regular } else { Pool::Single };
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
            if vm.irq_vcpu {
                cpus.split(app);
            }
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
        world.paths = self.paths;
        world.vms = vms;
        world.nics = nics;
        for (k, vm) in self.vms.iter().enumerate() {
            if let CpuLoad::Lookbusy(percent) = vm.load {
                let starved = self.starved(vm.core, percent);
                workloads.push(Box::new(Lookbusy::new(k, percent, starved)));
            } else if vm.load != CpuLoad::None {
                let at = world.random.within(0, self.phase);
                world.loads.push((at, world.vms[k].app, vm.load));
            }
        }
        if let Some(lanes) = &self.lanes {
            workloads.push(Box::new(LaneControl::new(*lanes)));
        }
        Simulation::new(world, workloads)
    }
}

/// The load of lookbusy at `percent` percent of a core; 100 and more is [`CpuLoad::Busy`].
pub fn lookbusy(percent: u64) -> CpuLoad {
    match percent {
        0 => CpuLoad::None,
        100.. => CpuLoad::Busy,
        _ => CpuLoad::Lookbusy(percent as u32),
    }
}
