// SPDX-License-Identifier: Apache-2.0
//! Progress of a long run: a bar on a terminal, otherwise a line from time to time.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Time between two lines if stderr is not a terminal.
const PLAIN: Duration = Duration::from_secs(15);
const BAR: usize = 28;

/// A run with a planned length.
pub struct Progress {
    total: Duration,
    planned: Duration,
    started: Instant,
    terminal: bool,
    last_line_at: Option<Instant>,
}

impl Progress {
    /// Creates a run whose steps take `total` together.
    pub fn new(total: Duration) -> Self {
        Self {
            total,
            planned: Duration::ZERO,
            started: Instant::now(),
            terminal: std::io::stderr().is_terminal(),
            last_line_at: None,
        }
    }

    /// Says how long this run of a benchmark takes.
    pub fn announce(&self, benchmark: &str, rounds: usize) {
        let length = clock(self.total);
        self.say(&format!("{benchmark}: {rounds} rounds, about {length}"));
    }

    /// Begins a step with the planned `length`.
    pub fn step(&mut self, what: &str, length: Duration) {
        let part = part(self.planned, self.total);
        self.planned += length;
        let left = left(part, self.started.elapsed(), self.total);
        if self.terminal {
            self.put(&format!(
                "\r\x1b[2K{} {:3.0} %  {}  {what}",
                bar(part),
                part * 100.0,
                clock(left)
            ));
        } else if self.last_line_at.is_none_or(|at| at.elapsed() >= PLAIN) {
            self.last_line_at = Some(Instant::now());
            self.put(&format!(
                "{:3.0} %  {} left  {what}\n",
                part * 100.0,
                clock(left)
            ));
        }
    }

    /// Prints a line of its own. The bar returns with the next step.
    pub fn say(&self, line: &str) {
        let clear = if self.terminal { "\r\x1b[2K" } else { "" };
        self.put(&format!("{clear}{line}\n"));
    }

    fn put(&self, text: &str) {
        // Ignore errors: stderr may be closed.
        let _ = std::io::stderr().lock().write_all(text.as_bytes());
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.terminal {
            self.put("\r\x1b[2K");
        }
    }
}

fn part(done: Duration, total: Duration) -> f64 {
    (done.as_secs_f64() / total.as_secs_f64().max(1e-9)).clamp(0.0, 1.0)
}

/// Remaining time: by plan at first, later by the pace so far.
fn left(part: f64, elapsed: Duration, total: Duration) -> Duration {
    let pace = if part > 0.05 {
        elapsed.div_f64(part)
    } else {
        total
    };
    pace.mul_f64(1.0 - part)
}

fn bar(part: f64) -> String {
    let full = (part * BAR as f64).round() as usize;
    format!("{}{}", "━".repeat(full), "─".repeat(BAR - full))
}

/// Formats a duration as minutes and seconds.
pub fn clock(time: Duration) -> String {
    let seconds = time.as_secs_f64().round() as u64;
    format!("{}:{:02}", seconds / 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn the_time_left_follows_the_pace() {
        assert_eq!(left(0.0, S * 3, S * 100), S * 100);
        assert_eq!(left(0.5, S * 80, S * 100), S * 80);
        assert_eq!(left(1.0, S * 80, S * 100), Duration::ZERO);
    }

    #[test]
    fn a_bar_has_one_width() {
        for p in [0.0, 0.01, 0.5, 0.99, 1.0] {
            assert_eq!(bar(p).chars().count(), BAR);
        }
        assert_eq!(part(S * 3, S * 2), 1.0);
        assert_eq!(part(S, Duration::ZERO), 1.0);
    }

    #[test]
    fn times_are_minutes_and_seconds() {
        assert_eq!(clock(Duration::from_millis(125_600)), "2:06");
    }
}
