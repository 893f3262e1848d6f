// SPDX-License-Identifier: Apache-2.0
//! Who has a connection of a VM: the program `bpf/pipe.bpf.c` at its tap, and the map that it looks into.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use libbpf_rs::libbpf_sys;
use libbpf_rs::{MapCore, MapFlags, MapHandle, Object, ObjectBuilder};

use crate::{Error, Result};

static PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/pipe.bpf.o"));

/// Sizes of `struct flow_key` and `struct flow` in bpf/pipe.h.
const KEY: usize = 40;
const VALUE: usize = 48;
const HELD: u32 = 1;
const LED: u32 = 2;

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
    fn key(&self) -> Result<[u8; KEY]> {
        if self.guest.is_ipv4() != self.peer.is_ipv4() {
            return Err(Error::Families);
        }
        let mut key = [0; KEY];
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
pub struct Counts {
    /// From the peer, dropped while nobody had it.
    pub held: u64,
    /// From the peer, led to the host's socket.
    pub led: u64,
    /// From the host's socket.
    pub from_host: u64,
    /// From the VM, dropped.
    pub silenced: u64,
}

/// A tap and the end of a veth with the program on them; taken off when this goes, or the last copy of its descriptors.
#[derive(Debug)]
pub struct Attached {
    links: [OwnedFd; 3],
}

impl Attached {
    /// Its links, for a process that is to keep them.
    pub fn links(&self) -> &[OwnedFd; 3] {
        &self.links
    }
}

/// The program, once for all VMs of a host.
pub struct Steering {
    object: Object,
    flows: MapHandle,
    taps: MapHandle,
}

fn bpf(step: &'static str) -> impl Fn(libbpf_rs::Error) -> Error {
    move |source| Error::Bpf { step, source }
}

impl Steering {
    /// Loads the program. Needs CAP_BPF and CAP_NET_ADMIN, and Linux 6.6 for the way in which it is attached.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn load() -> Result<Self> {
        // what libbpf has to say comes back in its errors
        libbpf_rs::set_print(None);
        let open = ObjectBuilder::default()
            .open_memory(PROGRAM)
            .map_err(bpf("opening the steering program"))?;
        let object = open.load().map_err(bpf("loading the steering program"))?;
        let map = |name: &str| -> Result<MapHandle> {
            let map = object.maps().find(|map| map.name() == name);
            let map = map.ok_or_else(|| bpf("looking for a map")(not_found()))?;
            MapHandle::try_from(&map).map_err(bpf("opening a map"))
        };
        let (flows, taps) = (map("flows")?, map("taps")?);
        Ok(Self {
            object,
            flows,
            taps,
        })
    }

    /// Puts the program on a tap and on the host's end of the veth that leads to the VM's sockets, both in the calling
    /// thread's network namespace.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn attach(&self, tap: u32, veth: u32) -> Result<Attached> {
        self.taps
            .update(&veth.to_ne_bytes(), &tap.to_ne_bytes(), MapFlags::ANY)
            .map_err(bpf("telling the steering program of a tap"))?;
        let links = [
            self.link("to_guest", tap, libbpf_sys::BPF_TCX_EGRESS)?,
            self.link("from_guest", tap, libbpf_sys::BPF_TCX_INGRESS)?,
            self.link("from_host", veth, libbpf_sys::BPF_TCX_INGRESS)?,
        ];
        Ok(Attached { links })
    }

    fn link(
        &self,
        name: &'static str,
        interface: u32,
        hook: libbpf_sys::bpf_attach_type,
    ) -> Result<OwnedFd> {
        let program = self.object.progs().find(|program| program.name() == name);
        let program = program.ok_or_else(|| bpf("looking for a program")(not_found()))?;
        let program = program.as_fd().as_raw_fd();
        // SAFETY: plain numbers and no options; the answer is a new descriptor, or a negated error.
        let link = unsafe {
            libbpf_sys::bpf_link_create(program, interface as i32, hook, std::ptr::null())
        };
        if link < 0 {
            let source = std::io::Error::from_raw_os_error(-link);
            return Err(Error::kernel(format!(
                "putting `{name}` on interface {interface}"
            ))(source));
        }
        // SAFETY: a new descriptor that nobody else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(link) })
    }

    /// Nobody hears or says anything on this connection. `next_hop` is the MAC address to which the VM sends the peer's
    /// packets; else that of the first packet from the peer is taken.
    ///
    /// # Errors
    /// What the kernel refused; there is room for 65,536 connections.
    pub fn hold(&self, flow: &Flow, next_hop: Option<[u8; 6]>) -> Result<()> {
        let key = flow.key()?;
        let mut value = self.value(&key)?.unwrap_or([0; VALUE]);
        value[..4].copy_from_slice(&HELD.to_ne_bytes());
        if let Some(mac) = next_hop {
            value[40..46].copy_from_slice(&mac);
            value[46] = 1;
        }
        self.put(&key, &value)
    }

    /// The peer's packets go to the VM's sockets on the host, through the host's end of that veth, and theirs to the peer.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn lead(&self, flow: &Flow, veth: u32) -> Result<()> {
        let key = flow.key()?;
        let mut value = self.value(&key)?.unwrap_or([0; VALUE]);
        value[..4].copy_from_slice(&LED.to_ne_bytes());
        value[4..8].copy_from_slice(&veth.to_ne_bytes());
        self.put(&key, &value)
    }

    /// The connection is the VM's again.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn release(&self, flow: &Flow) -> Result<()> {
        match self.flows.delete(&flow.key()?) {
            Err(e) if e.kind() != libbpf_rs::ErrorKind::NotFound => {
                Err(bpf("giving a connection back to its VM")(e))
            }
            _ => Ok(()),
        }
    }

    /// Packets so far, of a connection that is held or led.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn counts(&self, flow: &Flow) -> Result<Option<Counts>> {
        let value = self.value(&flow.key()?)?;
        Ok(value.map(|value| {
            let word = |at: usize| {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(&value[at..at + 8]);
                u64::from_ne_bytes(bytes)
            };
            Counts {
                held: word(8),
                led: word(16),
                from_host: word(24),
                silenced: word(32),
            }
        }))
    }

    fn value(&self, key: &[u8; KEY]) -> Result<Option<[u8; VALUE]>> {
        let found = self.flows.lookup(key, MapFlags::ANY);
        let found = found.map_err(bpf("looking for a connection"))?;
        Ok(found.and_then(|bytes| bytes.try_into().ok()))
    }

    fn put(&self, key: &[u8; KEY], value: &[u8; VALUE]) -> Result<()> {
        let put = self.flows.update(key, value, MapFlags::ANY);
        put.map_err(bpf("steering a connection"))
    }
}

fn not_found() -> libbpf_rs::Error {
    std::io::Error::from(std::io::ErrorKind::NotFound).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_laid_out_as_the_program_reads_it() {
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
        assert!(matches!(flow.key(), Err(Error::Families)));
    }
}
