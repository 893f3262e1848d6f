// SPDX-License-Identifier: Apache-2.0
//! The bytes that HDFS DataNodes send at the NICs of VMs, by a third BPF program (bpf/blocks.bpf.c).

use libbpf_rs::{Link, MapCore, MapFlags, Object};

use super::{Acct, AcctError, at, beside, map};

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/blocks.bpf.o"));

/// `MAX_FLOWS` of bpf/blocks.bpf.c.
const MAX_FLOWS: usize = 4096;
/// `struct flow_key` of bpf/blocks.bpf.c: index of the VM, direction, address.
const KEY_BYTES: usize = 4 + 4 + 16;

/// What a DataNode sent at the NIC of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flow {
    /// Index of the VM.
    pub vm: u32,
    /// Whether the VM got it; else it is the DataNode.
    pub to_guest: bool,
    /// Address of the DataNode: IPv6, or IPv4 and zeros.
    pub sender: [u8; 16],
    /// Bytes, with headers.
    pub bytes: u64,
}

impl Flow {
    fn parse(key: &[u8], value: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u32::from_ne_bytes(key.get(at..at + 4)?.try_into().ok()?));
        Some(Self {
            vm: word(0)?,
            to_guest: word(4)? != 0,
            sender: key.get(8..KEY_BYTES)?.try_into().ok()?,
            bytes: u64::from_ne_bytes(value.try_into().ok()?),
        })
    }
}

/// The loaded and attached program. Dropping it detaches the program.
pub struct BlockMeter {
    links: Vec<Link>,
    object: Object,
}

impl BlockMeter {
    /// Loads and attaches the program for the NICs that `acct` watches.
    ///
    /// # Errors
    /// [`AcctError`].
    pub fn load(acct: &Acct) -> Result<Self, AcctError> {
        let (object, links) = beside::load(acct, OBJECT)?;
        Ok(Self { links, object })
    }

    /// Detaches the program. Returns what it counted.
    ///
    /// # Errors
    /// [`AcctError`].
    pub fn end(self) -> Result<Vec<Flow>, AcctError> {
        // Guests choose addresses: while packets change the table, walking through it might not end.
        drop(self.links);
        let flows = map(&self.object, "flows")?;
        let mut found = Vec::new();
        for key in flows.keys().take(MAX_FLOWS) {
            let value = flows.lookup(&key, MapFlags::ANY).map_err(at("reading"))?;
            found.extend(value.and_then(|value| Flow::parse(&key, &value)));
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_is_parsed_as_the_c_structure_lays_it_out() {
        let mut key = [7_u32.to_ne_bytes(), 1_u32.to_ne_bytes()].concat();
        key.extend(1..=16);
        let flow = Flow {
            vm: 7,
            to_guest: true,
            sender: std::array::from_fn(|i| i as u8 + 1),
            bytes: 9,
        };
        assert_eq!(Flow::parse(&key, &9_u64.to_ne_bytes()), Some(flow));
        assert_eq!(Flow::parse(&key[..20], &9_u64.to_ne_bytes()), None);
        assert_eq!(Flow::parse(&key, &[1]), None);
    }
}
