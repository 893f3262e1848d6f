// SPDX-License-Identifier: Apache-2.0
//! Real VMs on one core and a daemon that manages it.

#![allow(dead_code, clippy::unwrap_used)]

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use viola_host::attrs::{self, Policy, SchedAttr};
use viola_host::{Tid, proc};
use viola_lab::{Guest, Lab, Paths, Spec};

use super::Daemon;

/// The core that the VMs share. Core 0 is left to the host.
pub const CORE: u32 = 1;

/// VMs on [`CORE`] and a daemon that manages it. Only one test bed exists at a time.
pub struct Rig {
    pub daemon: Daemon,
    pub lab: Lab,
    _folder: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Rig {
    /// Boots VMs, each given by its name and further TOML keys, and starts a daemon with `config` (appended to a `[slices]`
    /// section that names the core).
    pub fn boot(guests: &[(&str, &str)], config: &str) -> Self {
        Self::boot_on(&format!("{CORE}"), guests, config)
    }

    /// The same with VMs that may run on these cores, given as a TOML list without brackets.
    pub fn boot_on(cores: &str, guests: &[(&str, &str)], config: &str) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = tempfile::tempdir().unwrap();
        let mut text = format!("[lab]\nname = 'vt-{}'\n", std::process::id());
        for (name, rest) in guests {
            text += &format!("[[guest]]\nname = '{name}'\ncores = [{cores}]\n{rest}\n");
        }
        let spec = Spec::from_toml(&text, "test", folder.path()).unwrap();
        let found = Paths::find_from([Path::new(env!("CARGO_MANIFEST_DIR"))]);
        let found = found.unwrap_or_else(|e| panic!("{e}"));
        let paths = Paths {
            run: folder.path().join("lab"),
            ..found
        };
        let lab = Lab::up(&spec, &paths).unwrap_or_else(|e| panic!("{}", e.full()));
        let daemon = Daemon::start(&format!("[slices]\ncores = \"{CORE}\"\n{config}"));
        Self {
            daemon,
            lab,
            _folder: folder,
            _turn: turn,
        }
    }

    /// Four busy VMs; `a` is latency-sensitive.
    pub fn four_busy(more_config: &str) -> Self {
        let guests = [("va", HOG), ("vb", HOG), ("vc", HOG), ("vd", HOG)];
        let mut rig = Self::boot(
            &guests,
            &format!("[[vm]]\nname = \"va\"\nclass = \"ls\"\n{more_config}"),
        );
        rig.wait_for_slots();
        rig
    }

    pub fn guest(&self, name: &str) -> &Guest {
        self.lab.guest(name).unwrap()
    }

    /// All threads of a VM on the host with their scheduling attributes.
    pub fn threads(&self, name: &str) -> Vec<(Tid, SchedAttr)> {
        let mut processes = vec![self.guest(name).pid()];
        let mut next = 0;
        let mut threads = Vec::new();
        while next < processes.len() {
            let pid = processes[next];
            next += 1;
            processes.extend(proc::children(pid).unwrap());
            for tid in proc::thread_ids(pid).unwrap() {
                if let Some(attr) = attrs::get(tid).unwrap() {
                    threads.push((tid, attr));
                }
            }
        }
        threads
    }

    pub fn all_stock(&self) -> bool {
        self.lab.guests().iter().filter(|g| g.alive()).all(|g| {
            self.threads(g.name())
                .iter()
                .all(|(_, a)| a.policy == Policy::Normal && a.nice == 0 && a.runtime == 0)
        })
    }

    pub fn all_by_slots(&self) -> bool {
        self.lab.guests().iter().filter(|g| g.alive()).all(|g| {
            let threads = self.threads(g.name());
            !threads.is_empty()
                && threads
                    .iter()
                    .all(|(_, a)| a.policy == Policy::Fifo && (10..=23).contains(&a.rt_priority))
        })
    }

    pub fn wait_for_slots(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(15);
        while !self.all_by_slots() {
            assert!(
                Instant::now() < deadline,
                "slots did not start: {}",
                self.daemon.log()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Asserts that every thread has stock scheduling again within `limit`.
    pub fn assert_stock_within(&self, limit: Duration) {
        let start = Instant::now();
        while !self.all_stock() {
            let threads: Vec<_> = self
                .lab
                .guests()
                .iter()
                .map(|g| (g.name(), self.threads(g.name())))
                .collect();
            assert!(
                start.elapsed() < limit,
                "not back after {limit:?}: {threads:?}\n{}",
                self.daemon.log()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// CPU time (ns) of a VM: the sum over its host threads that still run.
    pub fn cpu_ns(&self, name: &str) -> u64 {
        let of = |tid: Tid| {
            let text =
                std::fs::read_to_string(format!("/proc/{tid}/schedstat")).unwrap_or_default();
            text.split(' ')
                .next()
                .and_then(|n| n.parse::<u64>().ok())
                .unwrap_or(0)
        };
        self.threads(name).iter().map(|(tid, _)| of(*tid)).sum()
    }

    /// The share of each VM during `span`, in percent of the core.
    pub fn shares(&self, names: &[&str], span: Duration) -> Vec<f64> {
        let before: Vec<u64> = names.iter().map(|n| self.cpu_ns(n)).collect();
        let start = Instant::now();
        std::thread::sleep(span);
        let elapsed = start.elapsed().as_nanos() as f64;
        names
            .iter()
            .zip(before)
            .map(|(n, b)| 100.0 * self.cpu_ns(n).saturating_sub(b) as f64 / elapsed)
            .collect()
    }

    /// Asserts that the guests answer and make progress.
    pub fn assert_guests_work(&self, names: &[&str]) {
        for name in names {
            self.guest(name).ping().unwrap();
            let output = self.guest(name).exec(&["echo", "well"]).unwrap();
            assert_eq!((output.status, output.stdout.trim()), (0, "well"));
        }
        let shares = self.shares(names, Duration::from_millis(700));
        assert!(
            shares.iter().all(|s| *s > 3.0),
            "{names:?} got {shares:?} %"
        );
    }

    /// Processes of the daemon: (watchdog, controller).
    pub fn helpers(&self) -> (u32, u32) {
        let daemon = self.daemon.pid();
        let helper = |parent: u32, what: &str| {
            proc::children(parent).unwrap().into_iter().find(|p| {
                proc::cmdline(*p)
                    .unwrap()
                    .is_some_and(|c| c.iter().any(|a| a == what))
            })
        };
        let watchdog = helper(daemon, "slots-watchdog").expect("a watchdog");
        (
            watchdog,
            helper(watchdog, "slots-controller").expect("a controller"),
        )
    }
}

/// The configuration of a VM that is always busy.
pub const HOG: &str = "workloads = [{ kind = 'hog' }]";

/// Sends a signal to a process of this test.
pub fn signal(pid: u32, signal: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid as i32).unwrap(), signal)
        .unwrap();
}

/// Asserts that the condition becomes true within `limit`.
pub fn within(limit: Duration, what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
