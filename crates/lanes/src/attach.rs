// SPDX-License-Identifier: Apache-2.0
//! What a guest does with a VF, whatever kind of guest it is.

use viola_netdev::Mac;

use crate::error::LaneError;
use crate::pool::VfDevice;
use crate::steps::StepTimes;

/// Where a VF is, seen from one guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// The guest does not have it.
    Absent,
    /// The guest has it and sends by the other path.
    Idle,
    /// The guest sends by it.
    InUse,
}

/// When a guest sends by its paravirtual path again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failover {
    /// It does already.
    Done,
    /// When the VF's link goes down.
    OnLinkDown,
    /// When the VF is unplugged.
    OnUnplug,
}

/// A guest that can have a VF beside its paravirtual NIC.
pub trait Attachment {
    /// The guest's Ethernet address, the same on both paths.
    ///
    /// # Errors
    /// Any [`LaneError`].
    fn mac(&mut self) -> Result<Mac, LaneError>;

    /// Gives the VF the guest's address by the VF's own driver. Called while the NIC's switch has
    /// no address for the VF, because some drivers accept a change only then.
    ///
    /// # Errors
    /// Any [`LaneError`]; the guest does not have the VF then.
    fn prepare(&mut self, vf: &VfDevice, mac: Mac, steps: &mut StepTimes) -> Result<(), LaneError> {
        let _ = (vf, mac, steps);
        Ok(())
    }

    /// Plugs the VF into the guest. The NIC's switch delivers to the VF already.
    ///
    /// # Errors
    /// Any [`LaneError`]; the guest does not have the VF then.
    fn plug(&mut self, vf: &VfDevice, steps: &mut StepTimes) -> Result<(), LaneError>;

    /// Has the guest send by its paravirtual path while it still has the VF, if the host can do
    /// that. The answer says when the guest does.
    ///
    /// # Errors
    /// Any [`LaneError`]; nothing has changed then.
    fn fail_over(&mut self, vf: &VfDevice) -> Result<Failover, LaneError>;

    /// Unplugs the VF. Calls `released` as soon as the guest no longer uses the VF, at the latest at
    /// the end.
    ///
    /// # Errors
    /// [`LaneError::ReleaseTimeout`] if the guest does not give the VF back; `released` has not been
    /// called then.
    fn unplug(
        &mut self,
        vf: &VfDevice,
        released: &mut dyn FnMut(),
        steps: &mut StepTimes,
    ) -> Result<(), LaneError>;

    /// Has the guest send by its VF again after [`Attachment::fail_over`].
    ///
    /// # Errors
    /// Any [`LaneError`]; nothing has changed then.
    fn resume(&mut self, vf: &VfDevice) -> Result<(), LaneError> {
        let _ = vf;
        Ok(())
    }

    /// Where the VF is.
    ///
    /// # Errors
    /// Any [`LaneError`].
    fn presence(&mut self, vf: &VfDevice) -> Result<Presence, LaneError>;
}
