// SPDX-License-Identifier: Apache-2.0
//! A guest of any kind, as it is kept in the journal.

use serde::{Deserialize, Serialize};
use viola_netdev::Mac;

use crate::attach::{Attachment, GoesOver, Presence, VfAt};
use crate::error::LaneError;
use crate::netns::NetnsGuest;
use crate::qemu::QemuGuest;
use crate::steps::Steps;
use crate::uml::UmlGuest;

/// How a guest is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Guest {
    /// A network namespace.
    Netns(NetnsGuest),
    /// A QEMU guest.
    Qemu(QemuGuest),
    /// A UML guest.
    Uml(UmlGuest),
}

impl Guest {
    fn inner(&mut self) -> &mut dyn Attachment {
        match self {
            Self::Netns(guest) => guest,
            Self::Qemu(guest) => guest,
            Self::Uml(guest) => guest,
        }
    }
}

impl Attachment for Guest {
    fn mac(&mut self) -> Result<Mac, LaneError> {
        self.inner().mac()
    }

    fn prepare(&mut self, vf: &VfAt, mac: Mac, steps: &mut Steps) -> Result<(), LaneError> {
        self.inner().prepare(vf, mac, steps)
    }

    fn plug(&mut self, vf: &VfAt, steps: &mut Steps) -> Result<(), LaneError> {
        self.inner().plug(vf, steps)
    }

    fn fail_over(&mut self, vf: &VfAt) -> Result<GoesOver, LaneError> {
        self.inner().fail_over(vf)
    }

    fn unplug(
        &mut self,
        vf: &VfAt,
        released: &mut dyn FnMut(),
        steps: &mut Steps,
    ) -> Result<(), LaneError> {
        self.inner().unplug(vf, released, steps)
    }

    fn resume(&mut self, vf: &VfAt) -> Result<(), LaneError> {
        self.inner().resume(vf)
    }

    fn presence(&mut self, vf: &VfAt) -> Result<Presence, LaneError> {
        self.inner().presence(vf)
    }
}
