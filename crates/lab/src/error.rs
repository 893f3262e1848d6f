// SPDX-License-Identifier: Apache-2.0
//! What can go wrong in the lab.

use std::path::{Path, PathBuf};

/// Result of the lab's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// One short sentence that says what failed, where, and where it helps what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The description of the lab is wrong.
    #[error("{origin}: {what}")]
    Spec {
        /// File and line.
        origin: String,
        /// Key and what is wrong with it.
        what: String,
    },
    /// There is no guest image.
    #[error("no guest image at {0}; run scripts/lab-image.sh")]
    NoImage(PathBuf),
    /// There is no kernel for guests with several vCPUs.
    #[error("no kernel for guests with several vCPUs at {0}; run scripts/uml-smp.sh")]
    NoSmpKernel(PathBuf),
    /// There is no kernel for QEMU guests.
    #[error("no kernel for QEMU guests at {0}; run scripts/qemu-image.sh")]
    NoQemuImage(PathBuf),
    /// There is no Hadoop for guests.
    #[error("no Hadoop at build/hadoop; run scripts/hadoop.sh")]
    NoHadoop,
    /// There is no HBase or Spark for guests.
    #[error("neither HBase nor Spark at build/hadoop; run scripts/hadoop.sh --bench")]
    NoJavaStack,
    /// A lab of this name is running.
    #[error(
        "lab `{name}` is running already; end it with `viola lab down {name}` or choose another name"
    )]
    AlreadyRunning {
        /// Its name.
        name: String,
    },
    /// No lab of this name is running.
    #[error("no lab `{name}` is running; `viola lab list` shows those that are")]
    NotRunning {
        /// The name asked for.
        name: String,
    },
    /// The lab has no such guest.
    #[error("lab `{lab}` has no guest `{guest}`; it has {has}")]
    NoGuest {
        /// The lab's name.
        lab: String,
        /// The name asked for.
        guest: String,
        /// The names of its guests.
        has: String,
    },
    /// A guest did not do what it was asked.
    #[error("guest {guest}: {what}")]
    Guest {
        /// The guest's name.
        guest: String,
        /// What went wrong.
        what: String,
    },
    /// The lab's network could not be made.
    #[error("lab network: {what}")]
    Net {
        /// The device and what was done with it.
        what: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A load was aimed at an address that is not the lab's.
    #[error(
        "{address} is not an address of this lab's bridges ({bridges}); loads go to the lab's guests only"
    )]
    OutsideLab {
        /// The address.
        address: std::net::Ipv4Addr,
        /// The lab's subnets.
        bridges: String,
    },
    /// A load's parameters make no sense, or it failed.
    #[error("load: {0}")]
    Load(String),
    /// A file or folder could not be used.
    #[error("{path}: cannot {what}")]
    Io {
        /// Which.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The lab's holder thread or supervisor has ended.
    #[error("the lab `{0}` has ended")]
    Ended(String),
    /// The supervisor said no.
    #[error("{0}")]
    Refused(String),
}

impl Error {
    pub(crate) fn io(
        what: &'static str,
        path: impl AsRef<Path>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        move |source| Self::Io { path, what, source }
    }

    pub(crate) fn net(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Net { what, source }
    }

    pub(crate) fn guest(guest: &str, what: impl Into<String>) -> Self {
        Self::Guest {
            guest: guest.into(),
            what: what.into(),
        }
    }

    /// The sentence with the system's reason behind it.
    pub fn full(&self) -> String {
        match std::error::Error::source(self) {
            Some(source) => format!("{self}: {source}"),
            None => self.to_string(),
        }
    }
}
