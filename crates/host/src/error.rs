// SPDX-License-Identifier: Apache-2.0
//! What can go wrong while a host is read.

use std::io;
use std::path::{Path, PathBuf};

/// A file of the host that could not be read or understood.
///
/// A process that has ended is not an error: the functions of this crate answer `None` for it.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The file is there but cannot be read, most often because of missing privilege.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The file was read and is not what its documentation promises.
    #[error("cannot understand {}: {what}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// What was expected.
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
