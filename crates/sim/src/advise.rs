// SPDX-License-Identifier: Apache-2.0
//! What viola would do on the host of a scenario, and what that would gain. The classifiers of `viola-policy` judge
//! what the simulated meter measured, and the host runs again with their decisions.

use serde::Serialize;
use viola_policy::lanes::{Config as LaneConfig, CpuTime, Samples, classify, di2};
use viola_policy::slices::classify::{Classifier, Thresholds, Window};
use viola_policy::slices::{Class, MS, Nanos, US};
use viola_policy::turbo::choose::{
    Setting, Thresholds as TurboThresholds, TurboChooser, Window as Io,
};

use crate::scenario::Scenario;
use crate::setup::{HostSetup, Policy};
use crate::world::{DataPaths, Simulation};

/// A result over the seeds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// Median.
    pub median: f64,
    /// Minimum and maximum.
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

/// One result of a VM, at present and as predicted.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Predicted {
    /// Name of the result.
    pub name: String,
    /// On the host as described.
    pub now: Spread,
    /// With slices.
    pub slices: Spread,
    /// With slices and a turbo core, if a VM would get a turbo vCPU.
    pub turbo: Option<Spread>,
    /// With slices, vread and vpipe, if a VM reads blocks of another VM or sends files.
    pub paths: Option<Spread>,
}

/// Advice for one VM.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Advice {
    /// Its name.
    pub vm: String,
    /// Whether it is latency sensitive.
    pub ls: bool,
    /// The policy's reason.
    pub why: String,
    /// Length of its microslices, us; only if it is latency sensitive.
    pub microslice_us: Option<u64>,
    /// Whether it would get a turbo vCPU.
    pub turbo: bool,
    /// Whether vread would make its reads faster.
    pub vread: bool,
    /// Whether vpipe would send its files faster.
    pub vpipe: bool,
    /// Its kind for lanes: network-bound VMs may get a VF.
    pub lane: String,
    /// Predicted results.
    pub figures: Vec<Predicted>,
}

/// Microslice of VMs that are found to be latency sensitive: the daemon's default.
const MICROSLICE: Nanos = 300 * US;
/// Number of times that the classifiers judge the same window: more than their hysteresis needs.
const WINDOWS: u64 = 100;

struct Findings {
    class: Class,
    why: String,
    turbo: bool,
    lane: String,
}

/// Gives advice for all VMs from `seeds` runs (at least 1) of each variant.
pub fn advise(scenario: &Scenario, seeds: u64) -> Vec<Advice> {
    let seeds: Vec<u64> = (0..seeds.max(1)).map(|k| scenario.seed + k).collect();
    let first = scenario.simulated(&scenario.host, scenario.seed);
    let found: Vec<Findings> = (0..scenario.host.vms.len())
        .map(|vm| inspect(&first, vm, scenario.time))
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
        paths: DataPaths {
            vread: true,
            vpipe: true,
        },
        ..slices.clone()
    });
    let run =
        |host: &HostSetup| -> Vec<_> { seeds.iter().map(|&s| scenario.run_on(host, s)).collect() };
    let (now, slices) = (run(&scenario.host), run(&slices));
    let (turbo, paths) = (turbo.map(|h| run(&h)), paths.map(|h| run(&h)));
    let advice = |(vm, found): (usize, Findings)| {
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
        // Faster by 5 %, and by more than the seeds differ.
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

/// What the policy decides about a VM after a run.
fn inspect(sim: &Simulation, vm: usize, time: Nanos) -> Findings {
    let usage = sim.world.cpus.usage(sim.world.vms[vm].app);
    let (time, seconds) = (time.max(1), time.max(1) as f64 / 1e9);
    let part = |ns: Nanos| ns as f64 / time as f64;
    let packets = sim.world.nics[vm].arrived + sim.world.nics[vm].sent;
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
        // No VM has a turbo vCPU yet.
        interrupt_load: 0.0,
    };
    let mut classifier = Classifier::new(Thresholds::default());
    let mut chooser = TurboChooser::new(TurboThresholds::default());
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
    Findings {
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
    fn vread_and_vpipe_are_advised_for_blocks_and_large_files() {
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
    fn a_busy_vm_that_answers_pings_is_found_and_gains_from_slices() {
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
