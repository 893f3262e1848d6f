// SPDX-License-Identifier: Apache-2.0
//! The program's log: one line per event, to journald with fields or to standard error. The last lines are kept in
//! memory for `GET /v1/events`.

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

/// Events kept for `GET /v1/events`.
const MAX_RECENT: usize = 256;

/// Whether lines go to journald's own socket, with fields.
static TO_JOURNALD: AtomicBool = AtomicBool::new(false);

static RECENT: Mutex<Recent> = Mutex::new(Recent {
    number: 0,
    events: VecDeque::new(),
    counts: [0; 4],
});

/// Severity of a line, numbered as in syslog(3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// A function has failed.
    Error = 3,
    /// A request or a setting could not be met.
    Warning = 4,
    /// The daemon changed something.
    Notice = 5,
    /// Information.
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

/// Writes a line about the program as a whole.
pub fn line(level: Level, what: impl Display) {
    write(level, None, &what.to_string());
}

/// Writes a line about one VM.
pub fn about(level: Level, vm: impl Display, what: impl Display) {
    write(level, Some(&vm.to_string()), &what.to_string());
}

/// A line about a state that is looked at again and again. It is written when it differs from the last one.
#[derive(Debug, Default)]
pub struct OnChange(Option<String>);

impl OnChange {
    /// As [`line()`], unless it is the last line again.
    pub fn line(&mut self, level: Level, what: String) {
        if self.0.as_ref() != Some(&what) {
            line(level, &what);
            self.0 = Some(what);
        }
    }
}

/// Sends lines to journald with fields from now on, where standard error is journald's stream. Only the daemon calls
/// this: workers parse input of guests and get no further socket.
pub fn use_fields() {
    TO_JOURNALD.store(true, Ordering::Relaxed);
}

/// The last events of this process, oldest first.
pub fn recent() -> Events {
    let last = RECENT.lock().unwrap_or_else(PoisonError::into_inner);
    Events {
        pid: std::process::id(),
        events: last.events.iter().cloned().collect(),
    }
}

/// Number of events of a kind since the process started.
pub fn count(kind: EventKind) -> u64 {
    let last = RECENT.lock().unwrap_or_else(PoisonError::into_inner);
    last.counts[kind as usize]
}

/// Milliseconds since 1970.
pub fn now_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_millis() as u64)
}

fn write(level: Level, vm: Option<&str>, what: &str) {
    let (vm, what) = (vm.map(one_line), one_line(what));
    RECENT.lock().unwrap_or_else(PoisonError::into_inner).keep(
        level.kind(),
        vm.clone(),
        what.clone(),
    );
    let journal = journal();
    if journal && TO_JOURNALD.load(Ordering::Relaxed) && journald::send(level, vm.as_deref(), &what)
    {
        return;
    }
    // The daemon goes on when standard error is closed.
    let text = format(journal, level, vm.as_deref(), &what);
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

struct Recent {
    number: u64,
    events: VecDeque<Event>,
    /// Number of events, by kind.
    counts: [u64; 4],
}

impl Recent {
    fn keep(&mut self, kind: EventKind, vm: Option<String>, what: String) {
        if self.events.len() == MAX_RECENT {
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

/// A line for standard error: after the level of sd-daemon(3) where journald reads it, else after the program's name.
fn format(journal: bool, level: Level, vm: Option<&str>, what: &str) -> String {
    let before = if journal {
        format!("<{}>", level as u8)
    } else {
        "viola: ".to_owned()
    };
    let vm = vm.map(|v| format!("{v}: ")).unwrap_or_default();
    format!("{before}{vm}{what}\n")
}

/// Whether standard error is journald's stream. Children inherit JOURNAL_STREAM even when their standard error is another
/// file, so its device and inode are compared.
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
        let mut last = Recent {
            number: 0,
            events: VecDeque::new(),
            counts: [0; 4],
        };
        for i in 0..MAX_RECENT + 3 {
            last.keep(EventKind::Change, None, i.to_string());
        }
        assert_eq!(last.events.len(), MAX_RECENT);
        assert_eq!(last.events[0].number, 4);
        assert_eq!(
            last.events[MAX_RECENT - 1].what,
            (MAX_RECENT + 2).to_string()
        );
        let mark = "of the_last_lines_are_kept";
        about(Level::Warning, "a\nb", format!("gone\n{mark}"));
        let kept = recent();
        let event = kept.events.iter().rfind(|e| e.what.contains(mark)).unwrap();
        assert_eq!(event.vm.as_deref(), Some("a b"));
        assert_eq!(event.what, format!("gone {mark}"));
        assert_eq!(event.kind, EventKind::Warning);
    }
}
