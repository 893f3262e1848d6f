// SPDX-License-Identifier: Apache-2.0
//! Scenario files: a host, its VMs and their work, in TOML. Unknown keys are refused. Each error is one sentence with
//! file, line and key.

mod build;
mod file;

use std::path::Path;

pub use build::{Outcome, Scenario, VmOutcome};

use viola_cli::toml_text::{explain, line_of};

/// Why a scenario cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// The file cannot be read.
    #[error("cannot read scenario {file}: {source}")]
    Read {
        /// The file.
        file: String,
        /// The cause.
        source: std::io::Error,
    },
    /// The file has an error.
    #[error("{file}:{line}: {what}")]
    At {
        /// The file.
        file: String,
        /// Line, from 1.
        line: usize,
        /// The key, and the error.
        what: String,
    },
}

impl Scenario {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`ScenarioError`].
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

#[cfg(test)]
mod tests;
