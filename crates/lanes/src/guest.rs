// SPDX-License-Identifier: Apache-2.0
//! How the daemon reaches a guest of any kind, as the journal keeps it.

use serde::{Deserialize, Serialize};
use viola_netdev::Mac;

use crate::attach::{Attachment, Failover, Presence};
use crate::error::LaneError;
use crate::netns::NetnsGuest;
use crate::pool::VfDevice;
use crate::qemu::QemuGuest;
use crate::steps::StepTimes;
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
    fn inner(&mut self) -> &mut dyn Attachment {
        match self {
            Self::Netns(guest) => guest,
            Self::Qemu(guest) => guest,
            Self::Uml(guest) => guest,
        }
    }
}

impl Attachment for GuestAccess {
    fn mac(&mut self) -> Result<Mac, LaneError> {
        self.inner().mac()
    }

    fn prepare(&mut self, vf: &VfDevice, mac: Mac, steps: &mut StepTimes) -> Result<(), LaneError> {
        self.inner().prepare(vf, mac, steps)
    }

    fn plug(&mut self, vf: &VfDevice, steps: &mut StepTimes) -> Result<(), LaneError> {
        self.inner().plug(vf, steps)
    }

    fn fail_over(&mut self, vf: &VfDevice) -> Result<Failover, LaneError> {
        self.inner().fail_over(vf)
    }

    fn unplug(
        &mut self,
        vf: &VfDevice,
        released: &mut dyn FnMut(),
        steps: &mut StepTimes,
    ) -> Result<(), LaneError> {
        self.inner().unplug(vf, released, steps)
    }

    fn resume(&mut self, vf: &VfDevice) -> Result<(), LaneError> {
        self.inner().resume(vf)
    }

    fn presence(&mut self, vf: &VfDevice) -> Result<Presence, LaneError> {
        self.inner().presence(vf)
    }
}
