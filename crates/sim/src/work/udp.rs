// SPDX-License-Identifier: Apache-2.0
//! A stream of datagrams into a VM, with finite buffers on the whole way.

use std::collections::VecDeque;

use viola_policy::slices::Nanos;

use super::{GuestCosts, Jitter};
use crate::cpu::Level;
use crate::net::Packet;
use crate::world::{Workload, World};

/// A sender at a fixed rate, and a VM whose process reads.
#[derive(Debug)]
pub struct Udp {
    /// The receiving VM.
    pub vm: usize,
    /// Interval between datagrams, ns.
    pub every: Nanos,
    /// Payload of a datagram, bytes.
    pub bytes: u32,
    /// One-way delay, ns.
    pub delay: Nanos,
    /// Receive buffer of the socket, bytes.
    pub buffer: u64,
    /// Charge of a datagram to the buffer beyond its payload, bytes: headers, and the kernel's own structures.
    pub head: u32,
    /// Maximum number of datagrams that the process reads in one piece of work: 1 for exact times.
    pub burst: usize,
    /// Costs of the guest.
    pub costs: GuestCosts,
    owner: usize,
    sent: u64,
    socket: VecDeque<u64>,
    dropped: u64,
    read: u64,
    reading: usize,
    jitter: Jitter,
}

impl Udp {
    /// A stream without delay, with bursts of 16 datagrams.
    pub fn new(vm: usize, every: Nanos, bytes: u32, buffer: u64, costs: GuestCosts) -> Self {
        Self {
            vm,
            every: every.max(1),
            bytes: bytes.max(1),
            delay: 0,
            buffer,
            head: 0,
            burst: 16,
            costs,
            owner: 0,
            sent: 0,
            socket: VecDeque::new(),
            dropped: 0,
            read: 0,
            reading: 0,
            jitter: Jitter::default(),
        }
    }

    /// Reads what waits. `woken`: the process waited for it.
    fn start_read(&mut self, world: &mut World, vm: usize, woken: bool) {
        if self.reading == 0 && !self.socket.is_empty() {
            self.reading = self.socket.len().min(self.burst);
            let wake = if woken { self.costs.wake } else { 0 };
            let cost = wake + self.reading as u64 * self.costs.call_cost(u64::from(self.bytes));
            world.work(world.vms[vm].app, Level::App, cost, self.owner, vm as u64);
        }
    }

    /// Datagrams sent, dropped at the socket, and read.
    pub fn counts(&self) -> (u64, u64, u64) {
        (self.sent, self.dropped, self.read)
    }

    /// Number of datagrams in the socket's buffer.
    pub fn waiting(&self) -> u64 {
        self.socket.len() as u64
    }
}

impl Workload for Udp {
    fn start(&mut self, world: &mut World, owner: usize) {
        self.owner = owner;
        let first = world.random.within(1, self.every);
        world.set_timer(first, owner, 0);
    }

    fn on_timer(&mut self, world: &mut World, _tag: u64) {
        self.sent += 1;
        let packet = Packet {
            owner: self.owner,
            connection: 0,
            tag: world.now,
            bytes: self.bytes + 46,
            stream: false,
        };
        world.send_in(self.vm, packet, self.delay);
        world.set_timer(world.now + self.every, self.owner, 0);
    }

    fn on_packet(&mut self, world: &mut World, vm: usize, packet: Packet) {
        if (self.socket.len() as u64 + 1) * u64::from(self.bytes + self.head) > self.buffer {
            self.dropped += 1;
        } else {
            self.socket.push_back(packet.tag);
        }
        self.start_read(world, vm, true);
    }

    fn on_work_done(&mut self, world: &mut World, tag: u64) {
        for sent in self.socket.drain(..self.reading) {
            self.jitter.push(sent, world.now);
        }
        self.read += self.reading as u64;
        self.reading = 0;
        self.start_read(world, tag as usize, false);
    }

    fn figures(&self, world: &World) -> Vec<(String, f64)> {
        let seconds = world.now.max(1) as f64 / 1e9;
        let mbit = self.read as f64 * f64::from(self.bytes) * 8.0 / 1e6;
        vec![
            ("throughput Mbit/s".into(), mbit / seconds),
            ("jitter ms".into(), self.jitter.mean_ms()),
            ("sent".into(), self.sent as f64),
            ("read".into(), self.read as f64),
            ("socket drops".into(), self.dropped as f64),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setup::{HostSetup, VmSetup};
    use crate::work::figure;
    use crate::world::Simulation;
    use viola_policy::slices::MS;

    #[test]
    fn a_buffer_is_charged_for_more_than_the_payload() {
        // The first read does not end, so that the buffer fills up.
        let costs = GuestCosts {
            call: 10_000 * MS,
            ..HostSetup::default().costs
        };
        let setup = HostSetup {
            vms: vec![VmSetup::default()],
            ..HostSetup::default()
        };
        let held = |head: u32| {
            let mut udp = Udp::new(0, MS, 1_000, 15_000, costs);
            udp.head = head;
            let mut sim: Simulation = setup.simulation(vec![Box::new(udp)], 1);
            sim.run(1_000 * MS);
            let figures = sim.workloads[0].figures(&sim.world);
            let get = |name| figure(&figures, name);
            (get("sent") - get("socket drops")).round() as i64
        };
        // One datagram may still be in flight.
        assert!((15..=16).contains(&held(0)), "{}", held(0));
        assert!((10..=11).contains(&held(500)), "{}", held(500));
    }
}
