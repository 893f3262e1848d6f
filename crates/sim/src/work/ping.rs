// SPDX-License-Identifier: Apache-2.0
//! Ping, and requests that a process answers.

use viola_policy::slices::Nanos;

use super::{GuestCosts, Times};
use crate::cpu::Level;
use crate::net::Packet;
use crate::world::{Workload, World};

/// A peer that asks a VM every now and then.
#[derive(Debug)]
pub struct Ping {
    /// Who is asked.
    pub vm: usize,
    /// Pause until the next request: uniform in these bounds, ns.
    pub pause: (Nanos, Nanos),
    /// Whether the pause begins with the answer; else with the request before, as of the program ping.
    pub waits: bool,
    /// One way, ns.
    pub delay: Nanos,
    /// Bytes of a packet, headers included.
    pub bytes: u32,
    /// Time the VM's process takes for an answer; `None`: the kernel answers (ICMP).
    pub process: Option<Nanos>,
    /// Guest's costs.
    pub costs: GuestCosts,
    owner: usize,
    sent: Nanos,
    times: Times,
    number: u64,
    lost: u64,
}

/// A request that is not answered for so long is lost, and another one is sent.
const LOST: Nanos = 1_000_000_000;

impl Ping {
    /// Not begun.
    pub fn new(vm: usize, pause: (Nanos, Nanos), delay: Nanos, costs: GuestCosts) -> Self {
        Self {
            vm,
            pause,
            waits: true,
            delay,
            bytes: 98,
            process: None,
            costs,
            owner: 0,
            sent: 0,
            times: Times::default(),
            number: 0,
            lost: 0,
        }
    }

    fn pause(&mut self, world: &mut World) {
        let at = world.now + world.random.within(self.pause.0, self.pause.1);
        world.call(at, self.owner, 0);
    }

    fn answer(&mut self, world: &mut World, number: u64) {
        let packet = Packet {
            owner: self.owner,
            tag: number,
            bytes: self.bytes,
            stream: false,
        };
        world.send_out(self.vm, packet, self.delay);
    }
}

impl Workload for Ping {
    fn start(&mut self, world: &mut World, owner: usize) {
        self.owner = owner;
        self.pause(world);
    }

    fn call(&mut self, world: &mut World, tag: u64) {
        // 0 asks; the number of a request asks whether it is lost.
        if tag == 0 {
            self.number += 1;
            self.sent = world.now;
            let packet = Packet {
                owner: self.owner,
                tag: if self.waits { self.number } else { world.now },
                bytes: self.bytes,
                stream: false,
            };
            world.send_in(self.vm, packet, self.delay);
            if self.waits {
                world.call(world.now + LOST, self.owner, self.number);
            } else {
                self.pause(world);
            }
        } else if tag == self.number && self.times.count() as u64 + self.lost < tag {
            self.lost += 1;
            self.pause(world);
        }
    }

    fn received(&mut self, world: &mut World, vm: usize, packet: Packet) {
        match self.process {
            None => self.answer(world, packet.tag),
            Some(cost) => {
                let cost = cost + self.costs.call + self.costs.send;
                world.work(world.vms[vm].app, Level::App, cost, self.owner, packet.tag);
            }
        }
    }

    fn done(&mut self, world: &mut World, tag: u64) {
        self.answer(world, tag);
    }

    fn at_peer(&mut self, world: &mut World, packet: Packet) {
        if !self.waits {
            self.times.push(world.now - packet.tag);
        } else if packet.tag == self.number && self.times.count() as u64 + self.lost < packet.tag {
            self.times.push(world.now - self.sent);
            self.pause(world);
        }
    }

    fn figures(&self, _world: &World) -> Vec<(String, f64)> {
        let mut all = self.times.figures("round trip");
        all.push(("answers".into(), self.times.count() as f64));
        all.push(("lost".into(), self.lost as f64));
        all
    }
}
