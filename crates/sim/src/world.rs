// SPDX-License-Identifier: Apache-2.0
//! One simulated host with its peers: what ties cores, NICs and workloads together.

use viola_policy::slices::{FOREVER, Nanos};

use crate::cpu::{Cpus, Done, Hog, Level};
use crate::net::{Nic, Packet, Server, wire_time};
use crate::queue::Queue;
use crate::random::Random;

/// How often the machines of the pools hear of each other's cores: as the controllers read the counters.
const EXCHANGE: Nanos = 1_000_000;

#[derive(Debug)]
enum Event {
    Period {
        vcpu: usize,
        every: Nanos,
    },
    Exchange,
    /// A vCPU begins to compute.
    Begin {
        vcpu: usize,
        hog: Hog,
    },
    /// A packet comes to a VM's ring, from another one here.
    Ring {
        vm: usize,
        packet: Packet,
    },
    /// The NIC tells of packets for a VM.
    Told {
        vm: usize,
    },
    /// A packet that a VM sent comes to its peer.
    Peer {
        packet: Packet,
    },
    /// Something that a workload wants to hear of.
    Call {
        owner: usize,
        tag: u64,
    },
}

/// The owner under which NICs submit their softirq work; the mark is the VM.
const NICS: usize = usize::MAX;

/// A VM: which vCPU takes interrupts, which runs its processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vm {
    /// Takes interrupts and does kernel I/O work.
    pub irq: usize,
    /// Runs the processes of workloads.
    pub app: usize,
}

/// The wires and the host's own work for packets.
#[derive(Debug)]
pub struct Wires {
    /// Bandwidth of either direction, bits per second.
    pub bits: u64,
    /// Into the host.
    pub inward: Server,
    /// Out of it.
    pub outward: Server,
    /// Driver domain, or the I/O threads as one: what comes in.
    pub host_in: Server,
    /// What goes out, and from VM to VM.
    pub host_out: Server,
}

impl Wires {
    /// Both directions of `bits` per second; queues of the switch and of the host hold `queue` ns of traffic.
    pub fn new(bits: u64, queue: Nanos) -> Self {
        Self {
            bits,
            // A sender's queue is as long, and streams look before they send.
            inward: Server::new(queue.max(2 * Self::sender_queue(bits))),
            outward: Server::new(queue),
            host_in: Server::new(queue),
            host_out: Server::new(queue),
        }
    }

    /// Time that a sender's own queue takes at most: 1,000 packets (txqueuelen).
    fn sender_queue(bits: u64) -> Nanos {
        wire_time(1_000 * 1_538, bits)
    }

    /// Whether a sender's own queue is full: its kernel tells a stream so, and nothing is lost.
    pub fn sender_full(&self, now: Nanos) -> bool {
        self.inward.backlog(now) >= Self::sender_queue(self.bits)
    }

    /// Packets dropped before a ring.
    pub fn dropped(&self) -> u64 {
        [&self.inward, &self.outward, &self.host_in, &self.host_out]
            .iter()
            .map(|s| s.dropped)
            .sum()
    }
}

/// Data paths that the host has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Help {
    /// Blocks are read past DataNodes.
    pub vread: bool,
    /// Files are sent by the host.
    pub vpipe: bool,
}

/// A simulated host. Workloads act through it.
pub struct World {
    /// Now, ns.
    pub now: Nanos,
    /// Cores and vCPUs.
    pub cpus: Cpus,
    /// VMs.
    pub vms: Vec<Vm>,
    /// Their NICs, in the same order.
    pub nics: Vec<Nic>,
    /// Wires.
    pub wires: Wires,
    /// Data paths.
    pub help: Help,
    /// For everything random.
    pub random: Random,
    /// What vCPUs compute, and from when on.
    pub hogs: Vec<(Nanos, usize, Hog)>,
    queue: Queue<Event>,
    batch: Vec<Packet>,
    pools: bool,
    handled: u64,
}

/// What makes VMs work. All calls are for the workload that named itself as `owner`.
pub trait Workload {
    /// At time 0; `owner` is its number from now on.
    fn start(&mut self, world: &mut World, owner: usize);
    /// A time that it asked for ([`World::call`]) has come.
    fn call(&mut self, _world: &mut World, _tag: u64) {}
    /// Work that it submitted ([`World::work`]) is done.
    fn done(&mut self, _world: &mut World, _tag: u64) {}
    /// A packet came through the VM's softirq.
    fn received(&mut self, _world: &mut World, _vm: usize, _packet: Packet) {}
    /// A packet that a VM sent came to the other end.
    fn at_peer(&mut self, _world: &mut World, _packet: Packet) {}
    /// Its figures so far: name and value.
    fn figures(&self, world: &World) -> Vec<(String, f64)>;
}

impl World {
    /// A host with these cores and wires.
    pub fn new(cpus: Cpus, wires: Wires, pools: bool, seed: u64) -> Self {
        Self {
            now: 0,
            cpus,
            vms: Vec::new(),
            nics: Vec::new(),
            wires,
            help: Help::default(),
            random: Random::new(seed),
            hogs: Vec::new(),
            queue: Queue::default(),
            batch: Vec::new(),
            pools,
            handled: 0,
        }
    }

    /// Asks for [`Workload::call`] at `at`.
    pub fn call(&mut self, at: Nanos, owner: usize, tag: u64) {
        self.queue
            .push(at.max(self.now), Event::Call { owner, tag });
    }

    /// Gives a vCPU work; [`Workload::done`] is called at its end.
    pub fn work(&mut self, vcpu: usize, level: Level, cost: Nanos, owner: usize, tag: u64) {
        self.cpus
            .submit(self.now, vcpu, level, cost, Done { owner, tag });
    }

    /// What a vCPU computes besides, from now on.
    pub fn set_hog(&mut self, vcpu: usize, hog: Hog) {
        self.cpus.set_hog(self.now, vcpu, hog);
        if let Hog::Duty { period, .. } = hog {
            // Not all begin together.
            let first = self.random.within(1, period);
            let every = period;
            self.queue
                .push(self.now + first, Event::Period { vcpu, every });
        }
    }

    /// A peer `delay` ns away sends a packet to a VM. It may be lost on the way.
    pub fn send_in(&mut self, vm: usize, packet: Packet, delay: Nanos) {
        let time = wire_time(u64::from(packet.bytes), self.wires.bits);
        let Some(at) = self.wires.inward.serve(self.now, time) else {
            return;
        };
        // The delay is put behind the queues, so that they are asked in order of time.
        let cost = self.nics[vm].host_cost(packet.bytes);
        let through = if cost == 0 {
            Some(at)
        } else {
            self.wires.host_in.serve(at, cost)
        };
        if let Some(at) = through {
            let (at, first) = self.nics[vm].arrives(packet, at + delay);
            if first {
                self.queue.push(at, Event::Told { vm });
            }
        }
    }

    /// A VM sends a packet to its peer, `delay` ns away. The guest's own time for it is the workload's business. Whether it
    /// goes: a queue may be full.
    pub fn send_out(&mut self, vm: usize, packet: Packet, delay: Nanos) -> bool {
        let nic = &mut self.nics[vm];
        nic.sent += 1;
        let cost = nic.host_cost(packet.bytes);
        let through = if cost == 0 {
            Some(self.now)
        } else {
            self.wires.host_out.serve(self.now, cost)
        };
        let time = wire_time(u64::from(packet.bytes), self.wires.bits);
        let goes = through.and_then(|at| self.wires.outward.serve(at, time));
        if let Some(at) = goes {
            self.queue.push(at + delay, Event::Peer { packet });
        }
        goes.is_some()
    }

    /// A VM sends to another one of this host: the host's work twice, no wire.
    pub fn send_across(&mut self, to: usize, packet: Packet) {
        let cost = 2 * self.nics[to].host_cost(packet.bytes);
        if let Some(at) = self.wires.host_out.serve(self.now, cost) {
            self.queue.push(at, Event::Ring { vm: to, packet });
        }
    }

    fn softirq(&mut self, vm: usize, cost: Option<Nanos>) {
        if let Some(cost) = cost {
            let vcpu = self.nics[vm].vcpu;
            self.work(vcpu, Level::Irq, cost, NICS, vm as u64);
        }
    }

    /// Events handled so far.
    pub fn handled(&self) -> u64 {
        self.handled
    }
}

/// A simulation: a host and what its VMs do.
pub struct Simulation {
    /// The host.
    pub world: World,
    /// The workloads.
    pub workloads: Vec<Box<dyn Workload + Send>>,
    begun: bool,
}

impl Simulation {
    /// At time 0.
    pub fn new(world: World, workloads: Vec<Box<dyn Workload + Send>>) -> Self {
        Self {
            world,
            workloads,
            begun: false,
        }
    }

    /// Runs until `end`, ns.
    pub fn run(&mut self, end: Nanos) {
        let Self {
            world,
            workloads,
            begun,
        } = self;
        if !*begun {
            *begun = true;
            world.cpus.begin(0);
            for (at, vcpu, hog) in std::mem::take(&mut world.hogs) {
                if at == 0 {
                    world.set_hog(vcpu, hog);
                } else {
                    world.queue.push(at, Event::Begin { vcpu, hog });
                }
            }
            for (owner, w) in workloads.iter_mut().enumerate() {
                w.start(world, owner);
            }
            if world.pools {
                world.queue.push(EXCHANGE, Event::Exchange);
            }
        }
        loop {
            // Of the same time what comes from elsewhere is first.
            let timer = world.cpus.timers.next();
            let at = world.queue.next().unwrap_or(FOREVER).min(timer);
            if at > end || at == FOREVER {
                break;
            }
            world.now = at;
            world.handled += 1;
            let Some((_, event)) = world.queue.pop(at) else {
                let core = world.cpus.timers.first();
                world.cpus.timer(at, core);
                finish(world, workloads);
                continue;
            };
            match event {
                Event::Period { vcpu, every } => {
                    world.cpus.new_period(at, vcpu);
                    world.queue.push(at + every, Event::Period { vcpu, every });
                }
                Event::Begin { vcpu, hog } => world.set_hog(vcpu, hog),
                Event::Exchange => {
                    world.cpus.exchange(at);
                    world.queue.push(at + EXCHANGE, Event::Exchange);
                }
                Event::Ring { vm, packet } => {
                    let cost = world.nics[vm].push([packet]);
                    world.softirq(vm, cost);
                }
                Event::Told { vm } => {
                    let cost = world.nics[vm].told(at);
                    world.softirq(vm, cost);
                }
                Event::Peer { packet } => workloads[packet.owner].at_peer(world, packet),
                Event::Call { owner, tag } => workloads[owner].call(world, tag),
            }
            finish(world, workloads);
        }
        world.now = end;
        world.cpus.settle(end);
    }
}

/// What was done in an event is told, and cores whose timers went off go on.
fn finish(world: &mut World, workloads: &mut [Box<dyn Workload + Send>]) {
    while let Some(Done { owner, tag }) = world.cpus.done.pop_front() {
        if owner == NICS {
            softirq(world, workloads, tag as usize);
        } else {
            workloads[owner].done(world, tag);
        }
    }
    world.cpus.conclude(world.now);
}

/// The softirq work of a VM's NIC is done.
fn softirq(world: &mut World, workloads: &mut [Box<dyn Workload + Send>], vm: usize) {
    let mut batch = std::mem::take(&mut world.batch);
    let cost = world.nics[vm].done(&mut batch);
    world.softirq(vm, cost);
    for packet in batch.drain(..) {
        workloads[packet.owner].received(world, vm, packet);
    }
    world.batch = batch;
}
