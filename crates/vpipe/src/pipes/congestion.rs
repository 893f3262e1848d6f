// SPDX-License-Identifier: Apache-2.0
//! Congestion controls that the host may use for a VM's connections.

use std::io;

/// Congestion controls that a VM may choose: available in most kernels and fair to others.
const ALLOWED: [&str; 4] = ["reno", "cubic", "bbr", "dctcp"];
const AVAILABLE: &str = "/proc/sys/net/ipv4/tcp_available_congestion_control";

/// The allowed congestion controls that the kernel has loaded: a VM must not make the host load modules.
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
    fn only_loaded_and_known_ones_are_allowed() {
        assert_eq!(allowed("reno bbr cubic lp\n"), ["reno", "bbr", "cubic"]);
        assert!(allowed("").is_empty());
        assert!(congestion_controls().unwrap().contains(&"reno".to_owned()));
    }
}
