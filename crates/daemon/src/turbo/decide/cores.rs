// SPDX-License-Identifier: Apache-2.0
//! How many of the cores named in `[turbo]` are turbo cores just now, and what the others are.
//!
//! None is while no VM has use for one. One that is not needed is a regular core, unless the host works on it too.
//! Cores that are offline are neither.

use viola_host::CpuSet;
use viola_policy::slices::{MS, Nanos};
use viola_policy::turbo::pool_size::{Limits, Load, PoolSizer};

use viola_config::Turbo;

/// Shortest time that is one window.
const WINDOW: Nanos = 100 * MS;

/// The cores of both pools.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Split {
    /// Cores of ordinary slices.
    pub regular: CpuSet,
    /// Cores of turbo slots.
    pub turbo: CpuSet,
    /// Why there are none of the latter, if there are none.
    pub why_none: String,
    /// Cores that are named and offline.
    pub offline: CpuSet,
}

/// The number of turbo cores.
#[derive(Debug)]
pub struct Pools {
    counter: PoolSizer,
    span: Nanos,
    run: Nanos,
}

impl Default for Pools {
    fn default() -> Self {
        Self {
            counter: PoolSizer::new(Limits::default()),
            span: 0,
            run: 0,
        }
    }
}

impl Pools {
    /// Takes a span that ended at `at`: how many VMs are to have a turbo vCPU, and what those that have one ran there. A
    /// line for the journal when another number of turbo cores follows.
    pub fn observe(
        &mut self,
        (at, span): (Nanos, Nanos),
        vms: u32,
        run: Nanos,
        (regular, turbo): (&CpuSet, &Turbo),
        online: &CpuSet,
    ) -> Option<String> {
        self.span += span;
        self.run += run;
        // The first one is not waited for.
        let is_due = self.span >= WINDOW || (vms > 0 && self.counter.cores() == 0);
        if turbo.cores.is_empty() || !is_due {
            return None;
        }
        let named = online_of(&turbo.cores, online).len();
        let load = Load {
            vms,
            run: self.run as f64 / self.span.max(1) as f64,
            // Where the host works on the turbo cores too they are no regular cores, so all of them may be turbo cores.
            cores: (named + online_of(regular, online).len().min(1)) as u32,
        };
        (self.span, self.run) = (0, 0);
        let verdict = self.counter.observe(at, &load);
        let n = verdict.cores;
        let noun = if n == 1 { "turbo core" } else { "turbo cores" };
        verdict
            .changed
            .then(|| format!("{n} {noun}: {}", verdict.why))
    }

    /// The cores of both pools now.
    pub fn split(&self, regular: &CpuSet, turbo: &Turbo, online: &CpuSet) -> Split {
        let usable = online_of(&turbo.cores, online);
        let most = self.counter.cores() as usize;
        let (mut used, mut regular_now) = (CpuSet::new(), online_of(regular, online));
        for (k, cpu) in usable.iter().enumerate() {
            if k < most {
                used.insert(cpu);
            } else if turbo.budget.is_none() {
                regular_now.insert(cpu);
            }
        }
        let why_none = match (usable.is_empty(), regular_now.is_empty()) {
            (true, _) => format!(
                "core {} is offline, and there is no other in [turbo] cores",
                turbo.cores
            ),
            (false, true) => "no core of [slices] cores is online".to_owned(),
            (false, false) => "a turbo core is about to be taken".to_owned(),
        };
        let named = regular.iter().chain(turbo.cores.iter());
        Split {
            offline: named.filter(|&cpu| !online.contains(cpu)).collect(),
            regular: regular_now,
            turbo: used,
            why_none,
        }
    }
}

fn online_of(cores: &CpuSet, online: &CpuSet) -> CpuSet {
    cores.iter().filter(|&cpu| online.contains(cpu)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpus(list: &str) -> CpuSet {
        list.parse().unwrap()
    }

    fn turbo(cores: &str, budget: Option<u32>) -> Turbo {
        let mut text = format!("[slices]\ncores = \"4-5\"\n[turbo]\ncores = \"{cores}\"\n");
        if let Some(permille) = budget {
            text.push_str(&format!("budget = \"{}%\"\n", permille / 10));
        }
        let path = std::path::Path::new("v.toml");
        viola_config::Config::parse(path, &text).unwrap().turbo
    }

    /// Windows with so many VMs and such a load, beside regular cores 4-5.
    fn windows(
        p: &mut Pools,
        t: &Turbo,
        at: &mut Nanos,
        n: u32,
        (vms, load): (u32, f64),
    ) -> Vec<String> {
        let run = (load * WINDOW as f64) as Nanos;
        (0..n)
            .filter_map(|_| {
                *at += WINDOW;
                p.observe((*at, WINDOW), vms, run, (&cpus("4-5"), t), &cpus("0-5"))
            })
            .collect()
    }

    #[test]
    fn cores_become_turbo_cores_as_they_are_needed_and_are_regular_ones_till_then() {
        let (mut p, t, mut at) = (Pools::default(), turbo("1-3", None), 0);
        let split = |p: &Pools| {
            let s = p.split(&cpus("4-5"), &t, &cpus("0-5"));
            (s.regular.to_string(), s.turbo.to_string())
        };
        assert_eq!(split(&p), ("1-5".into(), String::new()));
        let said = windows(&mut p, &t, &mut at, 1, (2, 0.0));
        assert_eq!(said, ["1 turbo core: 2 VMs with I/O worth it"]);
        assert_eq!(split(&p), ("2-5".into(), "1".into()));
        assert!(windows(&mut p, &t, &mut at, 200, (2, 0.5)).is_empty());
        assert_eq!(windows(&mut p, &t, &mut at, 10, (2, 1.0)).len(), 1);
        assert_eq!(split(&p), ("3-5".into(), "1-2".into()));
        // No more than VMs that use them, and none when nobody does.
        assert!(windows(&mut p, &t, &mut at, 200, (2, 2.0)).is_empty());
        assert_eq!(windows(&mut p, &t, &mut at, 300, (0, 0.0)).len(), 1);
        assert_eq!(split(&p).1, "");
    }

    #[test]
    fn the_first_turbo_core_is_there_at_once() {
        let (mut p, t) = (Pools::default(), turbo("1", None));
        let said = p.observe((MS, MS), 1, 0, (&cpus("4-5"), &t), &cpus("0-5"));
        assert!(said.is_some());
        assert!(
            p.observe((2 * MS, MS), 1, 0, (&cpus("4-5"), &t), &cpus("0-5"))
                .is_none()
        );
    }

    #[test]
    fn a_core_that_the_host_works_on_too_is_never_a_regular_one() {
        let (mut p, t, mut at) = (Pools::default(), turbo("0-1", Some(500)), 0);
        let online = cpus("0-5");
        assert_eq!(p.split(&cpus("4-5"), &t, &online).regular, cpus("4-5"));
        windows(&mut p, &t, &mut at, 1, (9, 0.0));
        let s = p.split(&cpus("4-5"), &t, &online);
        assert_eq!((s.regular, s.turbo), (cpus("4-5"), cpus("0")));
    }

    /// On a fake host: CPUs are not really taken away.
    #[test]
    fn a_turbo_core_that_goes_offline_is_replaced_by_the_next_and_the_last_one_is_missed() {
        let (mut p, t, mut at) = (Pools::default(), turbo("2-3", None), 0);
        windows(&mut p, &t, &mut at, 1, (1, 0.2));
        let turbo_of = |p: &Pools, online: &str| p.split(&cpus("4-5"), &t, &cpus(online));
        assert_eq!(turbo_of(&p, "0-5").turbo, cpus("2"));
        let s = turbo_of(&p, "0-1,3-5");
        assert_eq!(
            (s.turbo, s.regular, s.offline),
            (cpus("3"), cpus("4-5"), cpus("2"))
        );
        let s = turbo_of(&p, "0-1,4-5");
        assert!(
            s.turbo.is_empty() && s.why_none.contains("offline"),
            "{s:?}"
        );
        // It is counted, too.
        let said = p.observe(
            (at + WINDOW, WINDOW),
            1,
            0,
            (&cpus("4-5"), &t),
            &cpus("0-1,4-5"),
        );
        assert!(said.unwrap().contains("no core to spare"));
        let s = turbo_of(&p, "0-3");
        assert!(s.turbo.is_empty());
        assert_eq!(s.regular, cpus("2-3"));
    }
}
