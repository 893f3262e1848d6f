// SPDX-License-Identifier: Apache-2.0
//! How the daemon reaches a guest of any kind, as the journal keeps it.

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

impl GuestAccess {
    /// The guest's operations on a VF.
    pub fn attachment(&mut self) -> &mut dyn Attachment {
        match self {
            Self::Netns(guest) => guest,
            Self::Qemu(guest) => guest,
            Self::Uml(guest) => guest,
        }
    }
}
