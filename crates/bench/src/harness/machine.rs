// SPDX-License-Identifier: Apache-2.0
//! Description of the host and the revision that a result belongs to.

use std::fs::read_to_string;
use std::process::Command;

/// Git commit of the working folder, with `-dirty` if a file other than the results has uncommitted changes; `None`
/// outside a repository. Several benchmarks in a row write their results.
pub fn git() -> Option<String> {
    let run = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    let commit = run(&["describe", "--always", "--abbrev=10"]).filter(|text| !text.is_empty())?;
    let sources = [":/", ":(top,exclude)bench/results"];
    let status = ["status", "--porcelain", "--untracked-files=no", "--"];
    let changed = run(&[status.as_slice(), &sources].concat())?;
    let dirty = if changed.is_empty() { "" } else { "-dirty" };
    Some(format!("{commit}{dirty}"))
}

/// Processor, memory and kernel in one line.
pub fn machine() -> String {
    let cpuinfo = read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo
        .lines()
        .find_map(|l| l.strip_prefix("model name"))
        .and_then(|l| l.split_once(": "));
    let model = model.map_or("CPU", |(_, name)| name.trim());
    let meminfo = read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = meminfo.lines().find_map(|l| {
        l.strip_prefix("MemTotal:")?
            .trim()
            .strip_suffix(" kB")?
            .parse()
            .ok()
    });
    let gib = kib.map_or(0.0, |k: f64| k / f64::from(1 << 20));
    let kernel = read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cores = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    format!(
        "{model}, cores {}, {gib:.0} GiB, Linux {}",
        cores.trim(),
        kernel.trim()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_one_line_with_its_kernel() {
        let line = machine();
        assert!(
            line.contains("Linux ") && line.contains("GiB") && !line.contains('\n'),
            "{line}"
        );
    }
}
