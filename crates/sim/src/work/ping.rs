// SPDX-License-Identifier: Apache-2.0
//! Ping, and requests that a process answers.

use viola_policy::slices::Nanos;

use super::{Durations, GuestCosts};
use crate::cpu::Level;
use crate::net::Packet;
use crate::world::{Workload, World};

/// A peer that sends requests to a VM.
#[derive(Debug)]
pub struct Ping {
    /// The VM.
    pub vm: usize,
    /// Pause between requests, uniform within these bounds, ns.
    pub pause: (Nanos, Nanos),
    /// Whether the pause begins with the answer instead of the last request (as of the program ping).
    pub waits_for_answer: bool,
    /// One-way delay, ns.
    pub delay: Nanos,
    /// Size of a packet with headers, bytes.
    pub bytes: u32,
    /// Time of the VM's process per answer, ns; `None`: the kernel answers (ICMP).
    pub process: Option<Nanos>,
    /// Costs of the guest.
    pub costs: GuestCosts,
    owner: usize,
    sent_at: Nanos,
    times: Durations,
    number: u64,
    lost: u64,
}

/// A request without an answer for this long is lost, and the next one is sent.
const ANSWER_TIMEOUT: Nanos = 1_000_000_000;

impl Ping {
    /// A peer that waits for answers.
    pub fn new(vm: usize, pause: (Nanos, Nanos), delay: Nanos, costs: GuestCosts) -> Self {
        Self {
            vm,
            pause,
            waits_for_answer: true,
            delay,
            bytes: 98,
            process: None,
            costs,
            owner: 0,
            sent_at: 0,
            times: Durations::default(),
            number: 0,
            lost: 0,
        }
    }

    fn pause(&mut self, world: &mut World) {
        let at = world.now + world.random.within(self.pause.0, self.pause.1);
        world.set_timer(at, self.owner, 0);
    }

    fn answer(&mut self, world: &mut World, number: u64) {
        let packet = Packet {
            owner: self.owner,
            connection: 0,
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

    fn on_timer(&mut self, world: &mut World, tag: u64) {
        // Tag 0 sends a request; the number of a request checks whether it is lost.
        if tag == 0 {
            self.number += 1;
            self.sent_at = world.now;
            let packet = Packet {
                owner: self.owner,
                connection: 0,
                tag: if self.waits_for_answer {
                    self.number
                } else {
                    world.now
                },
                bytes: self.bytes,
                stream: false,
            };
            world.send_in(self.vm, packet, self.delay);
            if self.waits_for_answer {
                world.set_timer(world.now + ANSWER_TIMEOUT, self.owner, self.number);
            } else {
                self.pause(world);
            }
        } else if tag == self.number && self.times.count() as u64 + self.lost < tag {
            self.lost += 1;
            self.pause(world);
        }
    }

    fn on_packet(&mut self, world: &mut World, vm: usize, packet: Packet) {
        match self.process {
            None => self.answer(world, packet.tag),
            Some(cost) => {
                let cost = cost + self.costs.call + self.costs.send;
                world.work(world.vms[vm].app, Level::App, cost, self.owner, packet.tag);
            }
        }
    }

    fn on_work_done(&mut self, world: &mut World, tag: u64) {
        self.answer(world, tag);
    }

    fn on_peer_packet(&mut self, world: &mut World, packet: Packet) {
        if !self.waits_for_answer {
            self.times.push(world.now - packet.tag);
        } else if packet.tag == self.number && self.times.count() as u64 + self.lost < packet.tag {
            self.times.push(world.now - self.sent_at);
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
