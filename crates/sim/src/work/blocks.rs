// SPDX-License-Identifier: Apache-2.0
//! HDFS blocks that a VM reads from a DataNode in another VM of the host: through both guests with a copy at each step
//! (vRead, section 2.1), or with vread past the DataNode.

use viola_policy::slices::{MS, Nanos};

use super::disk::read_time;
use super::{GuestCosts, Times};
use crate::cpu::Level;
use crate::net::{Packet, Server};
use crate::world::{Workload, World};

/// What goes from VM to VM at once, and how many of these without an answer.
const CHUNK: u64 = 64 << 10;
const WINDOW: u64 = 2;
/// A request of which nothing comes for so long is made again.
const LOST: Nanos = 1_000 * MS;

/// A reader and its DataNode.
#[derive(Debug)]
pub struct Blocks {
    vm: usize,
    node: usize,
    /// Bytes of a request.
    bytes: u64,
    /// Bytes per second of the DataNode's disk; `None`: all is cached.
    disk: Option<f64>,
    costs: GuestCosts,
    owner: usize,
    device: Server,
    worker: Server,
    number: u64,
    asked: Nanos,
    progress: Nanos,
    unsent: u64,
    unread: u64,
    read: u64,
    times: Times,
    again: u64,
}

/// Marks: what it is, in the lowest bits; above them the number of the request.
const ASK: u64 = 0;
const READ: u64 = 1;
const ON_DISK: u64 = 2;
const DATA: u64 = 3;
const ACK: u64 = 4;
const TOLD: u64 = 5;
const CHECK: u64 = 6;
const ALL: u64 = 7;

impl Blocks {
    /// Not begun; the next request is made when the last is answered.
    pub fn new(vm: usize, node: usize, bytes: u64, disk: Option<f64>, costs: GuestCosts) -> Self {
        Self {
            vm,
            node,
            bytes: bytes.max(1),
            disk,
            costs,
            owner: 0,
            device: Server::new(Nanos::MAX),
            worker: Server::new(Nanos::MAX),
            number: 0,
            asked: 0,
            progress: 0,
            unsent: 0,
            unread: 0,
            read: 0,
            times: Times::default(),
            again: 0,
        }
    }

    fn tag(&self, what: u64) -> u64 {
        self.number << 3 | what
    }

    fn packet(&self, what: u64, bytes: u64) -> Packet {
        Packet {
            owner: self.owner,
            tag: self.tag(what),
            bytes: bytes as u32 + 90,
            stream: false,
        }
    }

    fn next(&mut self, world: &mut World) {
        self.asked = world.now;
        self.request(world);
    }

    fn request(&mut self, world: &mut World) {
        self.number += 1;
        self.progress = world.now;
        self.unread = self.bytes;
        let vcpu = world.vms[self.vm].app;
        world.work(vcpu, Level::App, self.costs.call, self.owner, self.tag(ASK));
        world.call(world.now + LOST, self.owner, self.tag(CHECK));
    }

    /// When the disk has what is asked for.
    fn device(&mut self, now: Nanos) -> Nanos {
        let Some(rate) = self.disk else { return now };
        let at = self.device.serve(now, read_time(self.bytes, rate));
        at.unwrap_or(now)
    }

    /// The DataNode sends a next chunk.
    fn send(&mut self, world: &mut World) {
        let bytes = self.unsent.min(CHUNK);
        if bytes > 0 {
            self.unsent -= bytes;
            world.send_across(self.vm, self.packet(DATA, bytes));
        }
    }

    fn came(&mut self, world: &mut World, bytes: u64) {
        self.progress = world.now;
        self.unread = self.unread.saturating_sub(bytes);
        self.read += bytes;
        if self.unread == 0 {
            self.times.push(world.now - self.asked);
            self.next(world);
        }
    }
}

impl Workload for Blocks {
    fn start(&mut self, world: &mut World, owner: usize) {
        self.owner = owner;
        self.next(world);
    }

    fn call(&mut self, world: &mut World, tag: u64) {
        if tag >> 3 != self.number {
            return;
        }
        match tag & 7 {
            CHECK if world.now >= self.progress + LOST => {
                self.again += 1;
                self.request(world);
            }
            CHECK => world.call(self.progress + LOST, self.owner, tag),
            ON_DISK => {
                // Out of the virtual disk into the process, and from there into the socket.
                let cost = 2 * self.costs.copying(self.bytes);
                let vcpu = world.vms[self.node].app;
                world.work(vcpu, Level::App, cost, self.owner, self.tag(ON_DISK));
            }
            _ => {
                let vcpu = world.vms[self.vm].irq;
                let cost = world.nics[self.vm].costs.interrupt;
                world.work(vcpu, Level::Irq, cost, self.owner, self.tag(TOLD));
            }
        }
    }

    fn received(&mut self, world: &mut World, _vm: usize, packet: Packet) {
        if packet.tag >> 3 != self.number {
            return;
        }
        match packet.tag & 7 {
            READ => {
                let at = self.device(world.now);
                world.call(at, self.owner, self.tag(ON_DISK));
            }
            ACK => self.send(world),
            _ => {
                let bytes = u64::from(packet.bytes - 90);
                let cost = self.costs.copying(bytes);
                let vcpu = world.vms[self.vm].app;
                world.work(vcpu, Level::App, cost, self.owner, self.tag(DATA));
            }
        }
    }

    fn done(&mut self, world: &mut World, tag: u64) {
        if tag >> 3 != self.number {
            return;
        }
        match tag & 7 {
            ASK if world.help.vread => {
                // A thread of the host reads and copies to where the guest finds it.
                let at = self.device(world.now);
                let at = self.worker.serve(at, self.costs.copying(self.bytes));
                world.call(at.unwrap_or(world.now), self.owner, self.tag(TOLD));
            }
            ASK => world.send_across(self.node, self.packet(READ, 160)),
            ON_DISK => {
                self.unsent = self.bytes;
                for _ in 0..WINDOW {
                    self.send(world);
                }
            }
            TOLD => {
                let vcpu = world.vms[self.vm].app;
                let cost = self.costs.copying(self.bytes);
                world.work(vcpu, Level::App, cost, self.owner, self.tag(ALL));
            }
            ALL => self.came(world, self.bytes),
            _ => {
                world.send_across(self.node, self.packet(ACK, 0));
                self.came(world, self.unread.min(CHUNK));
            }
        }
    }

    fn figures(&self, world: &World) -> Vec<(String, f64)> {
        let seconds = world.now.max(1) as f64 / 1e9;
        let mut all = vec![("read MB/s".into(), self.read as f64 / 1e6 / seconds)];
        all.extend(self.times.figures("read"));
        all.push(("asked again".into(), self.again as f64));
        all
    }
}
