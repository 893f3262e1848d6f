// SPDX-License-Identifier: Apache-2.0
//! Voice and video: small packets at a fixed pace, to a VM or from it, on a path with random delay; datagrams, or a stream
//! whose sender holds small segments back while one is unanswered (Nagle, RFC 896).

use std::collections::VecDeque;

use viola_policy::slices::Nanos;

use super::{GuestCosts, Jitter, Times};
use crate::cpu::Level;
use crate::net::Packet;
use crate::world::{Workload, World};

/// Where the packets come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The peer sends, the VM's process reads.
    Up,
    /// The VM's process sends by its own timer, the peer reads.
    Down,
}

/// Of a packet: Ethernet, IP and TCP with time stamps.
const HEADERS: u32 = 66;
/// Mark of what came back.
const ECHO: u64 = 1 << 63;

/// One direction of a call, of `lines` at once.
#[derive(Debug)]
pub struct Media {
    /// Which VM.
    pub vm: usize,
    /// Direction.
    pub side: Side,
    /// Pace of one line, ns.
    pub every: Nanos,
    /// Bytes of a packet, headers included.
    pub bytes: u32,
    /// Lines at once.
    pub lines: u64,
    /// One way to the VM: uniform in these bounds, ns.
    pub delay: (Nanos, Nanos),
    /// One way from it, as well.
    pub delay_from: (Nanos, Nanos),
    /// Process's time for a packet, ns.
    pub process: Nanos,
    /// A packet that comes so much later than the quickest is discarded.
    pub playout: Nanos,
    /// The peer sends each packet back, and the VM's process takes its time from when it was due ([`Side::Down`]).
    pub echo: bool,
    /// They go over one connection of TCP, whose peer answers at once: what its process has read of a stream of small
    /// segments Linux acknowledges without delay. Needs [`Media::echo`]; the answer is the acknowledgement too.
    pub stream: bool,
    /// Guest's costs.
    pub costs: GuestCosts,
    owner: usize,
    /// Of a stream: what waits for an answer to come, segments on their way with what is in them, and the last answered.
    held: Vec<u64>,
    segments: VecDeque<(u64, Vec<u64>)>,
    answered: u64,
    sent_segments: u64,
    /// By line.
    jitter: Vec<Jitter>,
    transit: Times,
    trips: Times,
    least: Nanos,
    sent: u64,
    came: u64,
    discarded: u64,
}

impl Media {
    fn packet(&self, tag: u64) -> Packet {
        Packet {
            owner: self.owner,
            tag,
            bytes: self.bytes,
            stream: false,
        }
    }

    /// One line of G.711: 172 bytes of payload and RTP header each 20 ms.
    pub fn voice(vm: usize, side: Side, delay: (Nanos, Nanos), costs: GuestCosts) -> Self {
        Self {
            vm,
            side,
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
            transit: Times::default(),
            trips: Times::default(),
            least: Nanos::MAX,
            sent: 0,
            came: 0,
            discarded: 0,
        }
    }

    fn delay(&self, world: &mut World) -> Nanos {
        world.random.within(self.delay.0, self.delay.1)
    }

    fn delay_from(&self, world: &mut World) -> Nanos {
        world.random.within(self.delay_from.0, self.delay_from.1)
    }

    /// What is held goes in one segment, unless one is unanswered.
    fn flush(&mut self, world: &mut World) {
        if self.held.is_empty() || self.answered < self.sent_segments {
            return;
        }
        self.sent_segments += 1;
        let inside = std::mem::take(&mut self.held);
        let mut packet = self.packet(self.sent_segments);
        packet.bytes = (packet.bytes - HEADERS) * inside.len() as u32 + HEADERS;
        self.segments.push_back((self.sent_segments, inside));
        let delay = self.delay_from(world);
        if !world.send_out(self.vm, packet, delay) {
            // Small as they are they never find the queue full; if one does, what is in it is lost to the figures only.
            self.segments.pop_back();
            self.answered = self.sent_segments;
        }
    }

    /// What is in a segment that is on its way.
    fn inside(&self, segment: u64) -> Option<&(u64, Vec<u64>)> {
        self.segments.iter().find(|(number, _)| *number == segment)
    }

    fn came(&mut self, world: &World, tag: u64) {
        let (line, sent) = (tag % self.lines, tag / self.lines);
        let transit = world.now - sent;
        self.came += 1;
        self.least = self.least.min(transit);
        if transit > self.least + self.playout {
            self.discarded += 1;
        }
        self.transit.push(transit);
        self.jitter[line as usize].push(sent, world.now);
    }
}

impl Workload for Media {
    fn start(&mut self, world: &mut World, owner: usize) {
        self.owner = owner;
        self.jitter.resize(self.lines as usize, Jitter::default());
        for line in 0..self.lines {
            let first = world.random.within(1, self.every);
            world.call(first, owner, line);
        }
    }

    fn call(&mut self, world: &mut World, line: u64) {
        self.sent += 1;
        let tag = world.now * self.lines + line;
        match self.side {
            Side::Up => {
                let delay = self.delay(world);
                world.send_in(self.vm, self.packet(tag), delay);
            }
            Side::Down => {
                let cost = self.process + self.costs.send;
                world.work(world.vms[self.vm].app, Level::App, cost, self.owner, tag);
            }
        }
        world.call(world.now + self.every, self.owner, line);
    }

    fn received(&mut self, world: &mut World, vm: usize, packet: Packet) {
        if self.stream {
            self.answered = self.answered.max(packet.tag);
            self.flush(world);
        }
        let cost = self.process + self.costs.call;
        let tag = match self.side {
            Side::Up => packet.tag,
            Side::Down => packet.tag | ECHO,
        };
        world.work(world.vms[vm].app, Level::App, cost, self.owner, tag);
    }

    fn done(&mut self, world: &mut World, tag: u64) {
        if tag & ECHO != 0 && self.stream {
            let now = world.now;
            while let Some((number, _)) = self.segments.front()
                && *number <= tag & !ECHO
            {
                let (_, inside) = self.segments.pop_front().unwrap_or_default();
                let lines = self.lines;
                inside
                    .iter()
                    .for_each(|tag| self.trips.push(now - tag / lines));
            }
            return;
        }
        if tag & ECHO != 0 {
            let due = (tag & !ECHO) / self.lines;
            self.trips.push(world.now - due);
            return;
        }
        match self.side {
            Side::Up => self.came(world, tag),
            Side::Down if self.stream => {
                self.held.push(tag);
                self.flush(world);
            }
            Side::Down => {
                let delay = self.delay_from(world);
                world.send_out(self.vm, self.packet(tag), delay);
            }
        }
    }

    fn at_peer(&mut self, world: &mut World, packet: Packet) {
        if self.stream {
            let inside = self.inside(packet.tag).map(|(_, all)| all.clone());
            for tag in inside.unwrap_or_default() {
                self.came(world, tag);
            }
        } else {
            self.came(world, packet.tag);
        }
        if self.echo {
            let delay = self.delay(world);
            world.send_in(self.vm, packet, delay);
        }
    }

    fn figures(&self, world: &World) -> Vec<(String, f64)> {
        let lines = self.jitter.len().max(1) as f64;
        let jitter = self.jitter.iter().map(Jitter::mean_ms).sum::<f64>() / lines;
        // What is still on its way is not lost: at most what was sent in the longest transit.
        let under_way = self.lines as f64 * self.transit.quantile_ms(1.0) * 1e6 / self.every as f64;
        let lost = (self.sent as f64 - self.came as f64 - under_way).max(0.0);
        let _ = world;
        vec![
            ("came".into(), self.came as f64),
            ("jitter ms".into(), jitter),
            ("transit mean ms".into(), self.transit.mean_ms()),
            ("trip mean ms".into(), self.trips.mean_ms()),
            ("lost %".into(), 100.0 * lost / self.sent.max(1) as f64),
            (
                "discarded %".into(),
                100.0 * self.discarded as f64 / self.came.max(1) as f64,
            ),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setup::{HostSetup, VmSetup};
    use viola_policy::slices::MS;

    /// Packets sent, messages that came and the mean trip (ms) of a second with a message each 10 ms and an answer after 30 ms.
    fn second(stream: bool) -> (u64, u64, f64) {
        let setup = HostSetup {
            vms: vec![VmSetup::default()],
            ..HostSetup::default()
        };
        let mut media = Media::voice(0, Side::Down, (30 * MS, 30 * MS), setup.costs);
        media.every = 10 * MS;
        media.delay_from = (0, 0);
        (media.echo, media.stream) = (true, stream);
        let mut sim = setup.simulation(vec![Box::new(media)], 1);
        sim.run(1_000 * MS);
        let figures = sim.workloads[0].figures(&sim.world);
        let get = |name: &str| {
            figures
                .iter()
                .find(|f| f.0 == name)
                .map_or(f64::NAN, |f| f.1)
        };
        (
            sim.world.nics[0].sent,
            get("came") as u64,
            get("trip mean ms"),
        )
    }

    #[test]
    fn a_stream_has_one_small_segment_under_way_and_datagrams_as_many_as_there_are() {
        let (sent, came, trip) = second(false);
        assert!((99..=100).contains(&sent) && came >= 99, "{sent} {came}");
        assert!((30.0..31.0).contains(&trip), "{trip}");
        // One goes alone; those of the 30 ms until its answer go together, and waited 10 ms or 20 or not at all.
        let (sent, came, trip) = second(true);
        assert!((32..=35).contains(&sent) && came >= 96, "{sent} {came}");
        assert!((38.0..46.0).contains(&trip), "{trip}");
    }
}
