// SPDX-License-Identifier: Apache-2.0
//! CPU time of the guests and of viola itself, from the kernel's accounting per thread.

use std::collections::HashMap;
use std::time::Instant;

use viola_host::{Inventory, proc};

use viola_cli::error::{Failure, Outcome};

/// CPU time of one thread since it started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct ThreadTotal {
    /// Time on a CPU, ns.
    run: u64,
    /// Times scheduled onto a CPU.
    switches: u64,
}

/// CPU use of a group of processes between two samples.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CpuUse {
    /// Share of one core, 0..=1; above 1 if the group ran on several cores.
    pub share: f64,
    /// Times per second that one of its threads was scheduled onto a core.
    pub switches_per_s: f64,
}

/// A sample of the threads of several groups of processes.
#[derive(Debug, Clone)]
pub struct CpuSample {
    at: Instant,
    groups: Vec<HashMap<u32, ThreadTotal>>,
}

impl CpuSample {
    /// CPU use of each group since `before`. Threads that ended in between are not counted; guests and daemon keep
    /// their threads through a cell.
    pub fn since(&self, before: &Self) -> Vec<CpuUse> {
        let seconds = self.at.duration_since(before.at).as_secs_f64().max(1e-9);
        let groups = self.groups.iter().zip(&before.groups);
        groups.map(|(now, then)| used(now, then, seconds)).collect()
    }

    /// CPU-seconds of each group since `before`, with the same rule.
    pub fn seconds_since(&self, before: &Self) -> Vec<f64> {
        let seconds = self.at.duration_since(before.at).as_secs_f64();
        self.since(before)
            .iter()
            .map(|used| used.share * seconds)
            .collect()
    }
}

impl CpuSample {
    /// Keeps only threads that are restricted to this one core and still exist.
    pub fn only_on(&self, core: usize) -> Self {
        let only: viola_host::CpuSet = u32::try_from(core).into_iter().collect();
        let stays = |tid: u32| proc::affinity(tid).is_ok_and(|cpus| cpus.as_ref() == Some(&only));
        let mut sample = self.clone();
        for group in &mut sample.groups {
            group.retain(|tid, _| stays(*tid));
        }
        sample
    }
}

fn used(now: &HashMap<u32, ThreadTotal>, then: &HashMap<u32, ThreadTotal>, seconds: f64) -> CpuUse {
    let (mut run, mut switches) = (0, 0);
    for (tid, total) in now {
        let before = then.get(tid).copied().unwrap_or_default();
        run += total.run.saturating_sub(before.run);
        switches += total.switches.saturating_sub(before.switches);
    }
    CpuUse {
        share: run as f64 / 1e9 / seconds,
        switches_per_s: switches as f64 / seconds,
    }
}

/// Samples the threads of VMs and of process trees.
pub struct ThreadSampler(Inventory);

impl ThreadSampler {
    /// Creates a sampler.
    ///
    /// # Errors
    /// The host's processes cannot be read.
    pub fn new() -> Outcome<Self> {
        Ok(Self(
            Inventory::new().map_err(|e| Failure::run(viola_cli::error::chain(&e)))?,
        ))
    }

    /// Samples the VMs with these main processes.
    ///
    /// # Errors
    /// A VM has ended, or /proc cannot be read.
    pub fn vms(&mut self, pids: &[u32]) -> Outcome<CpuSample> {
        let threads = self.threads(pids)?;
        let groups = threads.iter().map(|vm| {
            vm.iter()
                .filter_map(|(pid, tid)| Some((*tid, total(*pid, *tid)?)))
        });
        Ok(CpuSample {
            at: Instant::now(),
            groups: groups.map(Iterator::collect).collect(),
        })
    }

    /// Maps each thread id to the index of its VM in `pids`.
    ///
    /// # Errors
    /// As [`ThreadSampler::vms`].
    pub fn owners(&mut self, pids: &[u32]) -> Outcome<HashMap<i32, usize>> {
        let threads = self.threads(pids)?;
        let each = threads.iter().enumerate();
        Ok(each
            .flat_map(|(vm, threads)| threads.iter().map(move |(_, tid)| (*tid as i32, vm)))
            .collect())
    }

    fn threads(&mut self, pids: &[u32]) -> Outcome<Vec<Vec<(u32, u32)>>> {
        let vms = self
            .0
            .refresh()
            .map_err(|e| Failure::run(viola_cli::error::chain(&e)))?;
        pids.iter()
            .map(|pid| {
                let vm = vms.iter().find(|vm| vm.pid == *pid);
                let vm = vm.ok_or_else(|| {
                    Failure::run(format!("the guest with process {pid} has ended"))
                })?;
                Ok(vm.threads().map(|t| (t.pid, t.tid)).collect())
            })
            .collect()
    }
}

/// Samples a process and all its descendants as one group.
pub fn tree(pid: u32) -> CpuSample {
    let mut group = HashMap::new();
    let mut left = vec![pid];
    while let Some(pid) = left.pop() {
        for tid in proc::thread_ids(pid).unwrap_or_default() {
            group.extend(total(pid, tid).map(|total| (tid, total)));
        }
        left.extend(proc::children(pid).unwrap_or_default());
    }
    CpuSample {
        at: Instant::now(),
        groups: vec![group],
    }
}

/// Reads /proc/PID/task/TID/schedstat: time on a CPU, time waiting, times scheduled.
fn total(pid: u32, tid: u32) -> Option<ThreadTotal> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/schedstat")).ok()?;
    let mut numbers = text.split_ascii_whitespace().map(|n| n.parse().ok());
    Some(ThreadTotal {
        run: numbers.next()??,
        switches: numbers.nth(1)??,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_may_run_elsewhere_is_not_on_the_core_alone() {
        let child = std::process::Command::new("sleep").arg("60").spawn();
        let mut child = child.unwrap();
        let pid = child.id();
        let all = proc::affinity(pid).unwrap().unwrap();
        let first = all.iter().next().unwrap();
        let sample = tree(pid);
        let thread_count = |sample: &CpuSample| sample.only_on(first as usize).groups[0].len();
        assert_eq!(thread_count(&sample), usize::from(all.len() == 1));
        let only = [first].into_iter().collect();
        let _ = viola_host::attrs::set_affinity(pid, &only).unwrap();
        assert_eq!(thread_count(&sample), 1);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn only_use_between_the_samples_counts() {
        let then = HashMap::from([
            (
                1,
                ThreadTotal {
                    run: 5_000_000_000,
                    switches: 10,
                },
            ),
            (
                2,
                ThreadTotal {
                    run: 7,
                    switches: 7,
                },
            ),
        ]);
        let now = HashMap::from([
            (
                1,
                ThreadTotal {
                    run: 5_500_000_000,
                    switches: 30,
                },
            ),
            (
                3,
                ThreadTotal {
                    run: 500_000_000,
                    switches: 4,
                },
            ),
        ]);
        assert_eq!(
            used(&now, &then, 2.0),
            CpuUse {
                share: 0.5,
                switches_per_s: 12.0
            }
        );
    }

    #[test]
    fn this_process_is_seen_with_its_threads() {
        use rustix::time::{ClockId, clock_gettime};
        use std::sync::mpsc::channel;
        let me = std::process::id();
        let before = tree(me);
        let ((done, is_done), (end, ended)) = (channel(), channel::<()>());
        let worker = std::thread::spawn(move || {
            while clock_gettime(ClockId::ThreadCPUTime).tv_nsec < 20_000_000 {
                std::hint::black_box(0);
            }
            done.send(()).unwrap();
            let _ = ended.recv();
        });
        is_done.recv().unwrap();
        let after = tree(me);
        let seconds = after.at.duration_since(before.at).as_secs_f64();
        let used = after.since(&before)[0];
        drop(end);
        worker.join().unwrap();
        assert!(used.share * seconds > 0.018, "{used:?} in {seconds} s");
    }
}
