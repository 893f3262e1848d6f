// SPDX-License-Identifier: Apache-2.0
//! Voice and video: small packets at a fixed rate, to a VM or from it, on a path with random delay. They are datagrams,
//! or a stream whose sender holds small segments back while one is not acknowledged (Nagle, RFC 896).

use std::collections::VecDeque;

use viola_policy::slices::Nanos;

use super::{Durations, GuestCosts, Jitter};
use crate::cpu::Level;
use crate::net::Packet;
use crate::world::{Workload, World};

/// Direction of the packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The peer sends; the VM's process reads.
    Up,
    /// The VM's process sends by its own timer; the peer reads.
    Down,
}

/// Headers of a packet, bytes: Ethernet, IP, TCP with time stamps.
const HEADERS: u32 = 66;
/// Bit of a tag that marks an echo.
const ECHO: u64 = 1 << 63;

/// One direction of a call with `lines` lines.
#[derive(Debug)]
pub struct MediaStream {
    /// The VM.
    pub vm: usize,
    /// Direction.
    pub direction: Direction,
    /// Interval between packets of a line, ns.
    pub every: Nanos,
    /// Size of a packet with headers, bytes.
    pub bytes: u32,
    /// Number of lines.
    pub lines: u64,
    /// One-way delay to the VM, uniform within these bounds, ns.
    pub delay: (Nanos, Nanos),
    /// One-way delay from the VM, uniform within these bounds, ns.
    pub delay_from: (Nanos, Nanos),
    /// Time of the VM's process per packet, ns.
    pub process: Nanos,
    /// Depth of the playout buffer: a packet that is later than the fastest by more than this is discarded, ns.
    pub playout: Nanos,
    /// The peer echoes each packet, and the VM's process measures the time since it was due ([`Direction::Down`]).
    pub echo: bool,
    /// All packets go over one TCP connection whose peer answers at once: Linux acknowledges a stream of small segments
    /// without delay once its process has read them. Needs [`MediaStream::echo`]; the answer is the acknowledgement
    /// too.
    pub stream: bool,
    /// Costs of the guest.
    pub costs: GuestCosts,
    owner: usize,
    /// Of a stream: packets held back, segments in flight with their packets, and the last acknowledged segment.
    held: Vec<u64>,
    segments: VecDeque<(u64, Vec<u64>)>,
    answered: u64,
    sent_segments: u64,
    /// By line.
    jitter: Vec<Jitter>,
    transit: Durations,
    round_trips: Durations,
    min_transit: Nanos,
    sent: u64,
    arrived: u64,
    discarded: u64,
}

impl MediaStream {
    fn packet(&self, tag: u64) -> Packet {
        Packet {
            owner: self.owner,
            connection: 0,
            tag,
            bytes: self.bytes,
            stream: false,
        }
    }

    /// One line of G.711: every 20 ms 172 bytes of RTP header and payload.
    pub fn voice(
        vm: usize,
        direction: Direction,
        delay: (Nanos, Nanos),
        costs: GuestCosts,
    ) -> Self {
        Self {
            vm,
            direction,
            every: 20_000_000,
            bytes: 218,
            lines: 1,
            delay,
            delay_from: delay,
            process: 20_000,
            playout: 150_000_000,
            echo: false,
            stream: false,
            costs,
            owner: 0,
            held: Vec::new(),
            segments: VecDeque::new(),
            answered: 0,
            sent_segments: 0,
            jitter: Vec::new(),
            transit: Durations::default(),
            round_trips: Durations::default(),
            min_transit: Nanos::MAX,
            sent: 0,
            arrived: 0,
            discarded: 0,
        }
    }

    fn delay(&self, world: &mut World) -> Nanos {
        world.random.within(self.delay.0, self.delay.1)
    }

    fn delay_from(&self, world: &mut World) -> Nanos {
        world.random.within(self.delay_from.0, self.delay_from.1)
    }

    /// Sends the held packets as one segment, unless one is not acknowledged.
    fn flush(&mut self, world: &mut World) {
        if self.held.is_empty() || self.answered < self.sent_segments {
            return;
        }
        self.sent_segments += 1;
        let packets_of = std::mem::take(&mut self.held);
        let mut packet = self.packet(self.sent_segments);
        packet.bytes = (packet.bytes - HEADERS) * packets_of.len() as u32 + HEADERS;
        self.segments.push_back((self.sent_segments, packets_of));
        let delay = self.delay_from(world);
        if !world.send_out(self.vm, packet, delay) {
            // Small segments hardly ever find a full queue. Packets of one that does are missing in the figures only.
            self.segments.pop_back();
            self.answered = self.sent_segments;
        }
    }

    /// The packets of a segment in flight.
    fn packets_of(&self, segment: u64) -> Option<&(u64, Vec<u64>)> {
        self.segments.iter().find(|(number, _)| *number == segment)
    }

    fn arrived(&mut self, world: &World, tag: u64) {
        let (line, sent) = (tag % self.lines, tag / self.lines);
        let transit = world.now - sent;
        self.arrived += 1;
        self.min_transit = self.min_transit.min(transit);
        if transit > self.min_transit + self.playout {
            self.discarded += 1;
        }
        self.transit.push(transit);
        self.jitter[line as usize].push(sent, world.now);
    }
}

impl Workload for MediaStream {
    fn start(&mut self, world: &mut World, owner: usize) {
        self.owner = owner;
        self.jitter.resize(self.lines as usize, Jitter::default());
        for line in 0..self.lines {
            let first = world.random.within(1, self.every);
            world.set_timer(first, owner, line);
        }
    }

    fn on_timer(&mut self, world: &mut World, line: u64) {
        self.sent += 1;
        let tag = world.now * self.lines + line;
        match self.direction {
            Direction::Up => {
                let delay = self.delay(world);
                world.send_in(self.vm, self.packet(tag), delay);
            }
            Direction::Down => {
                let cost = self.process + self.costs.send;
                world.work(world.vms[self.vm].app, Level::App, cost, self.owner, tag);
            }
        }
        world.set_timer(world.now + self.every, self.owner, line);
    }

    fn on_packet(&mut self, world: &mut World, vm: usize, packet: Packet) {
        if self.stream {
            self.answered = self.answered.max(packet.tag);
            self.flush(world);
        }
        let cost = self.process + self.costs.call;
        let tag = match self.direction {
            Direction::Up => packet.tag,
            Direction::Down => packet.tag | ECHO,
        };
        world.work(world.vms[vm].app, Level::App, cost, self.owner, tag);
    }

    fn on_work_done(&mut self, world: &mut World, tag: u64) {
        if tag & ECHO != 0 && self.stream {
            let now = world.now;
            while let Some((number, _)) = self.segments.front()
                && *number <= tag & !ECHO
            {
                let (_, packets_of) = self.segments.pop_front().unwrap_or_default();
                let lines = self.lines;
                packets_of
                    .iter()
                    .for_each(|tag| self.round_trips.push(now - tag / lines));
            }
            return;
        }
        if tag & ECHO != 0 {
            let due = (tag & !ECHO) / self.lines;
            self.round_trips.push(world.now - due);
            return;
        }
        match self.direction {
            Direction::Up => self.arrived(world, tag),
            Direction::Down if self.stream => {
                self.held.push(tag);
                self.flush(world);
            }
            Direction::Down => {
                let delay = self.delay_from(world);
                world.send_out(self.vm, self.packet(tag), delay);
            }
        }
    }

    fn on_peer_packet(&mut self, world: &mut World, packet: Packet) {
        if self.stream {
            let packets_of = self.packets_of(packet.tag).map(|(_, all)| all.clone());
            for tag in packets_of.unwrap_or_default() {
                self.arrived(world, tag);
            }
        } else {
            self.arrived(world, packet.tag);
        }
        if self.echo {
            let delay = self.delay(world);
            world.send_in(self.vm, packet, delay);
        }
    }

    fn figures(&self, _world: &World) -> Vec<(String, f64)> {
        let lines = self.jitter.len().max(1) as f64;
        let jitter = self.jitter.iter().map(Jitter::mean_ms).sum::<f64>() / lines;
        // Packets in flight are not lost: at most what was sent during the longest transit.
        let under_way = self.lines as f64 * self.transit.quantile_ms(1.0) * 1e6 / self.every as f64;
        let lost = (self.sent as f64 - self.arrived as f64 - under_way).max(0.0);
        vec![
            ("came".into(), self.arrived as f64),
            ("jitter ms".into(), jitter),
            ("transit mean ms".into(), self.transit.mean_ms()),
            ("trip mean ms".into(), self.round_trips.mean_ms()),
            ("lost %".into(), 100.0 * lost / self.sent.max(1) as f64),
            (
                "discarded %".into(),
                100.0 * self.discarded as f64 / self.arrived.max(1) as f64,
            ),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setup::{HostSetup, VmSetup};
    use crate::work::figure;
    use viola_policy::slices::MS;

    /// Packets sent, messages that arrived and the mean trip (ms) of a second with a message each 10 ms and an answer
    /// after 30 ms.
    fn second(stream: bool) -> (u64, u64, f64) {
        let setup = HostSetup {
            vms: vec![VmSetup::default()],
            ..HostSetup::default()
        };
        let mut media = MediaStream::voice(0, Direction::Down, (30 * MS, 30 * MS), setup.costs);
        media.every = 10 * MS;
        media.delay_from = (0, 0);
        (media.echo, media.stream) = (true, stream);
        let mut sim = setup.simulation(vec![Box::new(media)], 1);
        sim.run(1_000 * MS);
        let figures = sim.workloads[0].figures(&sim.world);
        let get = |name| figure(&figures, name);
        (
            sim.world.nics[0].sent,
            get("came") as u64,
            get("trip mean ms"),
        )
    }

    #[test]
    fn a_stream_has_one_small_segment_in_flight_and_datagrams_any_number() {
        let (sent, arrived, trip) = second(false);
        assert!(
            (99..=100).contains(&sent) && arrived >= 99,
            "{sent} {arrived}"
        );
        assert!((30.0..31.0).contains(&trip), "{trip}");
        // One goes alone. Those of the 30 ms until its answer go together, after 10 or 20 ms or at once.
        let (sent, arrived, trip) = second(true);
        assert!(
            (32..=35).contains(&sent) && arrived >= 96,
            "{sent} {arrived}"
        );
        assert!((38.0..46.0).contains(&trip), "{trip}");
    }
}
