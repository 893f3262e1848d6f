// SPDX-License-Identifier: Apache-2.0
//! What a guest does with a VF.

use viola_netdev::Mac;

use crate::error::LaneError;
use crate::pool::Pf;
use crate::steps::Steps;

/// A VF and where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VfAt {
    /// Its PF.
    pub pf: Pf,
    /// Its number, from 0.
    pub index: u32,
    /// Its address on the bus.
    pub address: String,
}

/// Where a VF is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// Not with this guest.
    Absent,
    /// The guest has it and does not send by it.
    Idle,
    /// The guest sends by it.
    InUse,
}

/// When a guest uses its paravirtual path again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GoesOver {
    /// It does.
    Now,
    /// When the VF's link goes down.
    WithTheLink,
    /// Only when the VF is taken out.
    WithTheVf,
}

/// A guest that can have a VF beside its paravirtual NIC.
pub trait Attachment {
    /// Its Ethernet address, the same on both paths.
    ///
    /// # Errors
    /// Any [`LaneError`].
    fn mac(&mut self) -> Result<Mac, LaneError>;

    /// Makes the VF ready for it while the NIC's switch knows no address of the VF, so that its driver may choose one.
    ///
    /// # Errors
    /// Any [`LaneError`]; the guest does not have it.
    fn prepare(&mut self, vf: &VfAt, mac: Mac, steps: &mut Steps) -> Result<(), LaneError> {
        let _ = (vf, mac, steps);
        Ok(())
    }

    /// Gives the VF to it. The NIC's switch knows it already. On error the guest does not have it.
    ///
    /// # Errors
    /// Any [`LaneError`].
    fn plug(&mut self, vf: &VfAt, steps: &mut Steps) -> Result<(), LaneError>;

    /// Lets it use the paravirtual path again while it still has the VF, as far as that can be done from here.
    ///
    /// # Errors
    /// Any [`LaneError`]; everything is as before then.
    fn fail_over(&mut self, vf: &VfAt) -> Result<GoesOver, LaneError>;

    /// Takes the VF out. `released` is called as soon as the guest does not use it any more, at the latest at the end.
    ///
    /// # Errors
    /// [`LaneError::Kept`] when the guest does not give it back; `released` has not been called then.
    fn unplug(
        &mut self,
        vf: &VfAt,
        released: &mut dyn FnMut(),
        steps: &mut Steps,
    ) -> Result<(), LaneError>;

    /// Lets it use a VF again that it has and does not use, or was asked for.
    ///
    /// # Errors
    /// Any [`LaneError`]; everything is as before then.
    fn resume(&mut self, vf: &VfAt) -> Result<(), LaneError> {
        let _ = vf;
        Ok(())
    }

    /// Where the VF is.
    ///
    /// # Errors
    /// Any [`LaneError`].
    fn presence(&mut self, vf: &VfAt) -> Result<Presence, LaneError>;
}
