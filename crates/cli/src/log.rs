// SPDX-License-Identifier: Apache-2.0
//! The journal: one line per event, to journald with its fields, else on stderr; and the last of them for who asks.

mod journald;

use std::collections::VecDeque;
use std::fmt::Display;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use viola_proto::{Event, EventKind, Events};

use crate::error::one_line;

/// Lines that are kept for `GET /v1/events`.
const KEPT: usize = 256;

/// Whether journald gets fields, on a socket of its own.
static FIELDS: AtomicBool = AtomicBool::new(false);

static LAST: Mutex<Last> = Mutex::new(Last {
    number: 0,
    events: VecDeque::new(),
    counts: [0; 4],
});

/// How much a line matters, numbered as syslog(3) does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Something does not work any more.
    Error = 3,
    /// Something is not as it was asked for.
    Warning = 4,
    /// Something was changed.
    Notice = 5,
    /// For information.
    Info = 6,
}

impl Level {
    fn kind(self) -> EventKind {
        match self {
            Self::Error => EventKind::Error,
            Self::Warning => EventKind::Warning,
            Self::Notice => EventKind::Change,
            Self::Info => EventKind::Info,
        }
    }
}

/// Writes a line about viola as a whole.
pub fn line(level: Level, what: impl Display) {
    tell(level, None, &what.to_string());
}

/// Writes a line about one VM: what was done, and why.
pub fn about(level: Level, vm: impl Display, what: impl Display) {
    tell(level, Some(&vm.to_string()), &what.to_string());
}

/// From now on lines go to journald with fields, where stderr is its. Only the daemon asks for that: a worker that parses what guests
/// send is to have no socket more than it needs.
pub fn use_fields() {
    FIELDS.store(true, Ordering::Relaxed);
}

/// The last lines of this process.
pub fn recent() -> Events {
    let last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    Events {
        pid: std::process::id(),
        events: last.events.iter().cloned().collect(),
    }
}

/// Lines of a kind that this process has written.
pub fn count(kind: EventKind) -> u64 {
    let last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    last.counts[kind as usize]
}

/// Milliseconds since 1970.
pub fn now_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_millis() as u64)
}

fn tell(level: Level, vm: Option<&str>, what: &str) {
    let (vm, what) = (vm.map(one_line), one_line(what));
    LAST.lock().unwrap_or_else(PoisonError::into_inner).keep(
        level.kind(),
        vm.clone(),
        what.clone(),
    );
    let journal = journal();
    if journal && FIELDS.load(Ordering::Relaxed) && journald::send(level, vm.as_deref(), &what) {
        return;
    }
    // Nobody to tell when stderr is gone; the daemon goes on.
    let text = format(journal, level, vm.as_deref(), &what);
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

struct Last {
    number: u64,
    events: VecDeque<Event>,
    /// By kind.
    counts: [u64; 4],
}

impl Last {
    fn keep(&mut self, kind: EventKind, vm: Option<String>, what: String) {
        if self.events.len() == KEPT {
            self.events.pop_front();
        }
        self.number += 1;
        self.counts[kind as usize] += 1;
        self.events.push_back(Event {
            number: self.number,
            at_ms: now_ms(),
            kind,
            vm,
            what,
        });
    }
}

/// A line for stderr, with sd-daemon(3)'s level in front where the journal reads it.
fn format(journal: bool, level: Level, vm: Option<&str>, what: &str) -> String {
    let before = if journal {
        format!("<{}>", level as u8)
    } else {
        "viola: ".to_owned()
    };
    let vm = vm.map(|v| format!("{v}: ")).unwrap_or_default();
    format!("{before}{vm}{what}\n")
}

/// Whether stderr is the journal: JOURNAL_STREAM is inherited by children whose stderr is something else.
fn journal() -> bool {
    static JOURNAL: OnceLock<bool> = OnceLock::new();
    *JOURNAL.get_or_init(|| {
        let Ok(stream) = std::env::var("JOURNAL_STREAM") else {
            return false;
        };
        let Ok(file) = std::fs::metadata("/proc/self/fd/2") else {
            return false;
        };
        stream == format!("{}:{}", file.dev(), file.ino())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_journal_gets_a_level_and_a_terminal_gets_the_name() {
        let what = "class ls (was batch): asked for by viola set";
        assert_eq!(
            format(true, Level::Notice, Some("uml:g1"), what),
            "<5>uml:g1: class ls (was batch): asked for by viola set\n"
        );
        assert_eq!(
            format(false, Level::Error, None, "gone forever"),
            "viola: gone forever\n"
        );
    }

    #[test]
    fn the_last_lines_are_kept_and_numbered_and_no_line_is_two() {
        let mut last = Last {
            number: 0,
            events: VecDeque::new(),
            counts: [0; 4],
        };
        for i in 0..KEPT + 3 {
            last.keep(EventKind::Change, None, i.to_string());
        }
        assert_eq!(last.events.len(), KEPT);
        assert_eq!(last.events[0].number, 4);
        assert_eq!(last.events[KEPT - 1].what, (KEPT + 2).to_string());
        let mark = "of the_last_lines_are_kept";
        about(Level::Warning, "a\nb", format!("gone\n{mark}"));
        let kept = recent();
        let event = kept.events.iter().rfind(|e| e.what.contains(mark)).unwrap();
        assert_eq!(event.vm.as_deref(), Some("a b"));
        assert_eq!(event.what, format!("gone {mark}"));
        assert_eq!(event.kind, EventKind::Warning);
    }
}
