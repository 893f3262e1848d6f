// SPDX-License-Identifier: Apache-2.0
//! Waiting times of segments on a socket's backlog, from a tracefs trace of [`EVENTS`].
//!
//! A segment waits from tcp_add_backlog(), in the softirq, until tcp_v4_do_rcv() processes it in the process that owned
//! the socket. The kernel joins segments on the backlog, so the last sequence number identifies them.

use std::collections::{HashMap, VecDeque};

use serde::{Deserialize, Serialize};

/// Events for `kprobe_events`. The sequence numbers are in the packet's control block, 40 bytes from its start.
pub const EVENTS: [&str; 3] = [
    "p:viola/add tcp_add_backlog sk=%di:x64 seq=+40(%si):u32 end=+44(%si):u32",
    "r64:viola/added tcp_add_backlog dropped=$retval:u32",
    "p:viola/rcv tcp_v4_do_rcv sk=%di:x64 seq=+40(%si):u32 end=+44(%si):u32",
];

/// Statistics of segments with data.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Waits {
    /// Segments received.
    pub segments: usize,
    /// Segments that waited on the backlog.
    pub waited: usize,
    /// Segments dropped because the backlog was full.
    pub dropped: usize,
    /// Waiting times of the segments that waited, in microseconds.
    pub mean_us: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    pub max_us: f64,
}

impl Waits {
    /// Mean over all segments, including those that did not wait, in microseconds.
    pub fn of_all_us(&self) -> f64 {
        self.mean_us * self.waited as f64 / (self.segments as f64).max(1.0)
    }
}

/// Parses the text of tracefs' `trace`.
pub fn waits(text: &str) -> Waits {
    let mut backlogs: HashMap<&str, VecDeque<(u32, f64)>> = HashMap::new();
    let mut found = Vec::new();
    let (mut direct, mut dropped) = (0, 0);
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        if line.contains(" added: ") {
            let of = field(line, "dropped=").and_then(|n| n.parse().ok());
            dropped += usize::from(of.is_some_and(|n: u32| n != 0));
            continue;
        }
        let Some((at, event)) = event(line) else {
            continue;
        };
        let number = |name| field(line, name).and_then(|n| n.parse::<u32>().ok());
        let (Some(sk), Some(seq), Some(end)) = (field(line, "sk="), number("seq="), number("end="))
        else {
            continue;
        };
        if seq == end {
            continue;
        }
        let backlog = backlogs.entry(sk).or_default();
        if event == "add" {
            backlog.push_back((end, at));
            continue;
        }
        let before = found.len();
        // Sequence numbers wrap around.
        while let Some((of, begun)) = backlog.front()
            && end.wrapping_sub(*of) < 1 << 31
        {
            found.push((at - begun).max(0.0) * 1e6);
            backlog.pop_front();
        }
        direct += usize::from(found.len() == before);
    }
    found.sort_unstable_by(f64::total_cmp);
    let quantile = |q: f64| {
        let at = (found.len().saturating_sub(1) as f64 * q).round() as usize;
        found.get(at).copied().unwrap_or_default()
    };
    Waits {
        segments: found.len() + direct,
        waited: found.len(),
        dropped,
        mean_us: found.iter().sum::<f64>() / (found.len() as f64).max(1.0),
        p50_us: quantile(0.5),
        p99_us: quantile(0.99),
        max_us: quantile(1.0),
    }
}

/// Time in seconds, and name of the event.
fn event(line: &str) -> Option<(f64, &str)> {
    let mut words = line.split_whitespace().skip_while(|w| !w.ends_with(':'));
    let at = words.next()?.strip_suffix(':')?.parse().ok()?;
    Some((at, words.next()?.strip_suffix(':')?))
}

fn field<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    line.split_whitespace()
        .find_map(|word| word.strip_prefix(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joined_segments_waited_each_from_its_own_time() {
        let text = "\
# tracer: nop
 a-1 [000] ..s1. 10.000100: add: (tcp_add_backlog+0x0/0x420) sk=0x1 seq=4294967290 end=4
 a-1 [000] ..s1. 10.000101: added: (tcp_v4_rcv+0x9/0x10 <- tcp_add_backlog) dropped=0
 a-1 [000] ..s1. 10.000200: add: (tcp_add_backlog+0x0/0x420) sk=0x1 seq=4 end=14
 a-1 [000] ..s1. 10.000210: add: (tcp_add_backlog+0x0/0x420) sk=0x1 seq=14 end=14
 b-2 [001] ..... 10.000300: rcv: (tcp_v4_do_rcv+0x0/0x10) sk=0x1 seq=4294967290 end=14
 b-2 [001] ..... 10.000400: rcv: (tcp_v4_do_rcv+0x0/0x10) sk=0x1 seq=14 end=24
 b-2 [001] ..... 10.000500: added: (tcp_v4_rcv+0x9/0x10 <- tcp_add_backlog) dropped=74
";
        let waits = waits(text);
        assert_eq!((waits.segments, waits.waited, waits.dropped), (3, 2, 1));
        assert!((waits.mean_us - 150.0).abs() < 1.0, "{waits:?}");
        assert!((waits.of_all_us() - 100.0).abs() < 1.0, "{waits:?}");
        assert!((waits.max_us - 200.0).abs() < 1.0, "{waits:?}");
    }
}
