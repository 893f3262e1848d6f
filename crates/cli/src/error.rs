// SPDX-License-Identifier: Apache-2.0
//! How a command can fail, and with which exit status.

use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;

/// A failure in one sentence, told apart by whose fault it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// What was asked for makes no sense here: usage or configuration. Exit status 2.
    #[error("{0}")]
    Usage(String),
    /// It could not be done. Exit status 1.
    #[error("{0}")]
    Run(String),
}

/// Result of a command.
pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// A failure at run time.
    pub fn run(e: impl Display) -> Self {
        Self::Run(e.to_string())
    }

    /// A failure of usage or configuration.
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

/// An error with all its sources, for errors whose own sentence leaves them out.
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

/// Text without line breaks and other control characters.
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

#[cfg(test)]
mod tests {
    use super::*;

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
