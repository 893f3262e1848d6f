// SPDX-License-Identifier: Apache-2.0
//! The model gives what can be computed by hand.
#![allow(clippy::unwrap_used)]

use viola_policy::slices::model::Round;
use viola_policy::slices::{Class, MS, Nanos, US};
use viola_sim::cpu::{CpuLoad, Level};
use viola_sim::net::NicCosts;
use viola_sim::sched::{EevdfConfig, XenConfig};
use viola_sim::setup::{HostSetup, Policy, VmSetup};
use viola_sim::work::{GuestCosts, Ping, figure};
use viola_sim::world::{Workload, World};

const FREE: GuestCosts = GuestCosts {
    call: 0,
    wake: 0,
    copy: 0.0,
    send: 0,
};

/// A host without costs, so that only waiting remains.
fn host(policy: Policy, vms: Vec<VmSetup>) -> HostSetup {
    HostSetup {
        policy,
        vms,
        bits: u64::MAX / 16_000_000_000,
        nic: NicCosts {
            ring: 100_000,
            queue: 0,
            interrupt: 0,
            packet: 0,
            budget: 64,
            host_packet: 0,
            coalesce: 0,
            slow: None,
            merge: 0,
        },
        costs: FREE,
        switch: 0,
        ..HostSetup::default()
    }
}

fn busy(class: Class, microslice: Nanos) -> VmSetup {
    VmSetup {
        class,
        microslice,
        load: CpuLoad::Busy,
        ..VmSetup::default()
    }
}

/// `m` LSVMs and `n` NLSVMs, all busy.
fn round(policy: Policy, m: usize, n: usize, t_m: Nanos) -> HostSetup {
    let ls = std::iter::repeat_n(busy(Class::Ls, t_m), m);
    let batch = std::iter::repeat_n(busy(Class::Batch, t_m), n);
    host(policy, ls.chain(batch).collect())
}

/// Mean and longest round trip of pings to VM 0, ms. The pauses are multiples of all periods of these schedules, so
/// that all phases are equally frequent.
fn ping(setup: &HostSetup) -> (f64, f64) {
    let ping = Ping::new(0, (0, 1800 * MS), 0, FREE);
    let mut sim = setup.simulation(vec![Box::new(ping)], 3);
    sim.run(4_000_000 * MS);
    let figures = sim.workloads[0].figures(&sim.world);
    let get = |name| figure(&figures, name);
    assert!(get("answers") > 1000.0 && get("lost") == 0.0);
    (get("round trip mean ms"), get("round trip max ms"))
}

fn near(got: f64, expected: f64, by: f64) {
    assert!(
        (got / expected - 1.0).abs() <= by,
        "{got} instead of {expected}"
    );
}

/// Four busy VMs under the credit scheduler wait 90 ms at most, and (3/4)·45 ms on average.
#[test]
fn the_credit_scheduler_lets_one_of_four_wait_90_ms() {
    for (vms, worst) in [(2, 30.0), (3, 60.0), (4, 90.0), (5, 120.0)] {
        let (mean, max) = ping(&round(Policy::XEN, 0, vms, MS));
        let part = (vms - 1) as f64 / vms as f64;
        near(max, worst, 0.02);
        near(mean, part * worst / 2.0, 0.06);
    }
}

/// The same under Xen's own scheduler, if the VMs share one of several cores.
#[test]
fn xens_own_scheduler_takes_turns() {
    for (vms, by_tick) in [(2, true), (3, true), (2, false), (3, false), (4, false)] {
        let xen = Policy::Xen(XenConfig {
            slice: 30 * MS,
            cores: 4,
            by_tick,
            domain_0: false,
        });
        let (mean, max) = ping(&round(xen, 0, vms, MS));
        let worst = 30.0 * (vms - 1) as f64;
        near(max, worst, 0.02);
        near(mean, (vms - 1) as f64 / vms as f64 * worst / 2.0, 0.06);
    }
}

/// Both examples of section 2.3.1: a gap of 30 ms; gaps of 5 and 35 ms.
#[test]
fn vslicer_keeps_the_waits_of_its_equations() {
    const SLICE: Nanos = 30 * MS;
    let paper = Policy::Paper { slice: SLICE };
    let (mean, max) = ping(&round(paper, 1, 3, 10 * MS));
    near(max, 30.0, 0.03);
    near(mean, 0.75 * 15.0, 0.06);
    let (mean, max) = ping(&round(paper, 2, 2, 5 * MS));
    let of = Round {
        m: 2,
        n: 2,
        t_nlsvm: SLICE,
    };
    near(max, of.worst_wait(5 * MS).unwrap() as f64 / 1e6, 0.03);
    // A period of 60 ms has two gaps of 5 ms and one of 35 ms: the mean wait is the sum of their squares over twice the
    // period.
    near(mean, (25.0 + 25.0 + 1225.0) / 120.0, 0.08);
}

/// Uniformly short slices shorten every wait.
#[test]
fn short_slices_shorten_every_wait() {
    let short = Policy::Credit {
        slice: MS,
        boost: true,
    };
    let (_, max) = ping(&round(short, 0, 4, MS));
    near(max, 3.0, 0.05);
}

/// Work of constant length that arrives at random at a VM that is alone.
struct Poisson {
    mean: f64,
    cost: Nanos,
    owner: usize,
    came: Vec<Nanos>,
    next: usize,
    waited: f64,
}

impl Workload for Poisson {
    fn start(&mut self, world: &mut World, owner: usize) {
        self.owner = owner;
        self.on_timer(world, 0);
    }

    fn on_timer(&mut self, world: &mut World, tag: u64) {
        if tag == 1 {
            self.came.push(world.now);
            world.work(world.vms[0].app, Level::App, self.cost, self.owner, 0);
        }
        let at = world.now + world.random.exponential(self.mean);
        world.set_timer(at, self.owner, 1);
    }

    fn on_work_done(&mut self, world: &mut World, _tag: u64) {
        self.waited += (world.now - self.came[self.next] - self.cost) as f64;
        self.next += 1;
    }

    fn figures(&self, _: &World) -> Vec<(String, f64)> {
        vec![("wait".into(), self.waited / self.next as f64)]
    }
}

/// M/D/1: the mean wait is rho·s / (2·(1 - rho)) (Pollaczek and Khinchine).
#[test]
fn random_work_waits_as_queueing_theory_says() {
    for rho in [0.3, 0.6, 0.8] {
        let cost = 100 * US;
        let poisson = Poisson {
            mean: cost as f64 / rho,
            cost,
            owner: 0,
            came: Vec::new(),
            next: 0,
            waited: 0.0,
        };
        let setup = host(Policy::Eevdf, vec![VmSetup::default()]);
        let mut sim = setup.simulation(vec![Box::new(poisson)], 11);
        sim.run(200_000 * MS);
        let got = sim.workloads[0].figures(&sim.world)[0].1;
        near(got, rho * cost as f64 / (2.0 * (1.0 - rho)), 0.03);
    }
}

/// Table 1 of vTurbo, columns "demand" and "consumed"; the demand of the turbo vCPU is softirq work.
#[test]
fn the_pools_consume_what_table_1_says() {
    let cases = [
        ([100, 100], [0, 0], [(0.5, 0.0), (0.5, 0.0)]),
        ([100, 100], [0, 100], [(1.0, 0.0), (0.0, 1.0)]),
        ([100, 100], [100, 100], [(0.5, 0.5), (0.5, 0.5)]),
        ([100, 100], [15, 55], [(0.7, 0.15), (0.3, 0.55)]),
        ([100, 50], [0, 50], [(0.75, 0.0), (0.25, 0.5)]),
    ];
    for (regular, turbo, expected) in cases {
        let vms = regular
            .map(|r| VmSetup {
                load: CpuLoad::percent(r, 300 * MS),
                ..VmSetup::default()
            })
            .to_vec();
        let setup = HostSetup {
            turbo_cores: 1,
            ..host(Policy::VTURBO, vms)
        };
        let mut sim = setup.simulation(Vec::new(), 5);
        for (k, &t) in turbo.iter().enumerate() {
            let irq = sim.world.vms[k].irq;
            sim.world.loads.push((0, irq, CpuLoad::percent(t, 5 * MS)));
        }
        let time = 20_000 * MS;
        sim.run(time);
        for (vm, (r, t)) in sim.world.vms.iter().zip(expected) {
            let part = |vcpu| sim.world.cpus.usage(vcpu).ran as f64 / time as f64;
            let got = (part(vm.app), part(vm.irq));
            assert!(
                (got.0 - r).abs() < 0.015 && (got.1 - t).abs() < 0.015,
                "{got:?} instead of {:?}, {turbo:?}",
                (r, t)
            );
        }
    }
}

/// A chain of work: each piece is submitted when the one before is done.
struct Chain {
    left: u64,
    owner: usize,
}

impl Workload for Chain {
    fn start(&mut self, world: &mut World, owner: usize) {
        self.owner = owner;
        world.set_timer(7 * MS, owner, 0);
    }

    fn on_timer(&mut self, world: &mut World, _tag: u64) {
        world.work(world.vms[0].app, Level::App, 10 * US, self.owner, 0);
    }

    fn on_work_done(&mut self, world: &mut World, _tag: u64) {
        self.left -= 1;
        if self.left > 0 {
            self.on_timer(world, 0);
        }
    }

    fn figures(&self, _: &World) -> Vec<(String, f64)> {
        vec![("left".into(), self.left as f64)]
    }
}

/// A VM does not sleep between two pieces of work: 20 pieces are one wake-up and one run.
#[test]
fn work_that_follows_work_is_one_wake_up_and_one_run() {
    let chain = Chain { left: 20, owner: 0 };
    let vms = vec![
        VmSetup::default(),
        busy(Class::Batch, MS),
        busy(Class::Batch, MS),
    ];
    let mut sim = host(Policy::XEN, vms).simulation(vec![Box::new(chain)], 1);
    sim.run(400 * MS);
    let usage = sim.world.cpus.usage(sim.world.vms[0].app);
    assert_eq!((usage.wakes, usage.switches, usage.ran), (1, 1, 200 * US));
}

/// With BOOST, stock EEVDF or micro credit a VM that mostly sleeps answers nearly as if it were alone.
#[test]
fn a_mostly_idle_vm_hardly_waits() {
    for (policy, most) in [
        (Policy::XEN, 0.01),
        (
            Policy::Interleaved {
                batch_slice: 4 * MS,
            },
            0.01,
        ),
        (Policy::Eevdf, 1.5),
    ] {
        let mut vms = vec![busy(Class::Batch, MS); 4];
        vms[0] = VmSetup {
            class: Class::Ls,
            ..VmSetup::default()
        };
        let (mean, _) = ping(&host(policy, vms));
        assert!(mean < most, "{policy:?}: {mean} ms");
    }
}

/// Median and 99th percentile (ms) of 1,500 pings, sent 1 to 3 ms apart to a process that needs 20 us for one, on one core of
/// Linux 6.18 (two cores, HZ 250), beside processes that never sleep, each in its control group. A busy VM is a group with
/// another such process. 0: its own process answers at once, without a wait.
const MEASURED: [(usize, bool, f64, f64); 4] = [
    (3, false, 0.0, 3.92),
    (7, false, 0.0, 3.98),
    (3, true, 3.94, 13.26),
    (4, true, 5.15, 16.80),
];

#[test]
fn a_packet_waits_as_long_as_under_linux() {
    for (others, is_busy, median, p99) in MEASURED {
        let mut vms = vec![busy(Class::Batch, MS); 1 + others];
        if !is_busy {
            vms[0].load = CpuLoad::None;
        }
        let linux = EevdfConfig {
            packets_wake: true,
            ..EevdfConfig::default()
        };
        let mut setup = host(Policy::Linux(linux), vms);
        setup.nic.interrupt = 20 * US;
        let mut ping = Ping::new(0, (MS, 3 * MS), 0, FREE);
        ping.waits_for_answer = false;
        let mut sim = setup.simulation(vec![Box::new(ping)], 3);
        sim.run(100_000 * MS);
        let figures = sim.workloads[0].figures(&sim.world);
        let wait = |name| figure(&figures, name) - 0.02;
        let (ours, ours_p99) = (wait("round trip p50 ms"), wait("round trip p99 ms"));
        let near = (ours - median).abs() <= 0.15 * median + 0.005;
        assert!(near, "{others}, {is_busy}: {ours} instead of {median}");
        let near = (ours_p99 / p99 - 1.0).abs() <= 0.15;
        assert!(near, "{others}, {is_busy}: {ours_p99} instead of {p99}");
    }
}
