// SPDX-License-Identifier: Apache-2.0
//! How the daemon reaches a guest of any kind, as the journal keeps it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::attach::Attachment;
use crate::netns::NetnsGuest;
use crate::qemu::QemuGuest;
use crate::uml::UmlGuest;

/// How the daemon reaches a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GuestAccess {
    /// A network namespace.
    Netns(NetnsGuest),
    /// A QEMU guest.
    Qemu(QemuGuest),
    /// A UML guest.
    Uml(UmlGuest),
}

/// Longest time to release a VF that the configuration allows.
pub(crate) const MAX_RELEASE_TIMEOUT: Duration = Duration::from_secs(600);

impl GuestAccess {
    /// Time in which the guest has to release the VF.
    pub(crate) fn release_timeout(&self) -> Duration {
        match self {
            Self::Netns(_) => Duration::ZERO,
            Self::Qemu(guest) => guest.release_timeout,
            Self::Uml(guest) => guest.release_timeout,
        }
    }

    /// The guest's operations on a VF.
    pub fn attachment(&mut self) -> &mut dyn Attachment {
        match self {
            Self::Netns(guest) => guest,
            Self::Qemu(guest) => guest,
            Self::Uml(guest) => guest,
        }
    }
}
