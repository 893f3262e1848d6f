// SPDX-License-Identifier: Apache-2.0
//! Failures of a command, and their exit status.

use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;

/// A failure in one sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Wrong usage or configuration. Exit status 2.
    #[error("{0}")]
    Usage(String),
    /// The command failed. Exit status 1.
    #[error("{0}")]
    Run(String),
}

/// Result of a command.
pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// A failure with exit status 1.
    pub fn run(e: impl Display) -> Self {
        Self::Run(e.to_string())
    }

    /// A failure with exit status 2.
    pub fn usage(e: impl Display) -> Self {
        Self::Usage(e.to_string())
    }

    /// Prints it on standard error, in one line after the program's name.
    pub fn report(&self, program: &str) -> ExitCode {
        let (Self::Usage(sentence) | Self::Run(sentence)) = self;
        // A closed standard error is no reason to panic.
        let _ = writeln!(std::io::stderr(), "{program}: {}", one_line(sentence));
        ExitCode::from(match self {
            Self::Usage(_) => 2,
            Self::Run(_) => 1,
        })
    }
}

/// An error and its sources, joined by colons; a source that the text already contains is left out.
pub fn chain(e: &dyn std::error::Error) -> String {
    let mut text = e.to_string();
    let mut source = e.source();
    while let Some(e) = source {
        let next = e.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        source = e.source();
    }
    text
}

/// The text on one line: a line break becomes a blank, another control character U+FFFD.
pub fn one_line(text: &str) -> String {
    let text = text.trim_end();
    text.chars()
        .map(|c| {
            if c == '\n' {
                ' '
            } else if c.is_control() {
                char::REPLACEMENT_CHARACTER
            } else {
                c
            }
        })
        .collect()
}

/// The text without its middle if it has more than 400 characters: what it quotes may be as long as its author likes.
pub fn without_middle(text: &str) -> String {
    const MOST: usize = 400;
    const PART: usize = 190;
    let count = text.chars().count();
    if count <= MOST {
        return text.to_owned();
    }
    let begin = text.chars().take(PART);
    let end = text.chars().skip(count - PART);
    begin.chain(" ... ".chars()).chain(end).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_keeps_its_begin_and_its_end() {
        let text = format!("mode: {} is not allowed", "\u{fffd}".repeat(900));
        let short = without_middle(&text);
        assert_eq!(short.chars().count(), 190 + 5 + 190);
        assert!(short.starts_with("mode: ") && short.ends_with(" is not allowed"));
        assert_eq!(without_middle("short"), "short");
    }

    #[test]
    fn an_error_is_told_with_its_sources_once_each() {
        #[derive(Debug, thiserror::Error)]
        #[error("reading x")]
        struct Outer(#[source] std::io::Error);
        let e = Outer(std::io::Error::other("disk on fire"));
        assert_eq!(chain(&e), "reading x: disk on fire");
        assert_eq!(
            chain(&std::io::Error::other("disk on fire")),
            "disk on fire"
        );
    }

    #[test]
    fn a_message_is_one_line() {
        assert_eq!(one_line("a\nb\x1b[1m\n"), "a b\u{fffd}[1m");
    }
}
