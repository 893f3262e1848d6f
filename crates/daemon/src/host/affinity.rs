// SPDX-License-Identifier: Apache-2.0
//! Keeping this process off the cores that are set aside for VMs: while real-time slots fill them it would starve
//! there, and it is to look after them.

use viola_host::{CpuSet, attrs, proc};

/// Lets all threads of this process run on none of `cores`, as far as they may run elsewhere at all. Threads and
/// processes made later inherit that.
pub fn step(cores: &CpuSet, online: &CpuSet) -> Result<(), String> {
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

/// Where to go from `now`: what is left of it, else whatever is no core of VMs; `None` to stay.
fn elsewhere(now: &CpuSet, cores: &CpuSet, online: &CpuSet) -> Option<CpuSet> {
    let without = |set: &CpuSet| -> CpuSet { set.iter().filter(|&c| !cores.contains(c)).collect() };
    let to = [without(now), without(online)]
        .into_iter()
        .find(|s| !s.is_empty())?;
    (to != *now).then_some(to)
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
}
