// SPDX-License-Identifier: Apache-2.0
//! Where and when figures were taken.

use std::fs::read_to_string;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

/// Commit of the working folder, `-dirty` when something differs from it; `None` outside of a repository.
pub fn git() -> Option<String> {
    let output = Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=10"])
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_owned()).filter(|t| output.status.success() && !t.is_empty())
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

/// Now, as `2026-11-21T06:08:11Z`.
pub fn date() -> String {
    date_of(
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_secs()),
    )
}

/// Seconds since 1970 as a date of the Gregorian calendar. Years are counted from March, so that the
/// leap day is a year's last.
pub fn date_of(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let since_0000_03_01 = days + 719_468;
    let (era, day) = (since_0000_03_01 / 146_097, since_0000_03_01 % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    let year = era * 400 + year + carry;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, date) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_795_241_291, "2026-11-21T06:08:11Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(date_of(seconds), date);
        }
    }

    #[test]
    fn the_machine_is_one_line_with_its_kernel() {
        let line = machine();
        assert!(
            line.contains("Linux ") && line.contains("GiB") && !line.contains('\n'),
            "{line}"
        );
    }
}
