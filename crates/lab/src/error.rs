// SPDX-License-Identifier: Apache-2.0
//! Errors of the lab.

use std::path::{Path, PathBuf};

/// Result of the functions of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// One sentence that says what failed, on what, and what to do where that helps.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The description of the lab is not valid.
    #[error("{origin}: {what}")]
    Spec {
        /// File and line.
        origin: String,
        /// Key and what is wrong with it.
        what: String,
    },
    /// The guest image is missing.
    #[error("no guest image at {0}; run scripts/lab-image.sh")]
    NoImage(PathBuf),
    /// The kernel for guests with several vCPUs is missing.
    #[error("no kernel for guests with several vCPUs at {0}; run scripts/uml-smp.sh")]
    NoSmpKernel(PathBuf),
    /// Kernel, initramfs or root disk of QEMU VMs is missing.
    #[error("no image for QEMU VMs at {0}; run scripts/qemu-image.sh")]
    NoQemuImage(PathBuf),
    /// The Hadoop for guests is missing.
    #[error("no Hadoop at build/hadoop; run scripts/hadoop.sh")]
    NoHadoop,
    /// HBase or Spark for guests is missing.
    #[error("neither HBase nor Spark at build/hadoop; run scripts/hadoop.sh --bench")]
    NoJavaStack,
    /// A lab of this name is running already.
    #[error(
        "lab `{name}` is running already; end it with `viola-lab down {name}` or choose another name"
    )]
    AlreadyRunning {
        /// Its name.
        name: String,
    },
    /// No lab of this name is running.
    #[error("no lab `{name}` is running; `viola-lab list` shows those that are")]
    NotRunning {
        /// The requested name.
        name: String,
    },
    /// The lab has no such guest.
    #[error("lab `{lab}` has no guest `{guest}`; it has {has}")]
    NoGuest {
        /// The lab's name.
        lab: String,
        /// The requested name.
        guest: String,
        /// The names of its guests.
        has: String,
    },
    /// A guest failed to do something.
    #[error("guest {guest}: {what}")]
    Guest {
        /// The guest's name.
        guest: String,
        /// What went wrong.
        what: String,
    },
    /// The lab's network could not be set up.
    #[error("lab network: {what}")]
    Net {
        /// The device and the operation.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A load was given an address outside the lab.
    #[error(
        "{address} is not an address of this lab's bridges ({bridges}); loads go to the lab's guests only"
    )]
    OutsideLab {
        /// The address.
        address: std::net::Ipv4Addr,
        /// The lab's subnets.
        bridges: String,
    },
    /// A load failed, or its parameters are out of range.
    #[error("load: {0}")]
    Load(String),
    /// A file or folder could not be used.
    #[error("{path}: cannot {what}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The operation.
        what: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// The lab's holder thread or supervisor has ended.
    #[error("the lab `{0}` has ended")]
    Ended(String),
    /// The supervisor, or a command, refused; the text says why.
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

    /// The sentence, followed by the system's error if there is one.
    pub fn full(&self) -> String {
        match std::error::Error::source(self) {
            Some(source) => format!("{self}: {source}"),
            None => self.to_string(),
        }
    }
}
