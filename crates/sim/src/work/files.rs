// SPDX-License-Identifier: Apache-2.0
//! Files sent to clients over persistent connections: by the guest in its turns, or with vpipe by the host.

use viola_policy::slices::{MS, Nanos};

use super::disk::read_time;
use super::{Durations, GuestCosts};
use crate::cpu::Level;
use crate::net::{Packet, Server};
use crate::world::{Workload, World};

/// Size of a chunk, bytes, and number of chunks in flight without an acknowledgement.
const CHUNK_BYTES: u64 = 64 << 10;
const MAX_CHUNKS_IN_FLIGHT: u64 = 4;
/// Time from the call that hands a file over to its first byte (bench/results/vpipe.json).
const HANDOVER_LATENCY: Nanos = 500_000;
/// A chunk that finds a queue full is tried again after this.
const RETRY_INTERVAL: Nanos = MS;

/// A file server and its clients.
#[derive(Debug)]
pub struct Files {
    vm: usize,
    /// Size of a file, bytes.
    bytes: u64,
    /// Speed of the disk, bytes per second; `None`: the files are cached.
    disk: Option<f64>,
    costs: GuestCosts,
    owner: usize,
    server: Server,
    connections: Vec<Connection>,
    served: u64,
    times: Durations,
}

#[derive(Debug, Clone, Copy, Default)]
struct Connection {
    requested_at: Nanos,
    unsent: u64,
    in_flight: u64,
}

/// Tags: the kind in the lowest bits, above it the connection.
const REQUEST: u64 = 0;
const REQUESTED: u64 = 1;
const DATA: u64 = 2;
const ACK: u64 = 3;
const PREPARED: u64 = 4;
const HOST: u64 = 5;
const RETURNED: u64 = 6;
const RETRY_SEND: u64 = 7;

impl Files {
    /// A server; each connection requests the next file when it has the last.
    pub fn new(
        vm: usize,
        bytes: u64,
        connections: u64,
        disk: Option<f64>,
        costs: GuestCosts,
    ) -> Self {
        // Rounded up to whole chunks.
        let bytes = match bytes.max(1) {
            small @ ..=CHUNK_BYTES => small,
            large => large.div_ceil(CHUNK_BYTES) * CHUNK_BYTES,
        };
        Self {
            vm,
            bytes,
            disk,
            costs,
            owner: 0,
            server: Server::new(Nanos::MAX),
            connections: vec![Connection::default(); connections.max(1) as usize],
            served: 0,
            times: Durations::default(),
        }
    }

    fn packet(&self, k: usize, what: u64, bytes: u64) -> Packet {
        Packet {
            owner: self.owner,
            connection: k as u32,
            tag: (k as u64) << 3 | what,
            bytes: bytes as u32 + 90,
            stream: false,
        }
    }

    fn request(&mut self, world: &mut World, k: usize) {
        self.connections[k].requested_at = world.now;
        world.send_in(self.vm, self.packet(k, REQUEST, 250), 50_000);
    }

    /// The guest's kernel prepares the next chunk, once the disk has read it.
    fn prepare(&mut self, world: &mut World, k: usize) {
        let c = &mut self.connections[k];
        if c.unsent == 0 {
            return;
        }
        let bytes = c.unsent.min(CHUNK_BYTES);
        c.unsent -= bytes;
        c.in_flight += bytes;
        match self.disk {
            None => self.submit(world, k),
            Some(rate) => {
                let at = self.server.serve(world.now, read_time(bytes, rate));
                world.set_timer(
                    at.unwrap_or(world.now),
                    self.owner,
                    (k as u64) << 3 | PREPARED,
                );
            }
        }
    }

    fn submit(&mut self, world: &mut World, k: usize) {
        let cost = CHUNK_BYTES.div_ceil(1448) * self.costs.send;
        let vcpu = world.vms[self.vm].irq;
        world.work(
            vcpu,
            Level::Irq,
            cost,
            self.owner,
            (k as u64) << 3 | PREPARED,
        );
    }

    fn send(&mut self, world: &mut World, k: usize) {
        let bytes = self.bytes.min(CHUNK_BYTES);
        if !world.send_out(self.vm, self.packet(k, DATA, bytes), 50_000) {
            world.set_timer(
                world.now + RETRY_INTERVAL,
                self.owner,
                (k as u64) << 3 | RETRY_SEND,
            );
        }
    }
}

impl Workload for Files {
    fn start(&mut self, world: &mut World, owner: usize) {
        self.owner = owner;
        for k in 0..self.connections.len() {
            world.set_timer(1 + k as u64, owner, (k as u64) << 3 | REQUEST);
        }
    }

    fn on_timer(&mut self, world: &mut World, tag: u64) {
        let k = (tag >> 3) as usize;
        match tag & 7 {
            REQUEST => self.request(world, k),
            PREPARED => self.submit(world, k),
            RETRY_SEND => self.send(world, k),
            _ => {
                // The host sends one chunk from the image, and the next when that one has arrived.
                let c = &mut self.connections[k];
                let bytes = c.unsent.min(CHUNK_BYTES);
                if bytes == 0 {
                    return;
                }
                c.unsent -= bytes;
                c.in_flight += bytes;
                match self.disk {
                    None => self.send(world, k),
                    Some(rate) => {
                        let at = self.server.serve(world.now, read_time(bytes, rate));
                        world.set_timer(
                            at.unwrap_or(world.now),
                            self.owner,
                            (k as u64) << 3 | RETRY_SEND,
                        );
                    }
                }
            }
        }
    }

    fn on_packet(&mut self, world: &mut World, vm: usize, packet: Packet) {
        let k = (packet.tag >> 3) as usize;
        if packet.tag & 7 == REQUEST {
            let cost = self.costs.call + self.costs.send;
            let tag = (k as u64) << 3 | REQUESTED;
            world.work(world.vms[vm].app, Level::App, cost, self.owner, tag);
        } else {
            self.prepare(world, k);
        }
    }

    fn on_work_done(&mut self, world: &mut World, tag: u64) {
        let k = (tag >> 3) as usize;
        match tag & 7 {
            REQUESTED => {
                self.connections[k].unsent = self.bytes;
                for _ in 0..MAX_CHUNKS_IN_FLIGHT {
                    if world.paths.vpipe {
                        world.set_timer(
                            world.now + HANDOVER_LATENCY,
                            self.owner,
                            (k as u64) << 3 | HOST,
                        );
                    } else {
                        self.prepare(world, k);
                    }
                }
            }
            PREPARED => self.send(world, k),
            _ => {}
        }
    }

    fn on_peer_packet(&mut self, world: &mut World, packet: Packet) {
        let k = (packet.tag >> 3) as usize;
        let bytes = u64::from(packet.bytes - 90);
        let c = &mut self.connections[k];
        c.in_flight = c.in_flight.saturating_sub(bytes);
        if c.unsent == 0 && c.in_flight == 0 {
            self.served += self.bytes;
            self.times.push(world.now - c.requested_at);
            if world.paths.vpipe {
                let vcpu = world.vms[self.vm].app;
                let tag = (k as u64) << 3 | RETURNED;
                world.work(vcpu, Level::App, self.costs.call, self.owner, tag);
            }
            self.request(world, k);
        } else if world.paths.vpipe {
            world.set_timer(world.now, self.owner, (k as u64) << 3 | HOST);
        } else {
            world.send_in(self.vm, self.packet(k, ACK, 0), 50_000);
        }
    }

    fn figures(&self, world: &World) -> Vec<(String, f64)> {
        let seconds = world.now.max(1) as f64 / 1e9;
        let mut all = vec![("served MB/s".into(), self.served as f64 / 1e6 / seconds)];
        all.extend(self.times.figures("file"));
        all
    }
}
