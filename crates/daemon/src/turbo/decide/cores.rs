// SPDX-License-Identifier: Apache-2.0
//! How many of the cores named in `[turbo]` are turbo cores now.
//!
//! There is none while no VM has a turbo vCPU. A named core that is not a turbo core now is a
//! regular core, unless `budget` says that the host works on it as well.

use viola_host::CpuSet;
use viola_policy::slices::{MS, Nanos};
use viola_policy::turbo::pool_size::{Limits, Load, PoolSizer};

use viola_config::Turbo;

/// Shortest window, ns.
const WINDOW: Nanos = 100 * MS;

/// Regular and turbo cores at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pools {
    /// Regular cores.
    pub regular: CpuSet,
    /// Turbo cores.
    pub turbo: CpuSet,
    /// Why there is no turbo core, if there is none.
    pub why_none: String,
    /// Named cores that are offline.
    pub offline: CpuSet,
}

/// The number of turbo cores, and the load by which it changes.
#[derive(Debug)]
pub struct TurboCores {
    counter: PoolSizer,
    span: Nanos,
    run: Nanos,
}

impl Default for TurboCores {
    fn default() -> Self {
        Self {
            counter: PoolSizer::new(Limits::default()),
            span: 0,
            run: 0,
        }
    }
}

impl TurboCores {
    /// Takes what happened in the `span` that ended `at`: the number of VMs that want a turbo vCPU,
    /// and the time that their turbo vCPUs and service threads ran. Returns a line for the log when
    /// another number of turbo cores follows.
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
        // The first turbo core does not wait for the end of a window.
        let is_due = self.span >= WINDOW || (vms > 0 && self.counter.cores() == 0);
        if turbo.cores.is_empty() || !is_due {
            return None;
        }
        let named = online_of(&turbo.cores, online).len();
        let load = Load {
            vms,
            run: self.run as f64 / self.span.max(1) as f64,
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

    /// The present regular and turbo cores; only online ones.
    pub fn pools(&self, regular: &CpuSet, turbo: &Turbo, online: &CpuSet) -> Pools {
        let usable = online_of(&turbo.cores, online);
        let count = self.counter.cores() as usize;
        let (mut used, mut regular_now) = (CpuSet::new(), online_of(regular, online));
        for (k, cpu) in usable.iter().enumerate() {
            if k < count {
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
            (false, false) => "the daemon is about to choose a turbo core".to_owned(),
        };
        let named = regular.iter().chain(turbo.cores.iter());
        Pools {
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
        p: &mut TurboCores,
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
    fn a_named_core_is_regular_until_load_makes_it_a_turbo_core() {
        let (mut p, t, mut at) = (TurboCores::default(), turbo("1-3", None), 0);
        let split = |p: &TurboCores| {
            let s = p.pools(&cpus("4-5"), &t, &cpus("0-5"));
            (s.regular.to_string(), s.turbo.to_string())
        };
        assert_eq!(split(&p), ("1-5".into(), String::new()));
        let said = windows(&mut p, &t, &mut at, 1, (2, 0.0));
        assert_eq!(said, ["1 turbo core: 2 VMs with steady I/O"]);
        assert_eq!(split(&p), ("2-5".into(), "1".into()));
        assert!(windows(&mut p, &t, &mut at, 200, (2, 0.5)).is_empty());
        assert_eq!(windows(&mut p, &t, &mut at, 10, (2, 1.0)).len(), 1);
        assert_eq!(split(&p), ("3-5".into(), "1-2".into()));
        // Never more than VMs that use them, and none without such a VM.
        assert!(windows(&mut p, &t, &mut at, 200, (2, 2.0)).is_empty());
        assert_eq!(windows(&mut p, &t, &mut at, 300, (0, 0.0)).len(), 1);
        assert_eq!(split(&p).1, "");
    }

    #[test]
    fn the_first_turbo_core_is_there_at_once() {
        let (mut p, t) = (TurboCores::default(), turbo("1", None));
        let said = p.observe((MS, MS), 1, 0, (&cpus("4-5"), &t), &cpus("0-5"));
        assert!(said.is_some());
        assert!(
            p.observe((2 * MS, MS), 1, 0, (&cpus("4-5"), &t), &cpus("0-5"))
                .is_none()
        );
    }

    #[test]
    fn a_core_with_a_budget_is_never_a_regular_core() {
        let (mut p, t, mut at) = (TurboCores::default(), turbo("0-1", Some(500)), 0);
        let online = cpus("0-5");
        assert_eq!(p.pools(&cpus("4-5"), &t, &online).regular, cpus("4-5"));
        windows(&mut p, &t, &mut at, 1, (9, 0.0));
        let s = p.pools(&cpus("4-5"), &t, &online);
        assert_eq!((s.regular, s.turbo), (cpus("4-5"), cpus("0")));
    }

    #[test]
    fn a_turbo_core_that_goes_offline_is_replaced_while_another_is_online() {
        let (mut p, t, mut at) = (TurboCores::default(), turbo("2-3", None), 0);
        windows(&mut p, &t, &mut at, 1, (1, 0.2));
        let turbo_of = |p: &TurboCores, online: &str| p.pools(&cpus("4-5"), &t, &cpus(online));
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
        // The count follows.
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
