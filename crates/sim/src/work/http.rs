// SPDX-License-Identifier: Apache-2.0
//! A web server under open load (httperf): connections arrive at a fixed rate, answered or not.

use std::collections::BTreeMap;

use viola_policy::slices::{MS, Nanos};

use super::{Durations, GuestCosts};
use crate::cpu::Level;
use crate::net::Packet;
use crate::world::{Workload, World};

/// A web server and its clients.
#[derive(Debug)]
pub struct Http {
    /// The server.
    pub vm: usize,
    /// Connection attempts per second.
    pub rate: f64,
    /// Size of a page, bytes.
    pub page: u32,
    /// One-way delay to the VM, uniform within these bounds, ns.
    pub delay: (Nanos, Nanos),
    /// One-way delay from the VM, uniform within these bounds, ns.
    pub delay_from: (Nanos, Nanos),
    /// Server's time for a page, ns.
    pub process: Nanos,
    /// Time after which a client gives up waiting for a connection and a page, ns.
    pub client_timeout: Nanos,
    /// Time until a lost SYN is sent again, ns; it doubles each time.
    pub syn_retry: Nanos,
    /// Costs of the guest.
    pub costs: GuestCosts,
    owner: usize,
    open: BTreeMap<u64, Open>,
    opened: u64,
    answered: u64,
    failed: u64,
    retries: u64,
    connect: Durations,
    respond: Durations,
}

#[derive(Debug)]
struct Open {
    since: Nanos,
    stage: Stage,
    requested_at: Nanos,
    tries: u32,
    parts: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Connecting,
    Requested,
    Served,
}

/// Tags: the kind of packet or timer in the lowest bits, above it the connection.
const SYN: u64 = 0;
const GET: u64 = 1;
const ACK: u64 = 2;
const RETRY: u64 = 3;
const GIVE_UP: u64 = 4;
const NEW: u64 = 5;
/// Time until the server sends data again, ns: Linux's minimum retransmission timeout.
const MIN_RTO: Nanos = 200 * MS;
const SEGMENT_BYTES: u32 = 1448;

impl Http {
    /// Clients that request pages of 5 KB.
    pub fn new(vm: usize, rate: f64, delay: (Nanos, Nanos), costs: GuestCosts) -> Self {
        Self {
            vm,
            rate,
            page: 5_000,
            delay,
            delay_from: delay,
            process: 300_000,
            client_timeout: 10_000 * MS,
            syn_retry: 3_000 * MS,
            costs,
            owner: 0,
            open: BTreeMap::new(),
            opened: 0,
            answered: 0,
            failed: 0,
            retries: 0,
            connect: Durations::default(),
            respond: Durations::default(),
        }
    }

    fn send(&mut self, world: &mut World, id: u64, what: u64, bytes: u32) {
        let delay = world.random.within(self.delay.0, self.delay.1);
        let packet = Packet {
            owner: self.owner,
            connection: id as u32,
            tag: id << 3 | what,
            bytes,
            stream: false,
        };
        world.send_in(self.vm, packet, delay);
    }

    fn reply(&mut self, world: &mut World, id: u64, what: u64, bytes: u32) {
        let delay = world.random.within(self.delay_from.0, self.delay_from.1);
        let packet = Packet {
            owner: self.owner,
            connection: id as u32,
            tag: id << 3 | what,
            bytes,
            stream: false,
        };
        world.send_out(self.vm, packet, delay);
    }

    fn retry_at(&self, world: &mut World, id: u64, open: &Open) {
        let first = match open.stage {
            Stage::Connecting => self.syn_retry,
            _ => MIN_RTO + self.delay.1 + self.delay_from.1,
        };
        let at = world.now + (first << open.tries.min(6));
        world.set_timer(at, self.owner, id << 3 | RETRY);
    }

    fn attempt(&mut self, world: &mut World, id: u64) {
        let Some(open) = self.open.remove(&id) else {
            return;
        };
        match open.stage {
            Stage::Connecting => self.send(world, id, SYN, 78),
            // The last acknowledgement of the handshake goes before the request.
            Stage::Requested if open.tries == 0 => {
                self.send(world, id, ACK, 66);
                self.send(world, id, GET, 250);
            }
            Stage::Requested => self.send(world, id, GET, 250),
            Stage::Served => {}
        }
        self.retry_at(world, id, &open);
        self.open.insert(id, open);
    }
}

impl Workload for Http {
    fn start(&mut self, world: &mut World, owner: usize) {
        self.owner = owner;
        world.set_timer(1, owner, NEW);
    }

    fn on_timer(&mut self, world: &mut World, tag: u64) {
        let id = tag >> 3;
        match tag & 7 {
            NEW => {
                self.opened += 1;
                let open = Open {
                    since: world.now,
                    stage: Stage::Connecting,
                    requested_at: 0,
                    tries: 0,
                    parts: 0,
                };
                self.open.insert(self.opened, open);
                self.attempt(world, self.opened);
                world.set_timer(
                    world.now + self.client_timeout,
                    self.owner,
                    self.opened << 3 | GIVE_UP,
                );
                let next = (1e9 / self.rate.max(1e-3)) as Nanos;
                world.set_timer(world.now + next, self.owner, NEW);
            }
            RETRY => {
                // The timer of a stage that is over is ignored.
                let due = self.open.get_mut(&id).is_some_and(|o| {
                    let since = if o.stage == Stage::Requested {
                        o.requested_at
                    } else {
                        o.since
                    };
                    let first = if o.stage == Stage::Requested {
                        MIN_RTO + self.delay.1 + self.delay_from.1
                    } else {
                        self.syn_retry
                    };
                    let waited = first * ((2 << o.tries.min(6)) - 1);
                    let due = world.now >= since + waited;
                    o.tries += u32::from(due);
                    due
                });
                if due {
                    self.retries += 1;
                    self.attempt(world, id);
                }
            }
            _ => {
                if self.open.remove(&id).is_some() {
                    self.failed += 1;
                }
            }
        }
    }

    fn on_packet(&mut self, world: &mut World, vm: usize, packet: Packet) {
        let id = packet.tag >> 3;
        match packet.tag & 7 {
            SYN => self.reply(world, id, SYN, 78),
            GET => {
                let bytes = u64::from(self.page);
                let cost = self.process + 2 * self.costs.blocking_call(bytes) + 4 * self.costs.send;
                world.work(world.vms[vm].app, Level::App, cost, self.owner, id);
            }
            _ => {}
        }
    }

    fn on_work_done(&mut self, world: &mut World, id: u64) {
        let mut left = self.page;
        while left > 0 {
            let part = left.min(SEGMENT_BYTES);
            left -= part;
            self.reply(world, id, GET, part + 66);
        }
    }

    fn on_peer_packet(&mut self, world: &mut World, packet: Packet) {
        let id = packet.tag >> 3;
        let parts = self.page.div_ceil(SEGMENT_BYTES);
        let Some(open) = self.open.get_mut(&id) else {
            return;
        };
        match (packet.tag & 7, open.stage) {
            (SYN, Stage::Connecting) => {
                open.stage = Stage::Requested;
                open.requested_at = world.now;
                open.tries = 0;
                self.connect.push(world.now - open.since);
                self.attempt(world, id);
            }
            (GET, Stage::Requested) => {
                open.parts += 1;
                let (done, requested_at) = (open.parts >= parts, open.requested_at);
                if done {
                    open.stage = Stage::Served;
                    self.answered += 1;
                    self.respond.push(world.now - requested_at);
                    self.open.remove(&id);
                    // Both ends close the connection.
                    self.send(world, id, ACK, 66);
                    self.send(world, id, ACK, 66);
                } else {
                    // Linux acknowledges each of a connection's first segments.
                    self.send(world, id, ACK, 66);
                }
            }
            _ => {}
        }
    }

    fn figures(&self, world: &World) -> Vec<(String, f64)> {
        let seconds = world.now.max(1) as f64 / 1e9;
        let rate = self.answered as f64 / seconds;
        vec![
            ("answered 1/s".into(), rate),
            ("net KB/s".into(), rate * f64::from(self.page) / 1e3),
            ("connect mean ms".into(), self.connect.mean_ms()),
            ("response mean ms".into(), self.respond.mean_ms()),
            ("retries".into(), self.retries as f64),
            ("failed".into(), self.failed as f64),
        ]
    }
}
