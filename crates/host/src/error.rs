// SPDX-License-Identifier: Apache-2.0
//! Errors of reading the host.

use std::io;
use std::path::{Path, PathBuf};

/// A file of the host that this program cannot read or parse.
///
/// A process that has ended is no error: the functions of this crate return `None` for it.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The file exists but cannot be read, most often for lack of privilege.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The file's contents do not have the documented form.
    #[error("cannot parse {}: {what}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong with the contents.
        what: &'static str,
    },
}

impl HostError {
    pub(crate) fn read(path: impl AsRef<Path>, source: impl Into<io::Error>) -> Self {
        Self::Read {
            path: path.as_ref().to_owned(),
            source: source.into(),
        }
    }

    pub(crate) fn parse(path: impl AsRef<Path>, what: &'static str) -> Self {
        Self::Parse {
            path: path.as_ref().to_owned(),
            what,
        }
    }

    /// The error and its cause in one line, for a list of warnings.
    #[must_use]
    pub fn one_line(&self) -> String {
        match self {
            Self::Read { source, .. } => format!("{self}: {source}"),
            Self::Parse { .. } => self.to_string(),
        }
    }
}
