// SPDX-License-Identifier: Apache-2.0
//! Keeps the load's cores from halting while something is measured.
//!
//! On a machine that is a VM itself, a core that halts is woken by its hypervisor, up to some 10 ms late when the host is busy. A
//! load generator is late by that, and what it measures is the host's wake-up. A thread of SCHED_IDLE (sched(7)) never lets the core
//! halt, and runs only when no other thread wants to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use viola_cli::error::{Failure, Outcome};
use viola_host::attrs::{self, Policy, SchedAttr};

/// Spins between two looks at whether to stop.
const SPINS: usize = 10_000;
/// Most cores that are kept awake; a machine with more is seldom a VM.
const MAX_CORES: usize = 4;

/// Keeps cores awake until it is dropped.
#[derive(Debug)]
pub struct KeepAwake {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl KeepAwake {
    /// Keeps the cores awake on which this process may run.
    ///
    /// # Errors
    /// The kernel starts no thread.
    pub fn start() -> Outcome<Self> {
        let cores = sched_getaffinity(None).map_err(Failure::run)?;
        let mut awake = Self {
            stop: Arc::default(),
            threads: Vec::new(),
        };
        let usable = (0..CpuSet::MAX_CPU).filter(|core| cores.is_set(*core));
        for core in usable.take(MAX_CORES) {
            let stop = awake.stop.clone();
            let thread = std::thread::Builder::new().name("awake".into());
            let thread = thread
                .spawn(move || spin(core, &stop))
                .map_err(Failure::run)?;
            awake.threads.push(thread);
        }
        Ok(awake)
    }
}

impl Drop for KeepAwake {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // It cannot panic.
            let _ = thread.join();
        }
    }
}

fn spin(core: usize, stop: &AtomicBool) {
    let idle = SchedAttr {
        policy: Policy::Idle,
        ..SchedAttr::fair(0)
    };
    let mut only = CpuSet::new();
    only.set(core);
    // A thread that would compete with others must not spin.
    if attrs::set(0, &idle).is_err() || sched_setaffinity(None, &only).is_err() {
        return;
    }
    while !stop.load(Ordering::Relaxed) {
        (0..SPINS).for_each(|_| std::hint::spin_loop());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_run_at_the_lowest_priority_until_the_end() {
        let threads = || {
            let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
            let named = tasks.filter(|task| {
                let name = std::fs::read_to_string(task.path().join("comm"));
                name.is_ok_and(|name| name == "awake\n")
            });
            let tids = named.filter_map(|task| task.file_name().to_str()?.parse().ok());
            tids.collect::<Vec<u32>>()
        };
        let awake = KeepAwake::start().unwrap();
        let is_idle = |tid: &u32| {
            let attr = attrs::get(*tid).unwrap();
            attr.is_some_and(|attr| attr.policy == Policy::Idle)
        };
        let begin = std::time::Instant::now();
        while !(threads().len() == awake.threads.len() && threads().iter().all(is_idle)) {
            assert!(begin.elapsed().as_secs() < 10, "{:?}", threads());
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        drop(awake);
        assert_eq!(threads(), Vec::<u32>::new());
    }
}
