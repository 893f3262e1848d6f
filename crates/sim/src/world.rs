// SPDX-License-Identifier: Apache-2.0
//! One simulated host and its peers: it connects cores, NICs and workloads.

use viola_policy::slices::{FOREVER, Nanos};

use crate::cpu::{Completion, CpuLoad, Cpus, Level};
use crate::net::{Nic, Packet, Server, wire_time};
use crate::queue::Queue;
use crate::random::Random;

/// Interval at which the cores of the two pools exchange their VMs' usage, as controllers read the counters.
const EXCHANGE_INTERVAL: Nanos = 1_000_000;

#[derive(Debug)]
enum Event {
    Period {
        vcpu: usize,
        every: Nanos,
    },
    Exchange,
    /// A vCPU begins its computing load.
    StartLoad {
        vcpu: usize,
        load: CpuLoad,
    },
    /// A packet from another VM of the host arrives at a VM's ring.
    Ring {
        vm: usize,
        packet: Packet,
    },
    /// The NIC interrupts a VM.
    Interrupt {
        vm: usize,
    },
    /// A packet from a VM arrives at its peer.
    Peer {
        packet: Packet,
    },
    /// The timer of a workload.
    Timer {
        owner: usize,
        tag: u64,
    },
}

/// Owner of the NICs' softirq work; its tag is the VM.
const NIC_OWNER: usize = usize::MAX;

/// The vCPUs of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vm {
    /// vCPU that takes interrupts and does the kernel's I/O work.
    pub irq: usize,
    /// vCPU that runs the processes of workloads.
    pub app: usize,
}

/// The wire in both directions, and the host's work for packets.
#[derive(Debug)]
pub struct Wires {
    /// Bandwidth of each direction, bits per second.
    pub bits: u64,
    /// Wire into the host.
    pub inward: Server,
    /// Wire out of the host.
    pub outward: Server,
    /// Driver domain, or all I/O threads as one, for incoming packets.
    pub host_in: Server,
    /// The same for outgoing packets, and for packets between VMs.
    pub host_out: Server,
}

impl Wires {
    /// Wires of `bits` per second. The queues of switch and host hold `queue` ns of traffic.
    pub fn new(bits: u64, queue: Nanos) -> Self {
        Self {
            bits,
            // A sender's queue is at least as long, and streams check it before they send.
            inward: Server::new(queue.max(2 * Self::sender_queue(bits))),
            outward: Server::new(queue),
            host_in: Server::new(queue),
            host_out: Server::new(queue),
        }
    }

    /// Time to send a full queue of a sender, 1,000 packets (txqueuelen).
    fn sender_queue(bits: u64) -> Nanos {
        wire_time(1_000 * 1_538, bits)
    }

    /// Whether a sender's own queue is full. Its kernel then tells the stream, and no packet is lost.
    pub fn sender_full(&self, now: Nanos) -> bool {
        self.inward.backlog(now) >= Self::sender_queue(self.bits)
    }

    /// Packets dropped before they reach a ring.
    pub fn dropped(&self) -> u64 {
        [&self.inward, &self.outward, &self.host_in, &self.host_out]
            .iter()
            .map(|s| s.dropped)
            .sum()
    }
}

/// Data paths of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DataPaths {
    /// vread: blocks are read past the DataNode VM.
    pub vread: bool,
    /// vpipe: the host sends files.
    pub vpipe: bool,
}

/// A simulated host. Workloads act through it.
pub struct World {
    /// Time, ns.
    pub now: Nanos,
    /// Cores and vCPUs.
    pub cpus: Cpus,
    /// VMs.
    pub vms: Vec<Vm>,
    /// NICs, in the order of `vms`.
    pub nics: Vec<Nic>,
    /// The wire and the host's packet work.
    pub wires: Wires,
    /// Data paths.
    pub paths: DataPaths,
    /// Random numbers of the host and its workloads.
    pub random: Random,
    /// Computing loads: start (ns), vCPU, load.
    pub loads: Vec<(Nanos, usize, CpuLoad)>,
    queue: Queue<Event>,
    batch: Vec<Packet>,
    pools: bool,
    handled: u64,
}

/// Work of VMs. The simulation calls a workload for the events of its own number, `owner`.
pub trait Workload {
    /// Starts it at time 0; `owner` is its number from now on.
    fn start(&mut self, world: &mut World, owner: usize);
    /// A timer that it set ([`World::set_timer`]) has expired.
    fn on_timer(&mut self, _world: &mut World, _tag: u64) {}
    /// Work that it submitted ([`World::work`]) is done.
    fn on_work_done(&mut self, _world: &mut World, _tag: u64) {}
    /// A packet arrived in a VM, through its softirq.
    fn on_packet(&mut self, _world: &mut World, _vm: usize, _packet: Packet) {}
    /// A packet from a VM arrived at the peer.
    fn on_peer_packet(&mut self, _world: &mut World, _packet: Packet) {}
    /// Its results so far: name and value.
    fn figures(&self, world: &World) -> Vec<(String, f64)>;
}

impl World {
    /// A host with these cores and wires, without VMs.
    pub fn new(cpus: Cpus, wires: Wires, pools: bool, seed: u64) -> Self {
        Self {
            now: 0,
            cpus,
            vms: Vec::new(),
            nics: Vec::new(),
            wires,
            paths: DataPaths::default(),
            random: Random::new(seed),
            loads: Vec::new(),
            queue: Queue::default(),
            batch: Vec::new(),
            pools,
            handled: 0,
        }
    }

    /// Calls [`Workload::on_timer`] at `at`, ns.
    pub fn set_timer(&mut self, at: Nanos, owner: usize, tag: u64) {
        self.queue
            .push(at.max(self.now), Event::Timer { owner, tag });
    }

    /// Gives a vCPU work of `cost` ns, and calls [`Workload::on_work_done`] at its end.
    pub fn work(&mut self, vcpu: usize, level: Level, cost: Nanos, owner: usize, tag: u64) {
        self.cpus
            .submit(self.now, vcpu, level, cost, Completion { owner, tag });
    }

    /// Sets the computing load of a vCPU from now on.
    pub fn set_load(&mut self, vcpu: usize, load: CpuLoad) {
        self.cpus.set_load(self.now, vcpu, load);
        if let CpuLoad::Duty { period, .. } = load {
            // Periods of different vCPUs are not in step.
            let first = self.random.within(1, period);
            let every = period;
            self.queue
                .push(self.now + first, Event::Period { vcpu, every });
        }
    }

    /// A peer `delay` ns away sends a packet to a VM. Queues on the way may drop it.
    pub fn send_in(&mut self, vm: usize, packet: Packet, delay: Nanos) {
        let time = wire_time(u64::from(packet.bytes), self.wires.bits);
        let Some(at) = self.wires.inward.serve(self.now, time) else {
            return;
        };
        // The delay follows the queues, so that their calls are in order of time.
        let cost = self.nics[vm].host_cost(packet.bytes);
        let through = if cost == 0 {
            Some(at)
        } else {
            self.wires.host_in.serve(at, cost)
        };
        if let Some(at) = through {
            let (at, first) = self.nics[vm].queue_for_interrupt(packet, at + delay);
            if first {
                self.queue.push(at, Event::Interrupt { vm });
            }
        }
    }

    /// A VM sends a packet to its peer, `delay` ns away. The workload accounts for the guest's own time. Returns
    /// whether it was sent: a queue may be full.
    pub fn send_out(&mut self, vm: usize, packet: Packet, delay: Nanos) -> bool {
        let nic = &mut self.nics[vm];
        nic.sent += 1;
        self.cpus.note_reply(self.now, nic.vcpu, packet);
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

    /// A VM sends a packet to another VM of this host: twice the host's work, and no wire.
    pub fn send_across(&mut self, to: usize, packet: Packet) {
        let cost = 2 * self.nics[to].host_cost(packet.bytes);
        if let Some(at) = self.wires.host_out.serve(self.now, cost) {
            self.queue.push(at, Event::Ring { vm: to, packet });
        }
    }

    fn softirq(&mut self, vm: usize, cost: Option<Nanos>) {
        if let Some(cost) = cost {
            let vcpu = self.nics[vm].vcpu;
            self.work(vcpu, Level::Irq, cost, NIC_OWNER, vm as u64);
        }
    }

    /// Number of events handled so far.
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
    started: bool,
}

impl Simulation {
    /// A simulation at time 0.
    pub fn new(world: World, workloads: Vec<Box<dyn Workload + Send>>) -> Self {
        Self {
            world,
            workloads,
            started: false,
        }
    }

    /// Runs until `end`, ns.
    pub fn run(&mut self, end: Nanos) {
        let Self {
            world,
            workloads,
            started,
        } = self;
        if !*started {
            *started = true;
            world.cpus.begin(0);
            for (at, vcpu, load) in std::mem::take(&mut world.loads) {
                if at == 0 {
                    world.set_load(vcpu, load);
                } else {
                    world.queue.push(at, Event::StartLoad { vcpu, load });
                }
            }
            for (owner, w) in workloads.iter_mut().enumerate() {
                w.start(world, owner);
            }
            if world.pools {
                world.queue.push(EXCHANGE_INTERVAL, Event::Exchange);
            }
        }
        loop {
            // At the same time events come before the timers of cores.
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
                report_completions(world, workloads);
                continue;
            };
            match event {
                Event::Period { vcpu, every } => {
                    world.cpus.new_period(at, vcpu);
                    world.queue.push(at + every, Event::Period { vcpu, every });
                }
                Event::StartLoad { vcpu, load } => world.set_load(vcpu, load),
                Event::Exchange => {
                    world.cpus.exchange(at);
                    world.queue.push(at + EXCHANGE_INTERVAL, Event::Exchange);
                }
                Event::Ring { vm, packet } => {
                    world.cpus.note_requests(at, world.nics[vm].vcpu, &[packet]);
                    let cost = world.nics[vm].push([packet]);
                    world.softirq(vm, cost);
                }
                Event::Interrupt { vm } => {
                    let nic = &mut world.nics[vm];
                    world.cpus.note_requests(at, nic.vcpu, nic.due(at));
                    let cost = nic.interrupt(at);
                    world.softirq(vm, cost);
                }
                Event::Peer { packet } => workloads[packet.owner].on_peer_packet(world, packet),
                Event::Timer { owner, tag } => workloads[owner].on_timer(world, tag),
            }
            report_completions(world, workloads);
        }
        world.now = end;
        world.cpus.settle(end);
    }
}

/// Reports completed work to its workloads, and lets cores whose timers expired decide.
fn report_completions(world: &mut World, workloads: &mut [Box<dyn Workload + Send>]) {
    while let Some(Completion { owner, tag }) = world.cpus.done.pop_front() {
        if owner == NIC_OWNER {
            softirq(world, workloads, tag as usize);
        } else {
            workloads[owner].on_work_done(world, tag);
        }
    }
    world.cpus.conclude(world.now);
}

/// The softirq work of a VM's NIC is complete.
fn softirq(world: &mut World, workloads: &mut [Box<dyn Workload + Send>], vm: usize) {
    let mut batch = std::mem::take(&mut world.batch);
    let cost = world.nics[vm].done(&mut batch);
    world.softirq(vm, cost);
    for packet in batch.drain(..) {
        workloads[packet.owner].on_packet(world, vm, packet);
    }
    world.batch = batch;
}
