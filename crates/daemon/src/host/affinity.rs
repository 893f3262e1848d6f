// SPDX-License-Identifier: Apache-2.0
//! Keeps the daemon off the cores that are set aside for VMs, where it would starve beside real-time threads, and moves workers.

use viola_host::facts::HostFacts;
use viola_host::{CpuSet, attrs, proc};

use viola_cli::log::{self, Level};
use viola_config::Config;

/// Moves the daemon off the cores of VMs, or logs why it cannot. Called before the first thread is made, so that all inherit it.
pub fn leave_vm_cores(config: &Config, facts: &HostFacts) {
    let mut cores = config.slices.cores.clone();
    if config.turbo.budget.is_none() {
        cores.extend(&config.turbo.cores);
    }
    if let Err(why) = leave(&cores, &facts.online()) {
        let what = format!("this daemon cannot leave the VMs' cores: {why}");
        log::line(Level::Warning, what);
    }
}

/// Lets all threads of this process run only outside of `cores`, unless there is no other CPU.
fn leave(cores: &CpuSet, online: &CpuSet) -> Result<(), String> {
    let own = std::process::id();
    let threads = proc::thread_ids(own).map_err(|e| e.one_line())?;
    let now = attrs::affinity(own)
        .map_err(|e| e.to_string())?
        .unwrap_or_default();
    let Some(to) = elsewhere(&now, cores, online) else {
        return Ok(());
    };
    for tid in threads {
        let _ = attrs::set_affinity(tid, &to).map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// The affinity to change to from `now`: the rest of it, or else all CPUs that are no cores of VMs; `None` to stay.
fn elsewhere(now: &CpuSet, cores: &CpuSet, online: &CpuSet) -> Option<CpuSet> {
    let without = |set: &CpuSet| -> CpuSet { set.iter().filter(|&c| !cores.contains(c)).collect() };
    let to = [without(now), without(online)]
        .into_iter()
        .find(|s| !s.is_empty())?;
    (to != *now).then_some(to)
}

/// Moves all threads of a process to `cores`; `false` when one of them could not be moved. A thread that is made meanwhile may have
/// inherited the old affinity, so this repeats until there is no new thread.
pub fn move_process(pid: u32, cores: &CpuSet) -> bool {
    let mut before = 0;
    loop {
        let Ok(tasks) = proc::threads(pid) else {
            return false;
        };
        if tasks
            .iter()
            .any(|(thread, _)| attrs::set_affinity(thread.tid, cores).is_err())
        {
            return false;
        }
        if tasks.len() <= before {
            return true;
        }
        before = tasks.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpus(list: &str) -> CpuSet {
        list.parse().unwrap()
    }

    #[test]
    fn the_daemon_leaves_the_cores_of_vms_but_not_those_it_was_given() {
        let online = cpus("0-7");
        assert_eq!(elsewhere(&online, &cpus("4-7"), &online), Some(cpus("0-3")));
        assert_eq!(elsewhere(&cpus("2"), &cpus("4-7"), &online), None);
        assert_eq!(
            elsewhere(&cpus("3-4"), &cpus("4-7"), &online),
            Some(cpus("3"))
        );
        assert_eq!(
            elsewhere(&cpus("4"), &cpus("4-7"), &online),
            Some(cpus("0-3"))
        );
        assert_eq!(
            elsewhere(&online, &online, &online),
            None,
            "there is nowhere else"
        );
        assert_eq!(elsewhere(&online, &CpuSet::new(), &online), None);
    }

    #[test]
    fn all_threads_of_a_process_move() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let all = viola_host::attrs::affinity(child.id()).unwrap().unwrap();
        let last: CpuSet = all.iter().last().into_iter().collect();
        assert!(move_process(child.id(), &last));
        let now = viola_host::attrs::affinity(child.id()).unwrap().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(now, last);
        assert!(
            move_process(child.id(), &last),
            "a process that is gone has no threads"
        );
    }
}
