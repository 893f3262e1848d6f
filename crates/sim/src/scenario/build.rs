// SPDX-License-Identifier: Apache-2.0
//! Turns the tables of a scenario file into a simulation, and a simulation into results.

use std::ops::Range;

use serde::Serialize;
use toml::Spanned;
use viola_policy::slices::{Class, DEFAULT_WEIGHT, MS, Nanos, US};
use viola_policy::turbo::RegularConfig;

use crate::lanes::LaneSetup;
use viola_policy::lanes::Config as LaneConfig;

use super::file::{self, File, Scheduler, Vm, Work};
use crate::setup::{HostSetup, Policy, VmSetup, lookbusy};
use crate::work::{
    Arrivals, Blocks, Direction, Disk, Files, GuestCosts, Http, MediaStream, Ping, Read, Requests,
    Tcp, TcpConfig, Udp, Write,
};
use crate::world::{Simulation, Workload};

type Fault = (Range<usize>, String);
type Maker = Box<dyn Fn() -> Box<dyn Workload + Send> + Send + Sync>;

/// A scenario that was checked.
pub struct Scenario {
    /// Its name.
    pub name: String,
    /// Simulated time, ns.
    pub time: Nanos,
    /// Seed of the file.
    pub seed: u64,
    /// The host.
    pub host: HostSetup,
    names: Vec<String>,
    work: Vec<(usize, &'static str, Maker)>,
}

/// Results of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// Name of the scenario.
    pub name: String,
    /// Simulated time, s.
    pub seconds: f64,
    /// Number of events handled.
    pub events: u64,
    /// Results per VM.
    pub vms: Vec<VmOutcome>,
}

/// Results of one VM.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VmOutcome {
    /// Name.
    pub name: String,
    /// Part of a core that it ran, with its turbo vCPU.
    pub ran: f64,
    /// Part of the time in which its vCPUs wanted to run and did not.
    pub waited: f64,
    /// Longest wait, ms.
    pub longest_wait_ms: f64,
    /// Number of packets that its ring dropped.
    pub ring_drops: u64,
    /// Results of its work: kind, name, value.
    pub figures: Vec<(String, String, f64)>,
}

impl Scenario {
    /// Runs it with a seed.
    pub fn run(&self, seed: u64) -> Outcome {
        self.run_on(&self.host, seed)
    }

    /// Runs its VMs' work on another host with as many VMs.
    pub fn run_on(&self, host: &HostSetup, seed: u64) -> Outcome {
        self.outcome(&self.simulated(host, seed))
    }

    /// As [`Scenario::run_on`]; returns the simulation.
    pub(crate) fn simulated(&self, host: &HostSetup, seed: u64) -> Simulation {
        let work = self.work.iter().map(|(_, _, make)| make()).collect();
        let mut sim = host.simulation(work, seed);
        sim.run(self.time);
        sim
    }

    /// The kinds of work of its VMs.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.work.iter().map(|(_, kind, _)| *kind)
    }

    fn outcome(&self, sim: &Simulation) -> Outcome {
        let time = self.time.max(1) as f64;
        let vm = |(k, name): (usize, &String)| {
            let vm = sim.world.vms[k];
            let mut of = vec![vm.app];
            if vm.irq != vm.app {
                of.push(vm.irq);
            }
            let of: Vec<_> = of.iter().map(|&v| sim.world.cpus.usage(v)).collect();
            let mut figures = Vec::new();
            for (w, (owner, kind, _)) in sim.workloads.iter().zip(&self.work) {
                if *owner == k {
                    let all = w.figures(&sim.world);
                    figures.extend(all.into_iter().map(|(n, v)| (kind.to_string(), n, v)));
                }
            }
            VmOutcome {
                name: name.clone(),
                ran: of.iter().map(|u| u.ran as f64).sum::<f64>() / time,
                waited: of.iter().map(|u| u.waited as f64).sum::<f64>() / time,
                longest_wait_ms: of.iter().map(|u| u.longest).max().unwrap_or(0) as f64 / 1e6,
                ring_drops: sim.world.nics[k].dropped,
                figures,
            }
        };
        Outcome {
            name: self.name.clone(),
            seconds: time / 1e9,
            events: sim.world.handled(),
            vms: self.names.iter().enumerate().map(vm).collect(),
        }
    }
}

/// The value, or `default`; an error if it is not within the bounds.
fn checked<T: Copy + PartialOrd + std::fmt::Display>(
    value: &Option<Spanned<T>>,
    key: &str,
    default: T,
    (min, max): (T, T),
) -> Result<T, Fault> {
    let Some(value) = value else {
        return Ok(default);
    };
    let v = *value.get_ref();
    if v >= min && v <= max {
        Ok(v)
    } else {
        Err((
            value.span(),
            format!("{key}: {v} is out of range: write a value from {min} to {max}"),
        ))
    }
}

pub(super) fn build(file: File) -> Result<Scenario, Fault> {
    let seconds = checked(&Some(file.seconds), "seconds", 1.0, (1e-6, 1e6))?;
    let mut host = host(&file.host)?;
    let (mut names, mut work_items) = (Vec::new(), Vec::new());
    for vm in &file.vm {
        let count = checked(&vm.get_ref().count, "count", 1, (1, 4096))?;
        for k in 0..count {
            let of = vm.get_ref();
            let index = host.vms.len();
            let setup = vm_setup(of, &host, index)?;
            host.vms.push(setup);
            let name = of.name.as_ref().map_or("vm", |n| n.get_ref());
            names.push(if count == 1 && of.name.is_some() {
                name.to_owned()
            } else {
                format!("{name}{}", if of.name.is_some() { k } else { index })
            });
            work_items.extend(of.work.iter().map(|one| (index, one)));
        }
    }
    let mut work = Vec::new();
    for (index, one) in work_items {
        let (kind, maker) = maker(one, index, &names, host.costs)?;
        work.push((index, kind, maker));
    }
    for core in 0..host.cores {
        let on = host.vms.iter().filter(|vm| vm.core == core).count();
        let max = viola_policy::slices::MAX_VMS;
        if on > max {
            let span = file.vm.last().map_or(0..0, Spanned::span);
            let what = format!(
                "core: {on} VMs are on core {core}, but a core takes {max}: move some to another core"
            );
            return Err((span, what));
        }
    }
    Ok(Scenario {
        name: file.name.unwrap_or_else(|| "scenario".into()),
        time: (seconds * 1e9).round() as Nanos,
        seed: file.seed,
        host,
        names,
        work,
    })
}

fn host(of: &file::Host) -> Result<HostSetup, Fault> {
    let defaults = HostSetup::default();
    let slice = |default: u64| {
        checked(&of.slice_us, "slice_us", default, (50, 1_000_000)).map(|us| us * US)
    };
    let policy = match of.scheduler {
        Scheduler::Credit | Scheduler::CreditNoBoost => Policy::Credit {
            slice: slice(30_000)?,
            boost: of.scheduler == Scheduler::Credit,
        },
        Scheduler::Vslicer => Policy::Paper {
            slice: slice(30_000)?,
        },
        Scheduler::Viola => Policy::Interleaved {
            batch_slice: slice(4_000)?,
        },
        Scheduler::Eevdf => Policy::Eevdf,
        Scheduler::Turbo => Policy::Turbo {
            slice: slice(30_000)?,
            slot: checked(&of.slot_us, "slot_us", 100, (20, 10_000))? * US,
            floor: RegularConfig::default().floor,
            reserve: viola_policy::turbo::TurboConfig::default().reserve,
        },
    };
    let turbo = of.scheduler == Scheduler::Turbo;
    if let (Some(cores), false) = (&of.turbo_cores, turbo) {
        let what = "turbo_cores: only the scheduler \"turbo\" has them";
        return Err((cores.span(), what.into()));
    }
    if let (Some(slot), false) = (&of.slot_us, turbo) {
        let what = "slot_us: only the scheduler \"turbo\" has turbo cores with slots";
        return Err((slot.span(), what.into()));
    }
    if let (Some(slice), Scheduler::Eevdf) = (&of.slice_us, of.scheduler) {
        let what = "slice_us: stock EEVDF has a slice of its own";
        return Err((slice.span(), what.into()));
    }
    let lanes = match &of.lanes {
        None => None,
        Some(lanes) => Some(LaneSetup {
            vfs: checked(&Some(lanes.vfs.clone()), "vfs", 1, (1, 256))?,
            every: checked(&lanes.every_ms, "every_ms", 100, (1, 86_400_000))? * MS,
            config: LaneConfig {
                hold: lanes
                    .hold_ms
                    .map_or(LaneConfig::default().hold, |ms| ms * MS),
                ..LaneConfig::default()
            },
            ..LaneSetup::default()
        }),
    };
    let copy = checked(&of.copy_ns_per_kb, "copy_ns_per_kb", 300.0, (0.0, 1e9))?;
    let mut nic = defaults.nic;
    nic.ring = checked(&of.ring, "ring", nic.ring, (1, 1 << 20))?;
    nic.interrupt = of.interrupt_ns.unwrap_or(nic.interrupt);
    nic.packet = of.packet_ns.unwrap_or(nic.packet);
    nic.host_packet = of.host_packet_ns.unwrap_or(nic.host_packet);
    nic.coalesce = of.coalesce_us.map_or(nic.coalesce, |us| us * US);
    Ok(HostSetup {
        cores: checked(&of.cores, "cores", 1, (1, 1024))?,
        turbo_cores: checked(
            &of.turbo_cores,
            "turbo_cores",
            usize::from(turbo),
            (1, 1024),
        )
        .or_else(|e| if turbo { Err(e) } else { Ok(0) })?,
        policy,
        bits: checked(&of.nic_mbit, "nic_mbit", 1000, (1, 1_000_000))? * 1_000_000,
        nic,
        costs: GuestCosts {
            call: of.call_ns.unwrap_or(defaults.costs.call),
            wake: 0,
            copy: copy / 1000.0,
            send: of.send_ns.unwrap_or(defaults.costs.send),
        },
        switch: of.switch_ns.unwrap_or(defaults.switch),
        decision: of.decision_ns.unwrap_or(defaults.decision),
        lanes,
        ..defaults
    })
}

fn vm_setup(of: &Vm, host: &HostSetup, index: usize) -> Result<VmSetup, Fault> {
    let cores = host.cores;
    let turbo = host.turbo_cores.max(1);
    let cap = match &of.cap_percent {
        None => None,
        Some(cap) if *cap.get_ref() > 100.0 => {
            let what = format!(
                "cap_percent: {} is more than the one vCPU of this VM can use",
                cap.get_ref()
            );
            return Err((cap.span(), what));
        }
        cap => Some((checked(cap, "cap_percent", 100.0, (0.1, 100.0))? * 10.0) as u32),
    };
    Ok(VmSetup {
        class: match of.class {
            file::Class::Ls => Class::Ls,
            file::Class::Batch => Class::Batch,
        },
        weight: checked(&of.weight, "weight", DEFAULT_WEIGHT, (1, 65_535))?,
        cap_permille: cap,
        microslice: checked(&of.microslice_us, "microslice_us", 5_000, (10, 100_000))? * US,
        core: checked(&of.core, "core", index % cores, (0, cores - 1))?,
        turbo_core: checked(&of.turbo_core, "turbo_core", index % turbo, (0, turbo - 1))?,
        load: lookbusy(checked(&of.load_percent, "load_percent", 0, (0, 100))?),
        refill: of.refill_us.unwrap_or(0) * US,
        ..VmSetup::default()
    })
}

fn ms(value: f64) -> Nanos {
    (value.max(0.0) * MS as f64).round() as Nanos
}

fn bounds(value: Option<[f64; 2]>) -> (Nanos, Nanos) {
    value.map_or((50 * US, 50 * US), |[a, b]| (ms(a), ms(b.max(a))))
}

/// A kind of work with the function that makes its workload.
fn work<W: Workload + Send + 'static>(
    kind: &'static str,
    make: impl Fn() -> W + Send + Sync + 'static,
) -> (&'static str, Maker) {
    (kind, Box::new(move || Box::new(make())))
}

fn maker(
    of: &Spanned<Work>,
    vm: usize,
    names: &[String],
    costs: GuestCosts,
) -> Result<(&'static str, Maker), Fault> {
    let positive = |value: f64, key: &str| {
        if value > 0.0 && value.is_finite() {
            Ok(value)
        } else {
            Err((
                of.span(),
                format!("{key}: {value} is out of range: write a value above 0"),
            ))
        }
    };
    let disk = |rate: f64, request: Option<u64>, depth: Option<u64>| Disk {
        rate: rate * 1e6,
        request: request.unwrap_or(128).max(1) << 10,
        depth: depth.unwrap_or(32).max(1),
        submit: 5 * US,
        complete: 10 * US,
    };
    // Speed of a disk, bytes per second.
    let speed = |mb: Option<f64>| {
        mb.map(|mb| positive(mb, "mb_per_s").map(|mb| mb * 1e6))
            .transpose()
    };
    Ok(match *of.get_ref() {
        Work::Files {
            kb,
            connections,
            mb_per_s,
        } => {
            let bytes = (positive(kb as f64, "kb")? as u64) << 10;
            let (disk, connections) = (speed(mb_per_s)?, connections.unwrap_or(1));
            work("files", move || {
                Files::new(vm, bytes, connections, disk, costs)
            })
        }
        Work::Blocks {
            ref from,
            kb,
            mb_per_s,
        } => {
            let Some(node) = names.iter().position(|n| n == from).filter(|&n| n != vm) else {
                let what = format!(
                    "from: there is no other VM named {from}: write the name of the DataNode VM"
                );
                return Err((of.span(), what));
            };
            let bytes = (positive(kb.unwrap_or(1024) as f64, "kb")? as u64) << 10;
            let disk = speed(mb_per_s)?;
            work("blocks", move || Blocks::new(vm, node, bytes, disk, costs))
        }
        Work::Ping {
            pause_ms,
            delay_ms,
            process_us,
        } => {
            let pause = ms(pause_ms.unwrap_or(10.0));
            let delay = ms(delay_ms.unwrap_or(0.05));
            let process = process_us.map(|us| ms(us / 1e3));
            work("ping", move || {
                let mut ping = Ping::new(vm, (pause / 2, pause + pause / 2), delay, costs);
                ping.process = process;
                ping
            })
        }
        Work::Udp {
            mbit,
            bytes,
            buffer_kb,
        } => {
            let bytes = bytes.unwrap_or(1470);
            let every = (f64::from(bytes) * 8e3 / positive(mbit, "mbit")?) as Nanos;
            let buffer = buffer_kb.unwrap_or(208) << 10;
            work("udp", move || Udp::new(vm, every, bytes, buffer, costs))
        }
        Work::Tcp {
            buffer_kb,
            delay_ms,
            megabytes,
            early_ack,
        } => {
            let mut config = TcpConfig {
                early_ack,
                ..TcpConfig::default()
            };
            config.buffer = buffer_kb.map_or(config.buffer, |kb| kb << 10);
            config.delay = delay_ms.map_or(config.delay, ms);
            if let Some(mb) = megabytes {
                let segments = positive(mb, "megabytes")? * 1e6 / f64::from(config.segment);
                config.total = segments.ceil() as u64;
            }
            work("tcp", move || Tcp::new(vm, config, costs))
        }
        Work::Http {
            rate,
            page,
            process_us,
            delay_ms,
        } => {
            let rate = positive(rate, "rate")?;
            let delay = bounds(delay_ms);
            work("http", move || {
                let mut http = Http::new(vm, rate, delay, costs);
                http.page = page.unwrap_or(http.page).max(1);
                http.process = process_us.map_or(http.process, |us| ms(us / 1e3));
                http
            })
        }
        Work::Requests {
            connections,
            rate,
            process_us,
            delay_ms,
        } => {
            let arrivals = match (connections, rate) {
                (Some(connections), None) => {
                    positive(f64::from(connections), "connections")?;
                    Arrivals::Closed(connections)
                }
                (None, Some(rate)) => Arrivals::Open(positive(rate, "rate")?),
                _ => {
                    let what =
                        "requests: write either connections (closed loop) or rate (open loop)";
                    return Err((of.span(), what.into()));
                }
            };
            let process = ms(process_us.unwrap_or(130.0) / 1e3);
            let delay = ms(delay_ms.unwrap_or(0.05));
            work("requests", move || {
                Requests::new(vm, arrivals, process, delay, costs)
            })
        }
        Work::Voice {
            down,
            lines,
            delay_ms,
        } => {
            let side = if down { Direction::Down } else { Direction::Up };
            let delay = bounds(delay_ms);
            work("voice", move || {
                let mut media = MediaStream::voice(vm, side, delay, costs);
                media.lines = lines.unwrap_or(1).max(1);
                media
            })
        }
        Work::Write {
            mb_per_s,
            request_kb,
            depth,
            megabytes,
        } => {
            let disk = disk(positive(mb_per_s, "mb_per_s")?, request_kb, depth);
            let total = megabytes.map_or(u64::MAX, |mb| (mb * 1e6) as u64);
            work("write", move || {
                Write::new(vm, disk, total, 100 << 20, costs)
            })
        }
        Work::Read {
            mb_per_s,
            request_kb,
            depth,
        } => {
            let disk = disk(positive(mb_per_s, "mb_per_s")?, request_kb, depth);
            work("read", move || Read::new(vm, disk, costs))
        }
    })
}
