// SPDX-License-Identifier: Apache-2.0
//! Processes that compute in step (Intel MPI benchmarks): in each round every process sends to some of the others and
//! waits for their messages. Processes that poll while they wait are VMs with a computing load (`CpuLoad::Busy`).

use std::collections::{BTreeMap, BTreeSet};

use viola_policy::slices::{MS, Nanos};

use super::GuestCosts;
use crate::cpu::Level;
use crate::net::Packet;
use crate::world::{Workload, World};

/// Communication pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// Every process to every other one.
    Alltoall,
    /// Every process to the next one, in a ring.
    Sendrecv,
}

/// The processes of one job, one per VM.
#[derive(Debug, Clone)]
pub struct Mpi {
    /// VMs, each with the number of its host. VMs of different hosts are connected by the wire.
    pub vms: Vec<(usize, usize)>,
    /// Communication pattern.
    pub pattern: Pattern,
    /// Size of a message, bytes.
    pub message: u64,
    /// Maximum number of bytes in flight without an acknowledgement (socket buffers).
    pub window: u64,
    /// Bytes that are sent and acknowledged at once, by which the window slides: two segments, because TCP acknowledges
    /// every second one (RFC 1122, section 4.2.3.2).
    pub part: u64,
    /// Warm-up, ns: rounds that end before it are not counted, because not all VMs compute yet.
    pub warm_up: Nanos,
    /// One-way delay between the hosts, ns.
    pub delay: Nanos,
    /// Costs of the guests.
    pub costs: GuestCosts,
    owner: usize,
    rounds: u64,
    /// End of the first round after [`Mpi::warm_up`] that all processes have finished, end of the
    /// last one, and number of rounds in between.
    began: Option<Nanos>,
    ended: Nanos,
    counted: u64,
    ranks: Vec<Rank>,
    /// Parts in flight without an acknowledgement, with the number of retransmissions.
    unacked: BTreeMap<u64, u32>,
    /// Parts of the latest rounds that arrived.
    received: BTreeSet<u64>,
    retries: u64,
}

#[derive(Debug, Clone, Default)]
struct Rank {
    /// By sender: parts read so far, of all rounds.
    arrived: Vec<u64>,
    /// By receiver: parts of this round that were sent, and that were acknowledged.
    sent_parts: Vec<u64>,
    acked_parts: Vec<u64>,
    /// Messages of this round that were sent and acknowledged completely.
    sent: u32,
    round: u64,
    /// Number of rounds finished.
    finished: u64,
}

/// A tag: sender, receiver, round, part and kind.
#[derive(Debug, Clone, Copy)]
struct Tag {
    from: usize,
    to: usize,
    round: u64,
    part: u64,
    kind: u64,
}

/// Linux's minimum retransmission timeout.
const MIN_RTO: Nanos = 200 * MS;

/// Position of the round in a tag: the highest bits.
const ROUND_SHIFT: u32 = 34;
const DATA: u64 = 0;
const READ_DONE: u64 = 1;
const ACK: u64 = 2;

impl Tag {
    fn pack(self) -> u64 {
        self.kind
            | (self.from as u64) << 2
            | (self.to as u64) << 10
            | (self.part & 0xffff) << 18
            | (self.round & 0x3fff_ffff) << ROUND_SHIFT
    }

    fn of(tag: u64) -> Self {
        Self {
            kind: tag & 3,
            from: (tag >> 2 & 0xff) as usize,
            to: (tag >> 10 & 0xff) as usize,
            part: tag >> 18 & 0xffff,
            round: tag >> ROUND_SHIFT,
        }
    }
}

impl Mpi {
    /// A job at its first round.
    pub fn new(
        vms: Vec<(usize, usize)>,
        pattern: Pattern,
        message: u64,
        costs: GuestCosts,
    ) -> Self {
        let rank = Rank {
            arrived: vec![0; vms.len()],
            sent_parts: vec![0; vms.len()],
            acked_parts: vec![0; vms.len()],
            ..Rank::default()
        };
        let ranks = vec![rank; vms.len()];
        Self {
            vms,
            pattern,
            message: message.max(1),
            window: 64 << 10,
            part: 2 * 1448,
            warm_up: 1_000 * MS,
            delay: 50_000,
            costs,
            owner: 0,
            rounds: 0,
            began: None,
            ended: 0,
            counted: 0,
            ranks,
            unacked: BTreeMap::new(),
            received: BTreeSet::new(),
            retries: 0,
        }
    }

    fn part(&self) -> u64 {
        self.part.clamp(1, self.window.max(1))
    }

    fn parts(&self) -> u64 {
        self.message.div_ceil(self.part())
    }

    fn targets(&self, rank: usize) -> Vec<usize> {
        let n = self.vms.len();
        match self.pattern {
            Pattern::Alltoall => (1..n).map(|k| (rank + k) % n).collect(),
            Pattern::Sendrecv => vec![(rank + 1) % n],
        }
    }

    fn bytes(&self, part: u64) -> u64 {
        (self.message - part * self.part()).min(self.part())
    }

    /// The process of `id.from` writes its next part into the socket, if there is one.
    fn send_part(&mut self, world: &mut World, id: Tag) {
        let part = self.ranks[id.from].sent_parts[id.to];
        if part >= self.parts() {
            return;
        }
        self.ranks[id.from].sent_parts[id.to] += 1;
        let id = Tag { part, ..id };
        let bytes = self.bytes(id.part);
        let packets = bytes.div_ceil(1448);
        let cost = self.costs.blocking_call(bytes) + packets * self.costs.send;
        let vcpu = world.vms[self.vms[id.from].0].app;
        world.work(
            vcpu,
            Level::App,
            cost,
            self.owner,
            Tag { kind: DATA, ..id }.pack(),
        );
    }

    fn begin_round(&mut self, world: &mut World, rank: usize) {
        let round = self.ranks[rank].round;
        self.ranks[rank].sent_parts.fill(0);
        self.ranks[rank].acked_parts.fill(0);
        for to in self.targets(rank) {
            let id = Tag {
                from: rank,
                to,
                round,
                part: 0,
                kind: DATA,
            };
            for _ in 0..(self.window / self.part()).max(1) {
                self.send_part(world, id);
            }
        }
    }

    fn send_packet(&mut self, world: &mut World, from: usize, to: usize, tag: u64, bytes: u64) {
        let packet = Packet {
            owner: self.owner,
            connection: 0,
            tag,
            bytes: u32::try_from(bytes + 90).unwrap_or(u32::MAX),
            stream: false,
        };
        let ((_, a), (vm, b)) = (self.vms[from], self.vms[to]);
        if a == b {
            world.send_across(vm, packet);
        } else {
            world.send_in(vm, packet, self.delay);
        }
    }

    fn finish_round_if_complete(&mut self, world: &mut World, rank: usize) {
        let sends = self.targets(rank).len() as u32;
        let round = self.ranks[rank].round;
        let whole = (0..self.vms.len())
            .filter(|&from| self.targets(from).contains(&rank))
            .all(|from| self.ranks[rank].arrived[from] >= (round + 1) * self.parts());
        let r = &mut self.ranks[rank];
        if whole && r.sent >= sends {
            r.sent = 0;
            r.round += 1;
            r.finished += 1;
            let rounds = self.ranks.iter().map(|r| r.finished).min().unwrap_or(0);
            if rounds > self.rounds {
                if self.began.is_some() {
                    self.counted += rounds - self.rounds;
                } else if world.now >= self.warm_up {
                    self.began = Some(world.now);
                }
                self.rounds = rounds;
                self.ended = world.now;
                // Parts of rounds that all have finished are not sent again.
                self.received = self.received.split_off(&(rounds << ROUND_SHIFT));
            }
            self.begin_round(world, rank);
        }
    }
}

impl Workload for Mpi {
    fn start(&mut self, world: &mut World, owner: usize) {
        self.owner = owner;
        for rank in 0..self.vms.len() {
            self.begin_round(world, rank);
        }
    }

    /// A part or its acknowledgement was lost: TCP sends it again.
    fn on_timer(&mut self, world: &mut World, tag: u64) {
        let Some(tries) = self.unacked.get_mut(&tag) else {
            return;
        };
        *tries += 1;
        let wait = MIN_RTO << (*tries).min(6);
        self.retries += 1;
        let id = Tag::of(tag);
        self.send_packet(world, id.from, id.to, tag, self.bytes(id.part));
        world.set_timer(world.now + wait, self.owner, tag);
    }

    fn on_work_done(&mut self, world: &mut World, tag: u64) {
        let id = Tag::of(tag);
        match id.kind {
            DATA => {
                self.unacked.insert(tag, 0);
                self.send_packet(world, id.from, id.to, tag, self.bytes(id.part));
                world.set_timer(world.now + MIN_RTO, self.owner, tag);
            }
            _ => {
                // The process has read the part: the window opens, and the message may be complete.
                self.send_packet(world, id.to, id.from, Tag { kind: ACK, ..id }.pack(), 0);
                self.ranks[id.to].arrived[id.from] += 1;
                if self.ranks[id.to].arrived[id.from].is_multiple_of(self.parts()) {
                    self.finish_round_if_complete(world, id.to);
                }
            }
        }
    }

    fn on_packet(&mut self, world: &mut World, vm: usize, packet: Packet) {
        let id = Tag::of(packet.tag);
        if id.kind == DATA {
            if !self.received.insert(packet.tag) {
                // A retransmission, because the acknowledgement was lost: acknowledge it again.
                let answer = Tag { kind: ACK, ..id };
                self.send_packet(world, id.to, id.from, answer.pack(), 0);
                return;
            }
            let cost = self.costs.blocking_call(self.bytes(id.part));
            let tag = Tag {
                kind: READ_DONE,
                ..id
            }
            .pack();
            world.work(world.vms[vm].app, Level::App, cost, self.owner, tag);
        } else if self
            .unacked
            .remove(&Tag { kind: DATA, ..id }.pack())
            .is_none()
        {
            // A repeated acknowledgement.
        } else {
            let acked_parts = &mut self.ranks[id.from].acked_parts[id.to];
            *acked_parts += 1;
            if *acked_parts < self.parts() {
                self.send_part(world, id);
            } else {
                self.ranks[id.from].sent += 1;
                self.finish_round_if_complete(world, id.from);
            }
        }
    }

    fn figures(&self, world: &World) -> Vec<(String, f64)> {
        // Without a counted round, a round takes at least this long.
        let took = match self.began {
            Some(began) if self.counted > 0 => self.ended - began,
            _ => world.now,
        };
        let time = took as f64 / 1e6 / self.counted.max(1) as f64;
        vec![
            ("round ms".into(), time),
            ("rounds".into(), self.rounds as f64),
            ("sent again".into(), self.retries as f64),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::CpuLoad;
    use crate::sched::XenConfig;
    use crate::setup::{HostSetup, Policy, VmSetup};

    #[test]
    fn rounds_before_all_vms_compute_are_not_counted() {
        let xen = XenConfig {
            slice: 30 * MS,
            cores: 2,
            by_tick: true,
            domain_0: true,
        };
        let mut setup = HostSetup {
            policy: Policy::Xen(xen),
            cores: 2,
            phase: 300 * MS,
            ..HostSetup::default()
        };
        for k in 0..8 {
            setup.vms.push(VmSetup {
                core: k / 4,
                load: CpuLoad::Busy,
                ..VmSetup::default()
            });
        }
        let mut job = Mpi::new(
            vec![(0, 0), (1, 0), (4, 1), (5, 1)],
            Pattern::Sendrecv,
            4096,
            setup.costs,
        );
        let mut round = |warm_up| {
            job.warm_up = warm_up;
            let mut sim = setup.simulation(vec![Box::new(job.clone())], 1);
            sim.run(5_000 * MS);
            sim.workloads[0].figures(&sim.world)[0].1
        };
        // Until all VMs compute, a round takes well below a millisecond.
        let (late, all) = (round(1_000 * MS), round(0));
        assert!(late > 2.0 * all, "{late} {all}");
    }

    #[test]
    fn a_window_slides_with_acknowledgements() {
        let setup = HostSetup {
            cores: 2,
            vms: vec![
                VmSetup::default(),
                VmSetup {
                    core: 1,
                    ..VmSetup::default()
                },
            ],
            ..HostSetup::default()
        };
        let round = |part| {
            let mut job = Mpi::new(
                vec![(0, 0), (1, 1)],
                Pattern::Sendrecv,
                1 << 20,
                setup.costs,
            );
            (job.part, job.warm_up) = (part, 0);
            let mut sim = setup.simulation(vec![Box::new(job)], 1);
            sim.run(1_000 * MS);
            sim.workloads[0].figures(&sim.world)[0].1
        };
        // With parts as large as the window, both sides wait for acknowledgements.
        let (slides, waits) = (round(2 * 1448), round(64 << 10));
        assert!(slides < 0.95 * waits, "{slides} {waits}");
    }
}
