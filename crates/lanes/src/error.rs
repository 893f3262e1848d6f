// SPDX-License-Identifier: Apache-2.0
//! What can go wrong with a VF.

use std::io;
use std::path::{Path, PathBuf};

/// Why a VF could not be made, given or taken.
#[derive(Debug, thiserror::Error)]
pub enum LaneError {
    /// A file of sysfs or procfs.
    #[error("{}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel refused a change.
    #[error("{what}: {source}")]
    Net {
        /// What was tried.
        what: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A NIC without enough VFs.
    #[error("{pf} has {there} VFs and {wanted} are wanted: {remedy}")]
    TooFew {
        /// The PF.
        pf: String,
        /// VFs that it has or can have.
        there: u32,
        /// VFs of the configuration.
        wanted: u32,
        /// What to do.
        remedy: &'static str,
    },
    /// QEMU's monitor.
    #[error("QEMU: {0}")]
    Qmp(String),
    /// The guest did not let go of its VF in time; it still has it.
    #[error("the guest has not given it back within {} s", seconds)]
    Kept {
        /// How long was waited.
        seconds: u64,
    },
    /// The guest cannot take a VF.
    #[error("{0}")]
    Unfit(String),
    /// The state of lanes cannot be kept.
    #[error("{}: {source}", path.display())]
    Journal {
        /// Its file.
        path: PathBuf,
        /// Why.
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
