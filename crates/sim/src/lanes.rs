// SPDX-License-Identifier: Apache-2.0
//! Virtual functions of the simulated NIC. `policy::lanes` assigns them from what the simulated meter measures.

use std::collections::BTreeSet;

use viola_policy::lanes::{
    Action, Config, CpuTime, Nic, NicObservation, Pool, Samples, Setting, VfScheduler, di2,
};
use viola_policy::slices::{MS, Nanos};

use crate::world::{Workload, World};

pub mod compare;

/// How VFs are assigned.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum VfAssignment {
    /// `policy::lanes` assigns them from the samples.
    #[default]
    Policy,
    /// The first VMs hold them for the whole run.
    Fixed,
    /// The next VMs hold them after each period of this length, ns.
    RoundRobin(Nanos),
    /// An oracle assigns them in time for each phase. It knows the length of a phase (ns) and, by
    /// phase, the packets per second of each VM.
    Oracle((Nanos, Vec<Vec<u64>>)),
}

/// The VFs of a host and their control loop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LaneSetup {
    /// Number of VFs.
    pub vfs: u32,
    /// Interval between decisions, ns.
    pub every: Nanos,
    /// Interval between samples of the packets, ns.
    pub sample: Nanos,
    /// Number of samples that a decision uses.
    pub samples: usize,
    /// Time from a decision until the VM uses its VF, ns.
    pub attach: Nanos,
    /// The policy's settings.
    pub config: Config,
}

impl Default for LaneSetup {
    fn default() -> Self {
        Self {
            vfs: 8,
            every: 100 * MS,
            sample: 10 * MS,
            samples: 100,
            attach: 300 * MS,
            config: Config::default(),
        }
    }
}

struct VmSample {
    samples: Samples,
    packets: u64,
    /// Run time and waiting time at the last decision, ns.
    ran: Nanos,
    waited: Nanos,
    di2: f64,
}

/// The control loop of lanes on the simulated host.
pub struct LaneControl {
    setup: LaneSetup,
    assignment: VfAssignment,
    lanes: VfScheduler,
    /// Holders of a VF, if the policy does not decide.
    assigned: BTreeSet<u32>,
    owner: usize,
    seen: Vec<VmSample>,
    decided: Nanos,
    switches: u64,
}

const SAMPLE: u64 = 0;
const DECIDE: u64 = 1;
/// A tag of `READY` + n says that the VF of VM n is attached.
const READY: u64 = 2;

impl LaneControl {
    /// A control loop that lets the policy decide.
    pub fn new(setup: LaneSetup) -> Self {
        Self::with_assignment(setup, VfAssignment::Policy)
    }

    /// A control loop with another way to assign VFs.
    pub fn with_assignment(setup: LaneSetup, assignment: VfAssignment) -> Self {
        Self {
            lanes: VfScheduler::new(setup.config),
            setup,
            assignment,
            assigned: BTreeSet::new(),
            owner: 0,
            seen: Vec::new(),
            decided: 0,
            switches: 0,
        }
    }

    fn sample(&mut self, world: &World) {
        for (seen, nic) in self.seen.iter_mut().zip(&world.nics) {
            let packets = nic.arrived + nic.sent;
            seen.samples.push(packets - seen.packets);
            seen.packets = packets;
        }
    }

    /// The VMs that should hold a VF from now on; `None` if the policy decides.
    fn wanted(&self, now: Nanos, vms: u32) -> Option<BTreeSet<u32>> {
        let vfs = self.setup.vfs.min(vms);
        match &self.assignment {
            VfAssignment::Policy => None,
            VfAssignment::Fixed => Some((0..vfs).collect()),
            VfAssignment::RoundRobin(every) => {
                let turn = now / (*every).max(1);
                let first = turn * u64::from(vfs) % u64::from(vms.max(1));
                Some((0..vfs).map(|k| (first as u32 + k) % vms).collect())
            }
            VfAssignment::Oracle((phase, rates)) => {
                // A VF that is granted now is in use after it is attached.
                let at = ((now + self.setup.attach) / (*phase).max(1)) as usize;
                let rate = |vm: u32| {
                    let of = rates.get(vm as usize);
                    of.and_then(|of| of.get(at).or(of.last()))
                        .copied()
                        .unwrap_or(0)
                };
                let mut order: Vec<u32> = (0..vms).collect();
                order.sort_by_key(|&vm| (std::cmp::Reverse(rate(vm)), vm));
                order.truncate(vfs as usize);
                Some(order.into_iter().collect())
            }
        }
    }

    /// Gives these VMs a VF and takes the others' away.
    fn assign(&mut self, world: &mut World, wanted: BTreeSet<u32>) {
        for &vm in self.assigned.difference(&wanted) {
            world.nics[vm as usize].vf = false;
        }
        for &vm in wanted.difference(&self.assigned) {
            self.switches += 1;
            let at = world.now + self.setup.attach;
            world.set_timer(at, self.owner, READY + u64::from(vm));
        }
        self.assigned = wanted;
    }

    fn decide(&mut self, world: &mut World) {
        let vms = u32::try_from(world.vms.len()).unwrap_or(u32::MAX);
        match self.wanted(world.now, vms) {
            Some(wanted) => self.assign(world, wanted),
            None => self.decide_by_policy(world),
        }
    }

    fn decide_by_policy(&mut self, world: &mut World) {
        world.cpus.settle(world.now);
        let window = world.now - self.decided;
        self.decided = world.now;
        for (seen, vm) in self.seen.iter_mut().zip(&world.vms) {
            let mut vcpus = vec![world.cpus.usage(vm.app)];
            if vm.irq != vm.app {
                vcpus.push(world.cpus.usage(vm.irq));
            }
            let ran: Nanos = vcpus.iter().map(|u| u.ran).sum();
            let waited: Nanos = vcpus.iter().map(|u| u.waited).sum();
            let gotten = ran - seen.ran;
            let wanted = gotten + (waited - seen.waited);
            let all = window * vcpus.len() as u64;
            seen.di2 = di2(&[CpuTime {
                gotten,
                blocked: all.saturating_sub(wanted),
            }]);
            (seen.ran, seen.waited) = (ran, waited);
        }
        let observed: Vec<NicObservation> = (0u32..)
            .zip(&self.seen)
            .map(|(vm, seen)| NicObservation {
                nic: Nic { vm, network: 0 },
                di2: seen.di2,
                traffic: seen.samples.traffic(),
                setting: Setting::Auto,
                max_vfs: 1,
                attach_time: self.setup.attach,
            })
            .collect();
        let pool = Pool {
            id: 0,
            network: 0,
            vfs: self.setup.vfs,
        };
        for action in self.lanes.decide(world.now, &[pool], &observed).actions {
            match action {
                Action::Revoke { nic, .. } => world.nics[nic.vm as usize].vf = false,
                Action::Grant { nic, .. } => {
                    self.switches += 1;
                    let at = world.now + self.setup.attach;
                    world.set_timer(at, self.owner, READY + u64::from(nic.vm));
                }
            }
        }
    }
}

impl Workload for LaneControl {
    fn start(&mut self, world: &mut World, owner: usize) {
        self.owner = owner;
        let max_samples = self.setup.samples;
        self.seen.resize_with(world.vms.len(), || VmSample {
            samples: Samples::new(max_samples),
            packets: 0,
            ran: 0,
            waited: 0,
            di2: 0.0,
        });
        world.set_timer(self.setup.sample, owner, SAMPLE);
        world.set_timer(self.setup.every, owner, DECIDE);
    }

    fn on_timer(&mut self, world: &mut World, tag: u64) {
        match tag {
            SAMPLE => {
                self.sample(world);
                world.set_timer(world.now + self.setup.sample, self.owner, SAMPLE);
            }
            DECIDE => {
                self.decide(world);
                world.set_timer(world.now + self.setup.every, self.owner, DECIDE);
            }
            vm => {
                // Unless the VF was revoked in the meantime.
                let vm = (vm - READY) as u32;
                let held = self.assigned.contains(&vm)
                    || self.lanes.holders().any(|(_, nic)| nic.vm == vm);
                world.nics[vm as usize].vf = held;
            }
        }
    }

    fn figures(&self, world: &World) -> Vec<(String, f64)> {
        let held = world.nics.iter().filter(|n| n.vf).count();
        vec![
            ("switches".into(), self.switches as f64),
            ("VFs in use".into(), held as f64),
        ]
    }
}
