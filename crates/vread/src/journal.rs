// SPDX-License-Identifier: Apache-2.0
//! A worker's log lines. Guests can cause most of them, so each kind of line has a rate limit.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Severity of a line, as in syslog(3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// A function has stopped working.
    Error,
    /// Something is not as configured.
    Warning,
    /// Something changed.
    Notice,
    /// Information.
    Info,
}

/// Receives the lines.
pub type LogSink = Box<dyn Fn(Level, &str) + Send>;

/// Minimum time between two lines of a kind; the lines between are counted.
const REPEAT_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum kinds with a limit of their own; further kinds share one.
const MAX_KINDS: usize = 32;

/// Writes lines and limits the rate of each kind.
pub struct Journal {
    sink: LogSink,
    kinds: BTreeMap<&'static str, (Instant, u64)>,
}

impl std::fmt::Debug for Journal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Journal").finish_non_exhaustive()
    }
}

impl Journal {
    /// Sends lines to `sink`.
    #[must_use]
    pub fn new(sink: LogSink) -> Self {
        Self {
            sink,
            kinds: BTreeMap::new(),
        }
    }

    /// Writes a line.
    pub fn log(&self, level: Level, what: &str) {
        (self.sink)(level, what);
    }

    /// Writes a line that a guest can cause: at most one of its kind in ten seconds.
    pub fn log_limited(&mut self, now: Instant, level: Level, kind: &'static str, what: &str) {
        let kind = if self.kinds.len() < MAX_KINDS || self.kinds.contains_key(kind) {
            kind
        } else {
            "other"
        };
        match self.kinds.get_mut(kind) {
            Some((at, held)) if now.saturating_duration_since(*at) < REPEAT_INTERVAL => *held += 1,
            known => {
                let held = known.map_or(0, |(_, held)| *held);
                let more = match held {
                    0 => String::new(),
                    n => format!(" ({n} similar lines suppressed before)"),
                };
                (self.sink)(level, &format!("{what}{more}"));
                self.kinds.insert(kind, (now, 0));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[test]
    fn a_guest_cannot_fill_the_journal() {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let to = lines.clone();
        let mut journal = Journal::new(Box::new(move |_, l| to.lock().unwrap().push(l.to_owned())));
        let start = Instant::now();
        for _ in 0..1000 {
            journal.log_limited(start, Level::Warning, "refused", "no");
        }
        journal.log_limited(start, Level::Warning, "broken", "bad");
        journal.log_limited(start + REPEAT_INTERVAL, Level::Warning, "refused", "no");
        assert_eq!(
            *lines.lock().unwrap(),
            ["no", "bad", "no (999 similar lines suppressed before)"]
        );
    }
}
