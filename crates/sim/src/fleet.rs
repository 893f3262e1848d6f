// SPDX-License-Identifier: Apache-2.0
//! A fluid model of many hosts. In each step of a second every VM wants a part of its core. The VMs get what fair
//! shares converge to ([`allocate`]), and the wait of a request follows from that. [`model_error`] runs the same steps
//! in the event model and measures the difference.

use serde::Serialize;
use viola_policy::slices::model::interleaved_wait;
use viola_policy::slices::{Class, DEFAULT_WEIGHT, MS, Nanos, US};
use viola_policy::turbo::shares::{Demand, allocate};

use crate::cpu::CpuLoad;
use crate::random::Random;
use crate::setup::{HostSetup, Policy, VmSetup};
use crate::work::{Ping, figure};
use crate::world::{Workload, World};

/// Length of a step, ns.
const STEP: Nanos = 1_000 * MS;
/// Number of VMs per core; the first of them answers requests.
pub const VMS_PER_CORE: usize = 4;
/// Number of cores per host.
pub const CORES: usize = 16;
const MICROSLICE: Nanos = 300 * US;
const CREDIT_SLICE: Nanos = 30 * MS;
/// Probability that a VM's demand changes at a step.
const CHANGE_PROBABILITY: f64 = 0.05;

/// The scheduler of the fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FleetScheduler {
    /// Credit scheduler with slices of 30 ms.
    Credit,
    /// viola's slices; the VM that answers requests is latency-sensitive.
    Viola,
}

/// Demand of the VMs of one core, second by second.
struct Trace {
    random: Random,
    wants: [f64; VMS_PER_CORE],
}

impl Trace {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let wants = std::array::from_fn(|_| Self::level(&mut random));
        Self { random, wants }
    }

    /// A quarter of the VMs is idle, a quarter busy, and the others want a random part.
    fn level(random: &mut Random) -> f64 {
        match random.unit() {
            x if x < 0.25 => 0.0,
            x if x < 0.5 => 1.0,
            _ => (random.unit() * 10.0).round() / 10.0,
        }
    }

    fn next(&mut self) -> [f64; VMS_PER_CORE] {
        let now = self.wants;
        for want in &mut self.wants {
            if self.random.unit() < CHANGE_PROBABILITY {
                *want = Self::level(&mut self.random);
            }
        }
        now
    }
}

/// Sums over cores and steps.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Sums {
    /// Core seconds used.
    pub used: f64,
    /// Core seconds wanted.
    pub wanted: f64,
    /// Sum of the mean waits of a request over steps and cores, ms.
    pub wait_ms: f64,
    /// Longest wait in any step, ms.
    pub longest_ms: f64,
    /// Number of steps of all cores.
    pub steps: u64,
}

impl Sums {
    fn add(&mut self, other: &Sums) {
        self.used += other.used;
        self.wanted += other.wanted;
        self.wait_ms += other.wait_ms;
        self.longest_ms = self.longest_ms.max(other.longest_ms);
        self.steps += other.steps;
    }
}

/// Parts of the core, mean and longest wait of a request (ms) in one step.
fn fluid(
    wants: &[f64; VMS_PER_CORE],
    scheduler: FleetScheduler,
) -> ([f64; VMS_PER_CORE], f64, f64) {
    let demand = |&want: &f64| Demand {
        weight: DEFAULT_WEIGHT,
        cap: None,
        regular: want,
        turbo: 0.0,
    };
    let demands = wants.each_ref().map(demand);
    let mut granted = [0.0; VMS_PER_CORE];
    for (part, granted) in granted.iter_mut().zip(allocate(&demands, 1.0, 0.0)) {
        *part = granted.regular;
    }
    // A VM that gets what it wants sleeps in between, and gets the core when it wakes.
    let short = |k: usize| wants[k] > granted[k] + 1e-9;
    let full = wants.iter().sum::<f64>() >= 1.0 - 1e-9;
    if !full || !(short(0) || wants[0] >= 1.0) {
        return (granted, 0.0, 0.0);
    }
    let share = granted[0].clamp(1e-6, 1.0);
    let longest = match scheduler {
        // A VM that gets less than it wants takes its part from the others' turns, which makes the round longer.
        FleetScheduler::Credit => (1.0 - share) / share * CREDIT_SLICE as f64,
        FleetScheduler::Viola => interleaved_wait(share, MICROSLICE, []) as f64,
    };
    (granted, (1.0 - share) * longest / 2e6, longest / 1e6)
}

/// Runs `hosts` hosts for `steps` seconds on `threads` threads.
pub fn run(hosts: u64, steps: u64, scheduler: FleetScheduler, seed: u64, threads: usize) -> Sums {
    let threads = threads.max(1) as u64;
    let part = |t: u64| {
        let mut sums = Sums::default();
        let mut host = t;
        while host < hosts {
            for core in 0..CORES as u64 {
                let mut trace =
                    Trace::new(seed ^ (host * CORES as u64 + core + 1).wrapping_mul(0x9e37_79b9));
                for _ in 0..steps {
                    let wants = trace.next();
                    let (granted, wait, longest) = fluid(&wants, scheduler);
                    sums.add(&Sums {
                        used: granted.iter().sum(),
                        wanted: wants.iter().sum(),
                        wait_ms: wait,
                        longest_ms: longest,
                        steps: 1,
                    });
                }
            }
            host += threads;
        }
        sums
    };
    let mut all = Sums::default();
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|t| scope.spawn(move || part(t))).collect();
        // In the order of threads, so that sums of floats are reproducible.
        for one in running {
            match one.join() {
                Ok(sums) => all.add(&sums),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
    });
    all
}

/// Difference between the fluid model and the event model.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ModelError {
    /// Number of cores that both models ran.
    pub cores: u64,
    /// Mean difference of a VM's share over the whole time, part of a core.
    pub share_error: f64,
    /// Mean wait of a request in the event model, ms.
    pub event_wait_ms: f64,
    /// Mean wait of a request in the fluid model, ms.
    pub fluid_wait_ms: f64,
}

/// Sets the demand of the VMs, step by step.
struct Script {
    trace: Trace,
    owner: usize,
}

/// Period in which a VM runs its part.
const PERIOD: Nanos = 100 * MS;

impl Workload for Script {
    fn start(&mut self, world: &mut World, owner: usize) {
        self.owner = owner;
        self.on_timer(world, 0);
    }

    fn on_timer(&mut self, world: &mut World, step: u64) {
        if step.is_multiple_of(STEP / PERIOD) {
            for (vm, want) in self.trace.next().into_iter().enumerate() {
                let on = (PERIOD as f64 * want) as Nanos;
                let load = match want {
                    w if w <= 0.0 => CpuLoad::None,
                    w if w >= 1.0 => CpuLoad::Busy,
                    _ => CpuLoad::Duty { period: PERIOD, on },
                };
                world.cpus.set_load(world.now, world.vms[vm].app, load);
            }
        } else {
            for vm in 0..world.vms.len() {
                world.cpus.new_period(world.now, world.vms[vm].app);
            }
        }
        world.set_timer(world.now + PERIOD, self.owner, step + 1);
    }

    fn figures(&self, _world: &World) -> Vec<(String, f64)> {
        Vec::new()
    }
}

/// Runs `cores` cores for `steps` seconds in both models.
pub fn model_error(cores: u64, steps: u64, scheduler: FleetScheduler, seed: u64) -> ModelError {
    let mut of = ModelError {
        cores,
        share_error: 0.0,
        event_wait_ms: 0.0,
        fluid_wait_ms: 0.0,
    };
    for core in 0..cores {
        let seed = seed ^ (core + 1).wrapping_mul(0x9e37_79b9);
        let mut granted = [0.0; VMS_PER_CORE];
        let mut trace = Trace::new(seed);
        for _ in 0..steps {
            let (parts, wait, _) = fluid(&trace.next(), scheduler);
            for (sum, part) in granted.iter_mut().zip(parts) {
                *sum += part / steps as f64;
            }
            of.fluid_wait_ms += wait / (steps * cores) as f64;
        }
        let vm = |k| VmSetup {
            class: if k == 0 { Class::Ls } else { Class::Batch },
            microslice: MICROSLICE,
            ..VmSetup::default()
        };
        let setup = HostSetup {
            policy: match scheduler {
                FleetScheduler::Credit => Policy::XEN,
                FleetScheduler::Viola => Policy::Interleaved {
                    batch_slice: 4 * MS,
                },
            },
            vms: (0..VMS_PER_CORE).map(vm).collect(),
            switch: 0,
            ..HostSetup::default()
        };
        let ping = Ping::new(0, (0, 100 * MS), 0, setup.costs);
        let script = Script {
            trace: Trace::new(seed),
            owner: 0,
        };
        let mut sim = setup.simulation(vec![Box::new(ping), Box::new(script)], seed);
        sim.run(steps * STEP);
        for (vm, part) in sim.world.vms.iter().zip(granted) {
            let ran = sim.world.cpus.usage(vm.app).ran as f64 / (steps * STEP) as f64;
            of.share_error += (ran - part).abs() / (cores as usize * VMS_PER_CORE) as f64;
        }
        let figures = sim.workloads[0].figures(&sim.world);
        of.event_wait_ms += figure(&figures, "round trip mean ms") / cores as f64;
    }
    of
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_do_not_change_the_result_but_for_the_order_of_sums() {
        let (one, two) = (
            run(6, 60, FleetScheduler::Viola, 1, 1),
            run(6, 60, FleetScheduler::Viola, 1, 2),
        );
        assert_eq!(one.steps, 6 * 60 * CORES as u64);
        assert_eq!((one.steps, one.longest_ms), (two.steps, two.longest_ms));
        assert!((one.used - two.used).abs() < 1e-6 && (one.wait_ms - two.wait_ms).abs() < 1e-6);
        assert_eq!(two, run(6, 60, FleetScheduler::Viola, 1, 2));
        assert!(one.used <= one.wanted && one.used <= one.steps as f64);
    }

    #[test]
    fn the_fluid_model_is_close_to_the_event_model() {
        for scheduler in [FleetScheduler::Credit, FleetScheduler::Viola] {
            let of = model_error(12, 30, scheduler, 5);
            assert!(of.share_error < 0.03, "{scheduler:?}: {of:?}");
        }
        let credit = model_error(12, 30, FleetScheduler::Credit, 5);
        let viola = model_error(12, 30, FleetScheduler::Viola, 5);
        assert!(viola.fluid_wait_ms < credit.fluid_wait_ms / 10.0);
        assert!(
            viola.event_wait_ms < credit.event_wait_ms / 4.0,
            "{viola:?} {credit:?}"
        );
    }
}
