// SPDX-License-Identifier: Apache-2.0
//! How QEMU runs a guest's instructions, and whether KVM runs guests here.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Image, QemuVm, VmSpec};

/// Where KVM works a guest boots within two seconds.
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);

/// How QEMU runs a guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// The processor runs them.
    Kvm,
    /// QEMU translates them, some ten times slower.
    Tcg,
}

impl Accel {
    /// KVM if the environment has `VIOLA_QEMU_ACCEL=kvm`.
    pub(super) fn of_environment() -> Self {
        match std::env::var("VIOLA_QEMU_ACCEL").as_deref() {
            Ok("kvm") => Self::Kvm,
            _ => Self::Tcg,
        }
    }

    /// The processor that the guest sees. Emulation leaves out what protects a kernel from its programs: each copy to and from
    /// a program would end a translated block, which costs a tenth of the time.
    pub(super) fn cpu(self) -> &'static str {
        match self {
            Self::Kvm => "host",
            Self::Tcg => "max,la57=off,smap=off,smep=off,pku=off,umip=off",
        }
    }
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        })
    }
}

/// Boots a small guest with KVM, whose files are in `folder`. There are hosts whose `/dev/kvm` exists and runs no guest.
///
/// # Errors
/// One sentence that says why KVM runs no guest here.
pub fn check_kvm(image: &Image, folder: &Path) -> Result<(), String> {
    if let Err(e) = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
    {
        return Err(format!("/dev/kvm: {e}"));
    }
    let mut spec = VmSpec::new("viola-lab-kvm-check").cores(&[]);
    (spec.accel, spec.boot_timeout) = (Accel::Kvm, CHECK_TIMEOUT);
    let started = QemuVm::start(&spec, image, folder);
    let failed = |e| {
        format!(
            "/dev/kvm exists, but runs no guest within {} s: {e}",
            CHECK_TIMEOUT.as_secs()
        )
    };
    started.map(drop).map_err(failed)
}
