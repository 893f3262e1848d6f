// SPDX-License-Identifier: Apache-2.0
//! Whether the host's sockets of a VM may send.

use std::os::fd::{AsRawFd, OwnedFd};

use libbpf_rs::libbpf_sys;

use crate::{Error, Result};

/// The map that the steering program reads before a packet leaves a VM's [`crate::VmNetns`]. While the gate is closed
/// no packet leaves: the sockets keep their state and retry twice a second.
#[derive(Debug)]
pub struct EgressGate(OwnedFd);

impl From<OwnedFd> for EgressGate {
    /// Uses the descriptor of another gate.
    fn from(map: OwnedFd) -> Self {
        Self(map)
    }
}

impl EgressGate {
    /// Duplicates the descriptor.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        let copy = self.0.try_clone();
        copy.map_err(Error::kernel("copying a descriptor"))
    }

    /// Closes or opens the gate.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn set_closed(&self, closed: bool) -> Result<()> {
        let (key, value) = (0_u32, u32::from(closed));
        // SAFETY: key and value are as long as the map's are.
        let done = unsafe {
            libbpf_sys::bpf_map_update_elem(
                self.0.as_raw_fd(),
                (&raw const key).cast(),
                (&raw const value).cast(),
                libbpf_sys::BPF_ANY.into(),
            )
        };
        match done {
            0 => Ok(()),
            error => Err(Error::kernel("switching the gate of a VM's sockets")(
                std::io::Error::from_raw_os_error(-error),
            )),
        }
    }
}
