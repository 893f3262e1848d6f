// SPDX-License-Identifier: Apache-2.0
//! Congestion controls with which the host may send in a VM's place.

use std::io;

/// Those that a VM may choose. Each is a part of many kernels, and fair to others.
const ALLOWED: [&str; 4] = ["reno", "cubic", "bbr", "dctcp"];
const AVAILABLE: &str = "/proc/sys/net/ipv4/tcp_available_congestion_control";

/// Those of them that the kernel has now: a VM is not to make the host load modules.
///
/// # Errors
/// Of reading the kernel's list.
pub fn congestion_controls() -> io::Result<Vec<String>> {
    std::fs::read_to_string(AVAILABLE).map(|available| allowed(&available))
}

fn allowed(available: &str) -> Vec<String> {
    let all = available.split_ascii_whitespace();
    all.filter(|name| ALLOWED.contains(name))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_there_and_known_is_allowed() {
        assert_eq!(allowed("reno bbr cubic lp\n"), ["reno", "bbr", "cubic"]);
        assert!(allowed("").is_empty());
        assert!(congestion_controls().unwrap().contains(&"reno".to_owned()));
    }
}
