// SPDX-License-Identifier: Apache-2.0
//! Virtual functions of the simulated NIC: `policy::lanes` decides who has one, from what the simulated meter sees.

use std::collections::BTreeSet;

use viola_policy::lanes::{
    Action, Config, CpuTime, Lanes, Nic, Observed, Pool, Samples, Setting, di2,
};
use viola_policy::slices::{MS, Nanos};

use crate::net::Packet;
use crate::world::{Workload, World};

pub mod compare;

/// Who gives VFs out.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Giver {
    /// `policy::lanes`.
    #[default]
    Policy,
    /// Nobody after the start: the first VMs have them for good.
    Fixed,
    /// The next VMs have them after this time, ns, and so on.
    Turns(Nanos),
    /// One who knows the packets a second of each VM in each phase of this length (ns), and begins in time.
    Oracle((Nanos, Vec<Vec<u64>>)),
}

/// How VFs are given out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LaneSetup {
    /// VFs there are.
    pub vfs: u32,
    /// Time between two decisions, ns.
    pub every: Nanos,
    /// Time between two samples of the packets, ns.
    pub sample: Nanos,
    /// Samples that a decision looks back on.
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

struct Seen {
    samples: Samples,
    packets: u64,
    /// Since the last decision: run time and waiting time that were told.
    ran: Nanos,
    waited: Nanos,
    di2: f64,
}

/// The control loop of lanes on the simulated host.
pub struct LaneControl {
    setup: LaneSetup,
    giver: Giver,
    lanes: Lanes,
    /// Who holds a VF where the policy does not decide.
    given: BTreeSet<u32>,
    owner: usize,
    seen: Vec<Seen>,
    decided: Nanos,
    switches: u64,
}

const SAMPLE: u64 = 0;
const DECIDE: u64 = 1;
/// Above: a VM's VF is ready.
const READY: u64 = 2;

impl LaneControl {
    /// Nobody has a VF.
    pub fn new(setup: LaneSetup) -> Self {
        Self::given_by(setup, Giver::Policy)
    }

    /// The same, given out by somebody else.
    pub fn given_by(setup: LaneSetup, giver: Giver) -> Self {
        Self {
            lanes: Lanes::new(setup.config),
            setup,
            giver,
            given: BTreeSet::new(),
            owner: 0,
            seen: Vec::new(),
            decided: 0,
            switches: 0,
        }
    }

    fn sample(&mut self, world: &World) {
        for (seen, nic) in self.seen.iter_mut().zip(&world.nics) {
            let packets = nic.came + nic.sent;
            seen.samples.push(packets - seen.packets);
            seen.packets = packets;
        }
    }

    /// Who is to have a VF from now on, where the policy does not decide.
    fn wanted(&self, now: Nanos, vms: u32) -> Option<BTreeSet<u32>> {
        let vfs = self.setup.vfs.min(vms);
        match &self.giver {
            Giver::Policy => None,
            Giver::Fixed => Some((0..vfs).collect()),
            Giver::Turns(every) => {
                let turn = now / (*every).max(1);
                let first = turn * u64::from(vfs) % u64::from(vms.max(1));
                Some((0..vfs).map(|k| (first as u32 + k) % vms).collect())
            }
            Giver::Oracle((phase, rates)) => {
                // a VF that is asked for now is there when it is attached
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

    /// Gives and takes so that these have one.
    fn give(&mut self, world: &mut World, wanted: BTreeSet<u32>) {
        for &vm in self.given.difference(&wanted) {
            world.nics[vm as usize].vf = false;
        }
        for &vm in wanted.difference(&self.given) {
            self.switches += 1;
            let at = world.now + self.setup.attach;
            world.call(at, self.owner, READY + u64::from(vm));
        }
        self.given = wanted;
    }

    fn decide(&mut self, world: &mut World) {
        let vms = u32::try_from(world.vms.len()).unwrap_or(u32::MAX);
        match self.wanted(world.now, vms) {
            Some(wanted) => self.give(world, wanted),
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
        let observed: Vec<Observed> = (0u32..)
            .zip(&self.seen)
            .map(|(vm, seen)| Observed {
                nic: Nic { vm, network: 0 },
                di2: seen.di2,
                traffic: seen.samples.traffic(),
                setting: Setting::Auto,
                most: 1,
                attach: self.setup.attach,
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
                    world.call(at, self.owner, READY + u64::from(nic.vm));
                }
            }
        }
    }
}

impl Workload for LaneControl {
    fn start(&mut self, world: &mut World, owner: usize) {
        self.owner = owner;
        let most = self.setup.samples;
        self.seen.resize_with(world.vms.len(), || Seen {
            samples: Samples::new(most),
            packets: 0,
            ran: 0,
            waited: 0,
            di2: 0.0,
        });
        world.call(self.setup.sample, owner, SAMPLE);
        world.call(self.setup.every, owner, DECIDE);
    }

    fn call(&mut self, world: &mut World, tag: u64) {
        match tag {
            SAMPLE => {
                self.sample(world);
                world.call(world.now + self.setup.sample, self.owner, SAMPLE);
            }
            DECIDE => {
                self.decide(world);
                world.call(world.now + self.setup.every, self.owner, DECIDE);
            }
            vm => {
                // Unless it was taken away meanwhile.
                let vm = (vm - READY) as u32;
                let held =
                    self.given.contains(&vm) || self.lanes.holders().any(|(_, nic)| nic.vm == vm);
                world.nics[vm as usize].vf = held;
            }
        }
    }

    fn received(&mut self, _world: &mut World, _vm: usize, _packet: Packet) {}

    fn figures(&self, world: &World) -> Vec<(String, f64)> {
        let held = world.nics.iter().filter(|n| n.vf).count();
        vec![
            ("switches".into(), self.switches as f64),
            ("VFs in use".into(), held as f64),
        ]
    }
}
