// SPDX-License-Identifier: Apache-2.0
//! A VM that reads HDFS blocks from a DataNode VM of the same host: through both guests with a copy at each step
//! (vRead, section 2.1), or with vread past the DataNode VM.

use viola_policy::slices::{MS, Nanos};

use super::disk::read_time;
use super::{Durations, GuestCosts};
use crate::cpu::Level;
use crate::net::{Packet, Server};
use crate::world::{Workload, World};

/// Size of a chunk between the VMs, bytes, and number of chunks in flight without an acknowledgement.
const CHUNK_BYTES: u64 = 64 << 10;
const MAX_CHUNKS_IN_FLIGHT: u64 = 2;
/// A request without progress for this long is repeated.
const REQUEST_TIMEOUT: Nanos = 1_000 * MS;

/// A reader and its DataNode VM.
#[derive(Debug)]
pub struct Blocks {
    vm: usize,
    node: usize,
    /// Size of a request, bytes.
    bytes: u64,
    /// Speed of the DataNode's disk, bytes per second; `None`: all blocks are cached.
    disk: Option<f64>,
    costs: GuestCosts,
    owner: usize,
    disk_time: Server,
    worker: Server,
    number: u64,
    requested_at: Nanos,
    progress_at: Nanos,
    unsent: u64,
    unread: u64,
    read: u64,
    times: Durations,
    repeated: u64,
}

/// Tags: the kind in the lowest bits, above it the number of the request.
const ASK: u64 = 0;
const READ: u64 = 1;
const ON_DISK: u64 = 2;
const DATA: u64 = 3;
const ACK: u64 = 4;
const INTERRUPTED: u64 = 5;
const CHECK_PROGRESS: u64 = 6;
const READ_ALL: u64 = 7;

impl Blocks {
    /// A reader that makes the next request when the last one is answered.
    pub fn new(vm: usize, node: usize, bytes: u64, disk: Option<f64>, costs: GuestCosts) -> Self {
        Self {
            vm,
            node,
            bytes: bytes.max(1),
            disk,
            costs,
            owner: 0,
            disk_time: Server::new(Nanos::MAX),
            worker: Server::new(Nanos::MAX),
            number: 0,
            requested_at: 0,
            progress_at: 0,
            unsent: 0,
            unread: 0,
            read: 0,
            times: Durations::default(),
            repeated: 0,
        }
    }

    fn tag(&self, what: u64) -> u64 {
        self.number << 3 | what
    }

    fn packet(&self, what: u64, bytes: u64) -> Packet {
        Packet {
            owner: self.owner,
            connection: 0,
            tag: self.tag(what),
            bytes: bytes as u32 + 90,
            stream: false,
        }
    }

    fn next_request(&mut self, world: &mut World) {
        self.requested_at = world.now;
        self.request(world);
    }

    fn request(&mut self, world: &mut World) {
        self.number += 1;
        self.progress_at = world.now;
        self.unread = self.bytes;
        let vcpu = world.vms[self.vm].app;
        world.work(vcpu, Level::App, self.costs.call, self.owner, self.tag(ASK));
        world.set_timer(
            world.now + REQUEST_TIMEOUT,
            self.owner,
            self.tag(CHECK_PROGRESS),
        );
    }

    /// Time at which the disk has read a request, ns.
    fn disk_time(&mut self, now: Nanos) -> Nanos {
        let Some(rate) = self.disk else { return now };
        let at = self.disk_time.serve(now, read_time(self.bytes, rate));
        at.unwrap_or(now)
    }

    /// The DataNode sends the next chunk.
    fn send(&mut self, world: &mut World) {
        let bytes = self.unsent.min(CHUNK_BYTES);
        if bytes > 0 {
            self.unsent -= bytes;
            world.send_across(self.vm, self.packet(DATA, bytes));
        }
    }

    fn add_read(&mut self, world: &mut World, bytes: u64) {
        self.progress_at = world.now;
        self.unread = self.unread.saturating_sub(bytes);
        self.read += bytes;
        if self.unread == 0 {
            self.times.push(world.now - self.requested_at);
            self.next_request(world);
        }
    }
}

impl Workload for Blocks {
    fn start(&mut self, world: &mut World, owner: usize) {
        self.owner = owner;
        self.next_request(world);
    }

    fn on_timer(&mut self, world: &mut World, tag: u64) {
        if tag >> 3 != self.number {
            return;
        }
        match tag & 7 {
            CHECK_PROGRESS if world.now >= self.progress_at + REQUEST_TIMEOUT => {
                self.repeated += 1;
                self.request(world);
            }
            CHECK_PROGRESS => world.set_timer(self.progress_at + REQUEST_TIMEOUT, self.owner, tag),
            ON_DISK => {
                // Copies from the virtual disk to the process, and from there to the socket.
                let cost = 2 * self.costs.blocking_call(self.bytes);
                let vcpu = world.vms[self.node].app;
                world.work(vcpu, Level::App, cost, self.owner, self.tag(ON_DISK));
            }
            _ => {
                let vcpu = world.vms[self.vm].irq;
                let cost = world.nics[self.vm].costs.interrupt;
                world.work(vcpu, Level::Irq, cost, self.owner, self.tag(INTERRUPTED));
            }
        }
    }

    fn on_packet(&mut self, world: &mut World, _vm: usize, packet: Packet) {
        if packet.tag >> 3 != self.number {
            return;
        }
        match packet.tag & 7 {
            READ => {
                let at = self.disk_time(world.now);
                world.set_timer(at, self.owner, self.tag(ON_DISK));
            }
            ACK => self.send(world),
            _ => {
                let bytes = u64::from(packet.bytes - 90);
                let cost = self.costs.blocking_call(bytes);
                let vcpu = world.vms[self.vm].app;
                world.work(vcpu, Level::App, cost, self.owner, self.tag(DATA));
            }
        }
    }

    fn on_work_done(&mut self, world: &mut World, tag: u64) {
        if tag >> 3 != self.number {
            return;
        }
        match tag & 7 {
            ASK if world.paths.vread => {
                // A thread of the host reads and copies the data to the guest.
                let at = self.disk_time(world.now);
                let at = self.worker.serve(at, self.costs.blocking_call(self.bytes));
                world.set_timer(at.unwrap_or(world.now), self.owner, self.tag(INTERRUPTED));
            }
            ASK => world.send_across(self.node, self.packet(READ, 160)),
            ON_DISK => {
                self.unsent = self.bytes;
                for _ in 0..MAX_CHUNKS_IN_FLIGHT {
                    self.send(world);
                }
            }
            INTERRUPTED => {
                let vcpu = world.vms[self.vm].app;
                let cost = self.costs.blocking_call(self.bytes);
                world.work(vcpu, Level::App, cost, self.owner, self.tag(READ_ALL));
            }
            READ_ALL => self.add_read(world, self.bytes),
            _ => {
                world.send_across(self.node, self.packet(ACK, 0));
                self.add_read(world, self.unread.min(CHUNK_BYTES));
            }
        }
    }

    fn figures(&self, world: &World) -> Vec<(String, f64)> {
        let seconds = world.now.max(1) as f64 / 1e9;
        let mut all = vec![("read MB/s".into(), self.read as f64 / 1e6 / seconds)];
        all.extend(self.times.figures("read"));
        all.push(("asked again".into(), self.repeated as f64));
        all
    }
}
