// SPDX-License-Identifier: Apache-2.0
//! Scenario files: a host, its VMs and what they do, in TOML. Unknown keys are refused; every error is one sentence with
//! file, line and key.

mod build;
mod file;

use std::path::Path;

pub use build::{Outcome, Scenario, VmOutcome};

/// Why a scenario cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// The file cannot be read.
    #[error("{file}: {source}")]
    Read {
        /// Which.
        file: String,
        /// Why.
        source: std::io::Error,
    },
    /// Something in it is wrong.
    #[error("{file}:{line}: {what}")]
    At {
        /// Which file.
        file: String,
        /// Line, from 1.
        line: usize,
        /// Key and what is wrong with it.
        what: String,
    },
}

impl Scenario {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`ScenarioError`], in one sentence.
    pub fn read(path: &Path) -> Result<Self, ScenarioError> {
        let file = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(&file, &text),
            Err(source) => Err(ScenarioError::Read { file, source }),
        }
    }

    /// Checks the text of a file.
    ///
    /// # Errors
    /// [`ScenarioError::At`].
    pub fn parse(file: &str, text: &str) -> Result<Self, ScenarioError> {
        let at = |span: std::ops::Range<usize>, what: String| ScenarioError::At {
            file: file.to_owned(),
            line: line_of(text, span.start),
            what,
        };
        let raw: file::File = toml::from_str(text).map_err(|e| {
            let span = e.span().unwrap_or(0..0);
            at(span.clone(), explain(e.message(), text, span.start))
        })?;
        build::build(raw).map_err(|(span, what)| at(span, what))
    }
}

fn line_of(text: &str, at: usize) -> usize {
    text[..at.min(text.len())].matches('\n').count() + 1
}

/// The parser's message in one line and an operator's words, with the key in front.
fn explain(message: &str, text: &str, at: usize) -> String {
    let message = message.trim().replace('\n', ", ").replace('`', "");
    for (parser, ours) in [
        ("unknown field ", "unknown key "),
        ("missing field ", "missing key "),
    ] {
        if let Some(rest) = message.strip_prefix(parser) {
            return format!("{ours}{rest}")
                .replace(", expected one of ", "; allowed are ")
                .replace(", expected ", "; allowed is ");
        }
    }
    let message = match message.strip_prefix("unknown variant ") {
        Some(rest) => rest
            .replacen(", expected one of ", " is not allowed; write one of ", 1)
            .replacen(", expected ", " is not allowed; write ", 1),
        None => message,
    };
    let before = text.get(..at).unwrap_or(text);
    let start = before.rfind('\n').map_or(0, |k| k + 1);
    let line = text[start..].lines().next().unwrap_or_default();
    match line.split_once('=') {
        Some((key, _)) if !key.contains('#') => format!("{}: {message}", key.trim()),
        _ => message,
    }
}

#[cfg(test)]
mod tests;
