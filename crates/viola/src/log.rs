// SPDX-License-Identifier: Apache-2.0
//! The journal: one line on stderr per event, with sd-daemon(3)'s level in front where the journal reads it.

use std::fmt::Display;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;

use crate::error::one_line;

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

/// Writes a line about viola as a whole.
pub fn line(level: Level, what: impl Display) {
    write(&format(journal(), level, None, &what.to_string()));
}

/// Writes a line about one VM: what was done, and why.
pub fn about(level: Level, vm: impl Display, what: impl Display) {
    write(&format(
        journal(),
        level,
        Some(&vm.to_string()),
        &what.to_string(),
    ));
}

fn write(text: &str) {
    // Nobody to tell when stderr is gone; the daemon goes on.
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

fn format(journal: bool, level: Level, vm: Option<&str>, what: &str) -> String {
    let before = if journal {
        format!("<{}>", level as u8)
    } else {
        "viola: ".to_owned()
    };
    let vm = vm.map(|v| format!("{}: ", one_line(v))).unwrap_or_default();
    format!("{before}{vm}{}\n", one_line(what))
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
            format(false, Level::Error, None, "gone\nforever"),
            "viola: gone forever\n"
        );
    }
}
