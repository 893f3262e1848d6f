// SPDX-License-Identifier: Apache-2.0
//! What viola would do on a host that a scenario describes, and what that would bring: the policy's own classifiers look at
//! what the simulated meter saw, and the host is run again as they say.

use serde::Serialize;
use viola_policy::lanes::{Config as LaneConfig, CpuTime, Samples, classify, di2};
use viola_policy::slices::classify::{Classifier, Thresholds, Window};
use viola_policy::slices::{Class, MS, Nanos, US};
use viola_policy::turbo::choose::{Chooser, Setting, Thresholds as TurboThresholds, Window as Io};

use crate::scenario::Scenario;
use crate::setup::{HostSetup, Policy};
use crate::world::{Help, Simulation};

/// A figure over the seeds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// Median.
    pub median: f64,
    /// Lowest and highest of the seeds.
    pub range: (f64, f64),
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |k: usize| values.get(k).copied().unwrap_or(f64::NAN);
        let n = values.len();
        Self {
            median: (at(n / 2) + at(n.saturating_sub(1) / 2)) / 2.0,
            range: (at(0), at(n.saturating_sub(1))),
        }
    }
}

/// One figure of a VM, as it is and as it would be.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Predicted {
    /// What.
    pub name: String,
    /// As the host is.
    pub now: Spread,
    /// With slices.
    pub slices: Spread,
    /// With turbo cores too, if a VM would get one.
    pub turbo: Option<Spread>,
    /// With slices, vread and vpipe, if a VM reads blocks of another one or sends files.
    pub paths: Option<Spread>,
}

/// What is advised for one VM.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Advice {
    /// Its name.
    pub vm: String,
    /// Latency-sensitive.
    pub ls: bool,
    /// Why, in the policy's words.
    pub why: String,
    /// Length of its microslices, us; only with `ls`.
    pub microslice_us: Option<u64>,
    /// It would get a turbo vCPU.
    pub turbo: bool,
    /// vread would let it read faster.
    pub vread: bool,
    /// vpipe would send its files faster.
    pub vpipe: bool,
    /// What it is for lanes: network-bound VMs may get a VF.
    pub lane: String,
    /// Predicted figures.
    pub figures: Vec<Predicted>,
}

/// Microslice of those that are found latency-sensitive, as the daemon's default.
const MICROSLICE: Nanos = 300 * US;
/// How often the classifiers are shown the same window: more than any of their hystereses.
const WINDOWS: u64 = 100;

struct Found {
    class: Class,
    why: String,
    turbo: bool,
    lane: String,
}

/// Advises on all VMs, from `seeds` runs of each side (at least 1).
pub fn advise(scenario: &Scenario, seeds: u64) -> Vec<Advice> {
    let seeds: Vec<u64> = (0..seeds.max(1)).map(|k| scenario.seed + k).collect();
    let first = scenario.simulated(&scenario.host, scenario.seed);
    let found: Vec<Found> = (0..scenario.host.vms.len())
        .map(|vm| look(&first, vm, scenario.time))
        .collect();
    let mut slices = HostSetup {
        policy: Policy::Interleaved {
            batch_slice: 4 * MS,
        },
        turbo_cores: 0,
        ..scenario.host.clone()
    };
    for (vm, found) in slices.vms.iter_mut().zip(&found) {
        vm.class = found.class;
        vm.microslice = MICROSLICE;
    }
    let turbo = found.iter().any(|f| f.turbo).then(|| HostSetup {
        policy: Policy::Turbo {
            slice: 4 * MS,
            slot: viola_policy::turbo::TURBO_SLOT,
            floor: viola_policy::turbo::RegularConfig::default().floor,
            reserve: viola_policy::turbo::TurboConfig::default().reserve,
        },
        turbo_cores: 1,
        vms: slices
            .vms
            .iter()
            .map(|&vm| crate::setup::VmSetup {
                turbo_core: 0,
                ..vm
            })
            .collect(),
        ..slices.clone()
    });
    let paths = scenario.kinds().any(|k| k == "blocks" || k == "files");
    let paths = paths.then(|| HostSetup {
        help: Help {
            vread: true,
            vpipe: true,
        },
        ..slices.clone()
    });
    let run =
        |host: &HostSetup| -> Vec<_> { seeds.iter().map(|&s| scenario.run_on(host, s)).collect() };
    let (now, slices) = (run(&scenario.host), run(&slices));
    let (turbo, paths) = (turbo.map(|h| run(&h)), paths.map(|h| run(&h)));
    let advice = |(vm, found): (usize, Found)| {
        let names = now[0].vms[vm]
            .figures
            .iter()
            .map(|(kind, name, _)| format!("{kind}: {name}"));
        let names: Vec<String> = ["CPU: part of a core".to_owned()]
            .into_iter()
            .chain(names)
            .collect();
        let value = |o: &crate::scenario::Outcome, k: usize| match k {
            0 => o.vms[vm].ran,
            k => o.vms[vm].figures[k - 1].2,
        };
        let spread = |of: &[crate::scenario::Outcome], k: usize| {
            Spread::of(of.iter().map(|o| value(o, k)).collect())
        };
        let figures = names.into_iter().enumerate().map(|(k, name)| Predicted {
            name,
            now: spread(&now, k),
            slices: spread(&slices, k),
            turbo: turbo.as_ref().map(|t| spread(t, k)),
            paths: paths.as_ref().map(|t| spread(t, k)),
        });
        let figures: Vec<Predicted> = figures.collect();
        // By the rate, and by more than the seeds differ.
        let faster = |name: &str| {
            figures.iter().any(|f| {
                f.name == name && f.paths.is_some_and(|p| p.range.0 > 1.05 * f.slices.range.1)
            })
        };
        let ls = found.class == Class::Ls;
        Advice {
            vm: now[0].vms[vm].name.clone(),
            ls,
            why: found.why,
            microslice_us: ls.then_some(MICROSLICE / US),
            turbo: found.turbo,
            vread: faster("blocks: read MB/s"),
            vpipe: faster("files: served MB/s"),
            lane: found.lane,
            figures,
        }
    };
    found.into_iter().enumerate().map(advice).collect()
}

/// What the policy finds of a VM after a run.
fn look(sim: &Simulation, vm: usize, time: Nanos) -> Found {
    let usage = sim.world.cpus.usage(sim.world.vms[vm].app);
    let (time, seconds) = (time.max(1), time.max(1) as f64 / 1e9);
    let part = |ns: Nanos| ns as f64 / time as f64;
    let packets = sim.world.nics[vm].came + sim.world.nics[vm].sent;
    let blocked = time.saturating_sub(usage.ran + usage.waited);
    let window = Window {
        run: part(usage.ran),
        wait: part(usage.waited),
        blocked: part(blocked),
        wakes: usage.wakes as f64 / seconds,
        packets: packets as f64 / seconds,
    };
    let io = Io {
        packets: window.packets,
        disk: 0.0,
        wait: usage.waited as f64 / (usage.ran + usage.waited).max(1) as f64,
        // Nobody there has a turbo vCPU yet.
        interrupts: 0.0,
    };
    let mut classifier = Classifier::new(Thresholds::default());
    let mut chooser = Chooser::new(TurboThresholds::default());
    let (mut why, mut turbo) = (String::new(), false);
    let mut class = Class::Batch;
    for k in 1..=WINDOWS {
        let verdict = classifier.observe(k * 100 * MS, &window);
        (class, why) = (verdict.class, verdict.why.to_string());
        turbo = chooser
            .observe(k * 100 * MS, &io, Setting::Auto, None)
            .turbo;
    }
    let mut samples = Samples::new(100);
    for _ in 0..100 {
        samples.push(packets * 10 * MS / time);
    }
    let gotten = usage.ran;
    let di2 = di2(&[CpuTime { gotten, blocked }]);
    let kind = classify::classify(&LaneConfig::default(), di2, samples.traffic());
    Found {
        class,
        why,
        turbo,
        lane: kind.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: &str = r#"
seconds = 20.0
[host]
scheduler = "credit"
[[vm]]
name = "web"
load_percent = 100
[[vm.work]]
kind = "ping"
pause_ms = 5.0
[[vm]]
name = "busy"
count = 3
load_percent = 100
"#;

    const PATHS: &str = r#"
seconds = 5.0
[host]
scheduler = "eevdf"
cores = 2
nic_mbit = 10000
[[vm]]
name = "reader"
core = 0
[[vm.work]]
kind = "blocks"
from = "node"
[[vm]]
name = "node"
core = 1
[[vm]]
name = "web"
core = 1
[[vm.work]]
kind = "files"
kb = 65536
[[vm]]
name = "small"
core = 0
[[vm.work]]
kind = "files"
kb = 64
[[vm]]
name = "busy"
count = 2
load_percent = 100
"#;

    #[test]
    fn vread_and_vpipe_are_advised_where_blocks_and_large_files_go_through_guests() {
        let all = advise(&Scenario::parse("p.toml", PATHS).unwrap(), 3);
        let found: Vec<_> = all
            .iter()
            .map(|a| (a.vm.as_str(), a.vread, a.vpipe))
            .collect();
        assert_eq!(
            found,
            [
                ("reader", true, false),
                ("node", false, false),
                ("web", false, true),
                ("small", false, false),
                ("busy0", false, false),
                ("busy1", false, false)
            ],
            "{all:#?}"
        );
    }

    #[test]
    fn a_busy_vm_that_answers_pings_is_found_and_gains_what_slices_give() {
        let scenario = Scenario::parse("h.toml", HOST).unwrap();
        let all = advise(&scenario, 3);
        assert_eq!(all.len(), 4);
        let (web, busy) = (&all[0], &all[1]);
        assert!(web.ls && web.microslice_us == Some(300), "{web:?}");
        assert!(!busy.ls && !busy.turbo && busy.lane == "cpu", "{busy:?}");
        let trip = web
            .figures
            .iter()
            .find(|f| f.name.ends_with("trip mean ms"))
            .unwrap();
        assert!(trip.slices.median < trip.now.median / 5.0, "{trip:?}");
        assert!(trip.now.range.0 <= trip.now.median && trip.now.median <= trip.now.range.1);
        for vm in &all {
            let cpu = &vm.figures[0];
            assert!((cpu.slices.median - 0.25).abs() < 0.01, "{cpu:?}");
        }
    }
}
