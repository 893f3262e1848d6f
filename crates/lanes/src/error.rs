// SPDX-License-Identifier: Apache-2.0
//! Errors of VFs.

use std::io;
use std::path::{Path, PathBuf};

/// Why a VF could not be created, granted or revoked.
#[derive(Debug, thiserror::Error)]
pub enum LaneError {
    /// A file of sysfs or procfs could not be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel refused a change.
    #[error("{what}: {source}")]
    Net {
        /// The object and the change.
        what: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The NIC has fewer VFs than the configuration asks for.
    #[error("{pf} has {available} VFs, but {wanted} are configured: {remedy}")]
    TooFewVfs {
        /// The PF.
        pf: String,
        /// VFs that the NIC has or can have.
        available: u32,
        /// VFs that the configuration asks for.
        wanted: u32,
        /// What to do.
        remedy: &'static str,
    },
    /// QEMU's monitor refused a command or did not answer.
    #[error("QEMU: {0}")]
    Qmp(String),
    /// The guest did not release the VF in time; it still has the VF.
    #[error("the guest has not released the VF within {} s", seconds)]
    ReleaseTimeout {
        /// The time limit in seconds.
        seconds: u64,
    },
    /// The guest cannot have a VF now, for this reason.
    #[error("{0}")]
    Unusable(String),
    /// The journal could not be written.
    #[error("{}: {source}", path.display())]
    Journal {
        /// The journal's file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl LaneError {
    pub(crate) fn file(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { path, source }
    }

    pub(crate) fn net(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Net { what, source }
    }
}
