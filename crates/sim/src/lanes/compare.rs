// SPDX-License-Identifier: Apache-2.0
//! Runs one shifting load with several ways to assign VFs: fixed, round robin, by the policy, and by an oracle. The
//! load resembles that of Raccoon's section 4.5: some VMs receive much, others little, and from time to time they swap
//! roles.

use std::sync::{Arc, Mutex, PoisonError};

use viola_policy::slices::{MS, Nanos, US};

use super::{LaneControl, LaneSetup, VfAssignment};
use crate::net::{NicCosts, Packet};
use crate::random::Random;
use crate::setup::{HostSetup, Policy, VmSetup};
use crate::work::{Durations, Udp, figure};
use crate::world::{Workload, World};

/// A load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Number of VMs.
    pub vms: u32,
    /// Number of VFs.
    pub vfs: u32,
    /// Number of VMs that receive much at a time.
    pub heavy: u32,
    /// Number of phases; VMs swap roles between them.
    pub phases: u32,
    /// Length of a phase, ns.
    pub phase: Nanos,
}

/// Packets per second of a VM that receives much, minimum and maximum.
const HEAVY: (u64, u64) = (4_000, 10_000);
/// Packets per second of other VMs, minimum and maximum.
const LIGHT: (u64, u64) = (20, 80);
/// Payload of a packet, bytes.
const BYTES: u32 = 512;
/// The host's time per packet of the paravirtual path: 25,000 packets/s, a third of the load.
const HOST_PACKET: Nanos = 40 * US;
/// The run records the delay of one packet in this many.
const NOTED: u64 = 16;

/// Result of a load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadOutcome {
    /// Bytes sent to the VMs.
    pub offered: u64,
    /// Bytes read by their processes.
    pub bytes: u64,
    /// Median time until a packet is in the guest, ms.
    pub p50_ms: f64,
    /// The same, 99th percentile.
    pub p99_ms: f64,
    /// Number of VFs granted.
    pub switches: u64,
}

impl Load {
    /// Packets per second of each VM in each phase, random by the seed.
    pub fn rates(&self, seed: u64) -> Vec<Vec<u64>> {
        let mut random = Random::new(seed);
        let mut rates = vec![Vec::new(); self.vms as usize];
        for _ in 0..self.phases {
            let mut order: Vec<(u64, usize)> = (0..rates.len())
                .map(|vm| (random.within(0, u64::MAX - 1), vm))
                .collect();
            order.sort_unstable();
            for (place, (_, vm)) in order.into_iter().enumerate() {
                let (least, most) = match place < self.heavy as usize {
                    true => HEAVY,
                    false => LIGHT,
                };
                rates[vm].push(random.within(least, most));
            }
        }
        rates
    }

    /// Runs the load with its number of VFs. An oracle gets the rates of the load.
    pub fn run(&self, assignment: VfAssignment, setup: LaneSetup, seed: u64) -> LoadOutcome {
        let rates = self.rates(seed);
        let cores = 8;
        let host = HostSetup {
            cores,
            policy: Policy::Interleaved {
                batch_slice: 4 * MS,
            },
            vms: (0..self.vms as usize)
                .map(|vm| VmSetup {
                    core: vm % cores,
                    ..VmSetup::default()
                })
                .collect(),
            nic: NicCosts {
                host_packet: HOST_PACKET,
                ..HostSetup::default().nic
            },
            ..HostSetup::default()
        };
        let seen = Arc::new(Mutex::new(Totals::default()));
        let mut work: Vec<Box<dyn Workload + Send>> = Vec::new();
        for (vm, rates) in rates.iter().enumerate() {
            work.push(Box::new(Shifting::new(vm, rates, self.phase, &host, &seen)));
        }
        let setup = LaneSetup {
            vfs: self.vfs,
            ..setup
        };
        let assignment = match assignment {
            VfAssignment::Oracle(_) => VfAssignment::Oracle((self.phase, rates)),
            other => other,
        };
        work.push(Box::new(LaneControl::with_assignment(setup, assignment)));
        let switches = work.len() - 1;
        let mut sim = host.simulation(work, seed);
        sim.run(self.phase * u64::from(self.phases));
        let switches = sim.workloads[switches].figures(&sim.world);
        let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        LoadOutcome {
            offered: seen.sent * u64::from(BYTES),
            bytes: seen.read * u64::from(BYTES),
            p50_ms: seen.times.quantile_ms(0.5),
            p99_ms: seen.times.quantile_ms(0.99),
            switches: figure(&switches, "switches") as u64,
        }
    }
}

/// Sums over all VMs.
#[derive(Debug, Default)]
struct Totals {
    sent: u64,
    read: u64,
    came: u64,
    times: Durations,
}

/// Datagrams at a rate that changes with each phase.
struct Shifting {
    udp: Udp,
    every: Vec<Nanos>,
    phase: Nanos,
    seen: Arc<Mutex<Totals>>,
}

impl Shifting {
    fn new(
        vm: usize,
        rates: &[u64],
        phase: Nanos,
        host: &HostSetup,
        seen: &Arc<Mutex<Totals>>,
    ) -> Self {
        let every: Vec<Nanos> = rates.iter().map(|r| 1_000 * MS / r.max(&1)).collect();
        let first = every.first().copied().unwrap_or(MS);
        Self {
            udp: Udp::new(vm, first, BYTES, 208 << 10, host.costs),
            every,
            phase,
            seen: seen.clone(),
        }
    }

    fn note(&self, note: impl FnOnce(&mut Totals)) {
        note(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Workload for Shifting {
    fn start(&mut self, world: &mut World, owner: usize) {
        self.udp.start(world, owner);
    }

    fn on_timer(&mut self, world: &mut World, tag: u64) {
        let phase = (world.now / self.phase.max(1)) as usize;
        if let Some(every) = self.every.get(phase) {
            self.udp.every = *every;
        }
        self.note(|seen| seen.sent += 1);
        self.udp.on_timer(world, tag);
    }

    fn on_packet(&mut self, world: &mut World, vm: usize, packet: Packet) {
        let time = world.now - packet.tag;
        self.note(|seen| {
            seen.came += 1;
            if seen.came.is_multiple_of(NOTED) {
                seen.times.push(time);
            }
        });
        self.udp.on_packet(world, vm, packet);
    }

    fn on_work_done(&mut self, world: &mut World, tag: u64) {
        let before = self.udp.counts().2;
        self.udp.on_work_done(world, tag);
        let read = self.udp.counts().2 - before;
        self.note(|seen| seen.read += read);
    }

    fn figures(&self, world: &World) -> Vec<(String, f64)> {
        self.udp.figures(world)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: Load = Load {
        vms: 16,
        vfs: 8,
        heavy: 9,
        phases: 3,
        phase: 4_000 * MS,
    };

    fn setup() -> LaneSetup {
        let mut setup = LaneSetup::default();
        setup.config.hold = 500 * MS;
        setup
    }

    #[test]
    fn equal_seeds_give_the_same_load_with_the_heavy_vms() {
        let rates = LOAD.rates(7);
        assert_eq!(rates, LOAD.rates(7));
        assert_ne!(rates, LOAD.rates(8));
        for phase in 0..3 {
            let heavy = rates.iter().filter(|r| r[phase] >= HEAVY.0).count();
            assert_eq!(heavy, 9);
        }
    }

    #[test]
    fn the_oracle_serves_most_and_the_policy_is_second() {
        let run = |assignment| LOAD.run(assignment, setup(), 3);
        let fixed = run(VfAssignment::Fixed);
        let turns = run(VfAssignment::RoundRobin(1_000 * MS));
        let policy = run(VfAssignment::Policy);
        let oracle = run(VfAssignment::Oracle(Default::default()));
        assert_eq!(fixed.switches, 8);
        assert!(turns.switches > 80, "{turns:?}");
        assert!(oracle.bytes >= policy.bytes, "{oracle:?} {policy:?}");
        assert!(policy.bytes > fixed.bytes, "{policy:?} {fixed:?}");
        assert!(policy.bytes > turns.bytes, "{policy:?} {turns:?}");
        assert!(oracle.bytes * 100 > oracle.offered * 97, "{oracle:?}");
    }

    #[test]
    fn equal_seeds_give_the_same_outcome() {
        let run = || LOAD.run(VfAssignment::Policy, setup(), 11);
        assert_eq!(run(), run());
    }
}
