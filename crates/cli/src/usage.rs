// SPDX-License-Identifier: Apache-2.0
//! The command line of a program: read by clap, refused in one sentence with exit status 2.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;

use crate::error::Failure;

/// The end of a program's long help: exit statuses and environment, with the variables of this program.
#[macro_export]
macro_rules! after_help {
    ($($variable:literal)*) => {
        concat!(
            "Exit status:\n  0  done\n  1  the command failed\n  2  wrong usage or configuration; nothing was changed\n\n",
            "Environment:\n  ",
            $($variable, "\n  ",)*
            "NO_COLOR      no colours, even on a terminal"
        )
    };
}

/// Reads the command line of a program.
///
/// # Errors
/// When the command line asks for help or the version, or is wrong.
pub fn parse<A: Parser>(args: impl IntoIterator<Item = OsString>) -> Result<A, Refusal> {
    A::try_parse_from(args).map_err(|e| {
        use clap::error::ErrorKind::{
            DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion,
        };
        match e.kind() {
            DisplayHelp | DisplayVersion | DisplayHelpOnMissingArgumentOrSubcommand => {
                Refusal::Help(e)
            }
            _ => Refusal::Usage(sentence(&e.to_string())),
        }
    })
}

/// Parses a count of at least 1, such as that of `--rounds`.
///
/// # Errors
/// A sentence that says what is allowed.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("a whole number from 1 on is allowed".into()),
        Ok(count) => Ok(count),
    }
}

/// Why a command line was not read.
#[derive(Debug)]
pub enum Refusal {
    /// The command line asks for help or the version, or names no command.
    Help(clap::Error),
    /// Wrong usage, in one sentence.
    Usage(String),
}

impl Refusal {
    /// Prints the help, or the sentence after the program's name; exit status 0 for help that was asked for, else 2.
    pub fn report(&self, program: &str) -> ExitCode {
        match self {
            Self::Help(help) => {
                let _ = help.print();
                ExitCode::from(if help.use_stderr() { 2 } else { 0 })
            }
            Self::Usage(sentence) => Failure::Usage(sentence.clone()).report(program),
        }
    }
}

/// Makes one sentence of the parser's several lines.
fn sentence(text: &str) -> String {
    let mut parts = Vec::new();
    let mut usage = None;
    for line in text.lines().map(str::trim).filter(|l| !l.is_empty()) {
        if let Some(rest) = line.strip_prefix("Usage: ") {
            usage = Some(rest);
        } else if !line.starts_with("For more information") {
            parts.push(
                line.trim_start_matches("error: ")
                    .trim_start_matches("tip: "),
            );
        }
    }
    let mut sentence = parts.join("; ").replace(":; ", ": ");
    if let Some(usage) = usage {
        sentence.push_str(&format!("; usage: {usage}"));
    }
    sentence
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_of_zero_is_refused() {
        assert_eq!(at_least_one("3"), Ok(3));
        for text in ["0", "-1", "x", ""] {
            assert!(at_least_one(text).unwrap_err().contains("from 1 on"));
        }
    }
}
