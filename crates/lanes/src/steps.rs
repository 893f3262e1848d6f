// SPDX-License-Identifier: Apache-2.0
//! Durations of the steps of a grant or revocation, for the log. Most of the time is the NIC
//! driver's, and which step takes it differs between NICs.

use std::fmt;
use std::time::{Duration, Instant};

/// Steps in the order of their first occurrence; the times of a repeated step add up.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepTimes(Vec<(&'static str, Duration)>);

impl StepTimes {
    /// Runs `work` and adds its duration to the step of this name.
    pub fn time<T>(&mut self, name: &'static str, work: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let done = work();
        self.add(name, begin.elapsed());
        done
    }

    /// Adds a duration to a step.
    pub fn add(&mut self, name: &'static str, took: Duration) {
        match self.0.iter_mut().find(|(n, _)| *n == name) {
            Some((_, so_far)) => *so_far += took,
            None => self.0.push((name, took)),
        }
    }

    /// Total duration of a step.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Duration> {
        let found = self.0.iter().find(|(n, _)| *n == name);
        found.map(|(_, took)| *took)
    }
}

impl fmt::Display for StepTimes {
    /// For example `address 2 ms, link 131 ms`; steps of less than a millisecond are left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let long = self.0.iter().filter(|(_, took)| took.as_millis() > 0);
        for (at, (name, took)) in long.enumerate() {
            let comma = if at > 0 { ", " } else { "" };
            write!(f, "{comma}{name} {} ms", took.as_millis())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_steps_add_up_and_short_ones_are_not_shown() {
        let ms = Duration::from_millis;
        let mut steps = StepTimes::default();
        steps.add("link", ms(100));
        steps.add("driver", Duration::from_micros(400));
        steps.add("move", ms(7));
        steps.add("link", ms(31));
        assert_eq!(steps.to_string(), "link 131 ms, move 7 ms");
        assert_eq!(steps.get("link"), Some(ms(131)));
        assert_eq!(steps.get("unplug"), None);
        assert_eq!(steps.time("sum", || 2 + 3), 5);
        assert!(steps.get("sum").is_some());
    }
}
