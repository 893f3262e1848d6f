// SPDX-License-Identifier: Apache-2.0
//! Voice and video: small packets at a fixed pace, to a VM or from it, on a path with random delay.

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
    /// One way: uniform in these bounds, ns.
    pub delay: (Nanos, Nanos),
    /// Process's time for a packet, ns.
    pub process: Nanos,
    /// A packet that comes so much later than the quickest is discarded.
    pub playout: Nanos,
    /// The peer sends each packet back, and the VM's process takes its time from when it was due ([`Side::Down`]).
    pub echo: bool,
    /// Guest's costs.
    pub costs: GuestCosts,
    owner: usize,
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
            process: 20_000,
            playout: 150_000_000,
            echo: false,
            costs,
            owner: 0,
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
        let cost = self.process + self.costs.call;
        let tag = match self.side {
            Side::Up => packet.tag,
            Side::Down => packet.tag | ECHO,
        };
        world.work(world.vms[vm].app, Level::App, cost, self.owner, tag);
    }

    fn done(&mut self, world: &mut World, tag: u64) {
        if tag & ECHO != 0 {
            let due = (tag & !ECHO) / self.lines;
            self.trips.push(world.now - due);
            return;
        }
        match self.side {
            Side::Up => self.came(world, tag),
            Side::Down => {
                let delay = self.delay(world);
                world.send_out(self.vm, self.packet(tag), delay);
            }
        }
    }

    fn at_peer(&mut self, world: &mut World, packet: Packet) {
        self.came(world, packet.tag);
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
