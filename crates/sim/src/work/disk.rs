// SPDX-License-Identifier: Apache-2.0
//! Writing a file through the guest's page cache, or reading it with read-ahead (IOzone).

use viola_policy::slices::Nanos;

use super::GuestCosts;
use crate::cpu::Level;
use crate::net::Server;
use crate::world::{Workload, World};

/// A disk, and the costs of its use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Disk {
    /// Speed, bytes per second.
    pub rate: f64,
    /// Size of a request, bytes.
    pub request: u64,
    /// Maximum number of requests in flight.
    pub depth: u64,
    /// Guest's time to submit a request, ns.
    pub submit: Nanos,
    /// Guest's time to complete a request, ns.
    pub complete: Nanos,
}

/// Time in which a disk of `rate` bytes per second reads or writes `bytes` bytes, ns.
pub(super) fn read_time(bytes: u64, rate: f64) -> Nanos {
    (bytes as f64 * 1e9 / rate.max(1.0)) as Nanos
}

impl Disk {
    /// Serves a submitted request; the timer of `owner` expires when it is served.
    fn serve(&self, world: &mut World, server: &mut Server, owner: usize) {
        let time = read_time(self.request, self.rate);
        if let Some(at) = server.serve(world.now, time) {
            world.set_timer(at, owner, 0);
        }
    }

    /// The guest completes a request that is served.
    fn served(&self, world: &mut World, vm: usize, owner: usize) {
        let vcpu = world.vms[vm].irq;
        world.work(vcpu, Level::Irq, self.complete, owner, COMPLETED);
    }
}

const SUBMITTED: u64 = 0;
const COMPLETED: u64 = 1;
const COPIED: u64 = 2;

/// A process that writes a file of `total` bytes.
#[derive(Debug)]
pub struct Write {
    vm: usize,
    disk: Disk,
    total: u64,
    /// Maximum dirty bytes; the writer blocks above.
    max_dirty: u64,
    costs: GuestCosts,
    owner: usize,
    server: Server,
    written: u64,
    flushed: u64,
    in_flight: u64,
    copying: bool,
    finished: Option<Nanos>,
}

impl Write {
    /// A writer.
    pub fn new(vm: usize, disk: Disk, total: u64, max_dirty: u64, costs: GuestCosts) -> Self {
        Self {
            vm,
            disk,
            total,
            max_dirty,
            costs,
            owner: 0,
            server: Server::new(Nanos::MAX),
            written: 0,
            flushed: 0,
            in_flight: 0,
            copying: false,
            finished: None,
        }
    }

    fn proceed(&mut self, world: &mut World) {
        let request = self.disk.request;
        let dirty = self.written - self.flushed;
        if !self.copying && self.written < self.total && dirty + request <= self.max_dirty {
            self.copying = true;
            let vcpu = world.vms[self.vm].app;
            world.work(
                vcpu,
                Level::App,
                self.costs.blocking_call(request),
                self.owner,
                COPIED,
            );
        }
        while self.in_flight < self.disk.depth && dirty >= (self.in_flight + 1) * request {
            self.in_flight += 1;
            let vcpu = world.vms[self.vm].irq;
            world.work(vcpu, Level::Irq, self.disk.submit, self.owner, SUBMITTED);
        }
    }
}

impl Workload for Write {
    fn start(&mut self, world: &mut World, owner: usize) {
        self.owner = owner;
        self.proceed(world);
    }

    fn on_timer(&mut self, world: &mut World, _tag: u64) {
        self.disk.served(world, self.vm, self.owner);
    }

    fn on_work_done(&mut self, world: &mut World, tag: u64) {
        match tag {
            SUBMITTED => self.disk.serve(world, &mut self.server, self.owner),
            COMPLETED => {
                self.in_flight -= 1;
                self.flushed += self.disk.request;
                if self.flushed >= self.total && self.finished.is_none() {
                    self.finished = Some(world.now);
                }
            }
            _ => {
                self.copying = false;
                self.written += self.disk.request;
            }
        }
        self.proceed(world);
    }

    fn figures(&self, world: &World) -> Vec<(String, f64)> {
        let end = self.finished.unwrap_or(world.now).max(1) as f64 / 1e9;
        vec![
            ("written MB/s".into(), self.flushed as f64 / 1e6 / end),
            ("disk busy %".into(), self.server.busy as f64 / 1e7 / end),
        ]
    }
}

/// A process that reads a file sequentially and requests more data as it uses the last.
#[derive(Debug)]
pub struct Read {
    vm: usize,
    disk: Disk,
    costs: GuestCosts,
    owner: usize,
    server: Server,
    ready: u64,
    in_flight: u64,
    copying: bool,
    read: u64,
}

impl Read {
    /// A reader without end.
    pub fn new(vm: usize, disk: Disk, costs: GuestCosts) -> Self {
        Self {
            vm,
            disk,
            costs,
            owner: 0,
            server: Server::new(Nanos::MAX),
            ready: 0,
            in_flight: 0,
            copying: false,
            read: 0,
        }
    }

    fn proceed(&mut self, world: &mut World) {
        if self.copying || self.ready == 0 {
            return;
        }
        self.copying = true;
        let vcpu = world.vms[self.vm].app;
        let cost = self.costs.blocking_call(self.disk.request);
        world.work(vcpu, Level::App, cost, self.owner, COPIED);
    }

    /// Read-ahead is the process's own work: it stops while the process does not run.
    fn request_more(&mut self, world: &mut World) {
        while self.in_flight + self.ready < self.disk.depth {
            self.in_flight += 1;
            let vcpu = world.vms[self.vm].app;
            world.work(vcpu, Level::App, self.disk.submit, self.owner, SUBMITTED);
        }
    }
}

impl Workload for Read {
    fn start(&mut self, world: &mut World, owner: usize) {
        self.owner = owner;
        self.request_more(world);
    }

    fn on_timer(&mut self, world: &mut World, _tag: u64) {
        self.disk.served(world, self.vm, self.owner);
    }

    fn on_work_done(&mut self, world: &mut World, tag: u64) {
        match tag {
            SUBMITTED => self.disk.serve(world, &mut self.server, self.owner),
            COMPLETED => {
                self.in_flight -= 1;
                self.ready += 1;
            }
            _ => {
                self.copying = false;
                self.ready -= 1;
                self.read += self.disk.request;
                self.request_more(world);
            }
        }
        self.proceed(world);
    }

    fn figures(&self, world: &World) -> Vec<(String, f64)> {
        let seconds = world.now.max(1) as f64 / 1e9;
        vec![
            ("read MB/s".into(), self.read as f64 / 1e6 / seconds),
            (
                "disk busy %".into(),
                self.server.busy as f64 / 1e7 / seconds,
            ),
        ]
    }
}
