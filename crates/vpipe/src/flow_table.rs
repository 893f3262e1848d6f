// SPDX-License-Identifier: Apache-2.0
//! The map of the steering programs: who has which connection.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};

use libbpf_rs::libbpf_sys;

use crate::{Error, Result};

/// Sizes of `struct flow_key` and `struct flow` in bpf/pipe.h, and values of `enum flow_state`.
const KEY_BYTES: usize = 40;
const VALUE_BYTES: usize = 48;
const STATE_HELD: u32 = 1;
const STATE_REDIRECTED: u32 = 2;
const STATE_INCOMING_HELD: u32 = 3;

/// A connection of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Flow {
    /// Interface index of the VM's tap.
    pub tap: u32,
    /// The VM's end.
    pub guest: SocketAddr,
    /// The other end.
    pub peer: SocketAddr,
}

impl Flow {
    fn key(&self) -> Result<[u8; KEY_BYTES]> {
        if self.guest.is_ipv4() != self.peer.is_ipv4() {
            return Err(Error::MixedAddressFamilies);
        }
        let mut key = [0; KEY_BYTES];
        key[..16].copy_from_slice(&address(self.guest.ip()));
        key[16..32].copy_from_slice(&address(self.peer.ip()));
        key[32..34].copy_from_slice(&self.guest.port().to_be_bytes());
        key[34..36].copy_from_slice(&self.peer.port().to_be_bytes());
        key[36..].copy_from_slice(&self.tap.to_ne_bytes());
        Ok(key)
    }
}

fn address(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&v4.octets());
            bytes
        }
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// Packets of a connection since it was held for the first time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FlowCounts {
    /// From the peer while the connection was held.
    pub held: u64,
    /// From the peer, redirected to the host's socket.
    pub redirected: u64,
    /// From the host's socket.
    pub from_host: u64,
    /// From the VM, dropped.
    pub vm_dropped: u64,
}

/// The connections of one VM that are held or redirected. A process with this descriptor needs no privilege to steer
/// them, and cannot steer connections of other VMs.
#[derive(Debug)]
pub struct FlowTable(OwnedFd);

impl From<OwnedFd> for FlowTable {
    /// Uses the descriptor of another table.
    fn from(map: OwnedFd) -> Self {
        Self(map)
    }
}

impl FlowTable {
    /// Duplicates the descriptor.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        self.0
            .try_clone()
            .map_err(Error::kernel("copying a descriptor"))
    }

    /// Holds a connection: neither the VM nor the host receives or sends its packets. Packets of the peer leave
    /// through the interface `hold_veth`, if given; otherwise they are dropped. `next_hop` is the MAC address to
    /// which the VM sends the peer's packets; otherwise the program learns it from the peer's first packet.
    ///
    /// # Errors
    /// What the kernel refused; the table has room for 65,536 connections.
    pub fn hold(
        &self,
        flow: &Flow,
        next_hop: Option<[u8; 6]>,
        hold_veth: Option<u32>,
    ) -> Result<()> {
        let key = flow.key()?;
        let mut value = self.value(&key)?.unwrap_or([0; VALUE_BYTES]);
        value[..4].copy_from_slice(&STATE_HELD.to_ne_bytes());
        value[4..8].copy_from_slice(&hold_veth.unwrap_or(0).to_ne_bytes());
        if let Some(mac) = next_hop {
            value[40..46].copy_from_slice(&mac);
            value[46] = 1;
        }
        self.put(&key, &value)
    }

    /// The host's socket may send. Packets of the peer are still held and leave through the interface `hold_veth`.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn hold_incoming(&self, flow: &Flow, hold_veth: u32) -> Result<()> {
        let key = flow.key()?;
        let mut value = self.value(&key)?.unwrap_or([0; VALUE_BYTES]);
        value[..4].copy_from_slice(&STATE_INCOMING_HELD.to_ne_bytes());
        value[4..8].copy_from_slice(&hold_veth.to_ne_bytes());
        self.put(&key, &value)
    }

    /// Redirects a connection: packets of the peer go to the host's socket through the host's end
    /// of `veth`, and packets of that socket go to the peer.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn redirect(&self, flow: &Flow, veth: u32) -> Result<()> {
        let key = flow.key()?;
        let mut value = self.value(&key)?.unwrap_or([0; VALUE_BYTES]);
        value[..4].copy_from_slice(&STATE_REDIRECTED.to_ne_bytes());
        value[4..8].copy_from_slice(&veth.to_ne_bytes());
        self.put(&key, &value)
    }

    /// Releases a connection to the VM.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn release(&self, flow: &Flow) -> Result<()> {
        let key = flow.key()?;
        // SAFETY: the key is as long as the map's keys are.
        let done =
            unsafe { libbpf_sys::bpf_map_delete_elem(self.0.as_raw_fd(), key.as_ptr().cast()) };
        match done {
            0 => Ok(()),
            error if error == -libc::ENOENT => Ok(()),
            error => Err(refused("releasing a connection to its VM", error)),
        }
    }

    /// Counters of a held or redirected connection; `None` for any other.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn counts(&self, flow: &Flow) -> Result<Option<FlowCounts>> {
        let value = self.value(&flow.key()?)?;
        Ok(value.map(|value| {
            let word = |at: usize| {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(&value[at..at + 8]);
                u64::from_ne_bytes(bytes)
            };
            FlowCounts {
                held: word(8),
                redirected: word(16),
                from_host: word(24),
                vm_dropped: word(32),
            }
        }))
    }

    fn value(&self, key: &[u8; KEY_BYTES]) -> Result<Option<[u8; VALUE_BYTES]>> {
        let mut value = [0; VALUE_BYTES];
        // SAFETY: key and value are as long as the map's are.
        let done = unsafe {
            libbpf_sys::bpf_map_lookup_elem(
                self.0.as_raw_fd(),
                key.as_ptr().cast(),
                value.as_mut_ptr().cast(),
            )
        };
        match done {
            0 => Ok(Some(value)),
            error if error == -libc::ENOENT => Ok(None),
            error => Err(refused("looking up a connection", error)),
        }
    }

    fn put(&self, key: &[u8; KEY_BYTES], value: &[u8; VALUE_BYTES]) -> Result<()> {
        // SAFETY: key and value are as long as the map's are.
        let done = unsafe {
            libbpf_sys::bpf_map_update_elem(
                self.0.as_raw_fd(),
                key.as_ptr().cast(),
                value.as_ptr().cast(),
                libbpf_sys::BPF_ANY.into(),
            )
        };
        match done {
            0 => Ok(()),
            error => Err(refused("steering a connection", error)),
        }
    }
}

/// libbpf returns a negated errno.
fn refused(step: &str, error: i32) -> Error {
    Error::kernel(step)(std::io::Error::from_raw_os_error(-error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_the_layout_of_the_program() {
        let flow = Flow {
            tap: 7,
            guest: "10.0.0.2:80".parse().unwrap(),
            peer: "10.0.0.9:4660".parse().unwrap(),
        };
        let key = flow.key().unwrap();
        assert_eq!(&key[..5], &[10, 0, 0, 2, 0]);
        assert_eq!(&key[16..21], &[10, 0, 0, 9, 0]);
        assert_eq!(&key[32..36], &[0, 80, 0x12, 0x34]);
        assert_eq!(key[36..], 7u32.to_ne_bytes());
    }

    #[test]
    fn ends_of_different_families_are_refused() {
        let flow = Flow {
            tap: 7,
            guest: "10.0.0.2:80".parse().unwrap(),
            peer: "[fd00::1]:4660".parse().unwrap(),
        };
        assert!(matches!(flow.key(), Err(Error::MixedAddressFamilies)));
    }
}
