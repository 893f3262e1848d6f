// SPDX-License-Identifier: Apache-2.0
//! Values that are strings in the description.

use std::net::Ipv4Addr;

use serde::{Deserialize, Deserializer};

use super::parse_size;

/// Name of the VMM.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum VmmName {
    #[default]
    Uml,
    Qemu,
}

impl<'de> Deserialize<'de> for VmmName {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        match String::deserialize(from)?.as_str() {
            "uml" => Ok(Self::Uml),
            "qemu" => Ok(Self::Qemu),
            other => Err(serde::de::Error::custom(format!(
                "vmm `{other}` is not supported; use \"uml\" (User Mode Linux), which needs no hardware virtualisation, or \"qemu\""
            ))),
        }
    }
}

/// A size such as `96M`, in bytes.
pub(super) struct Size(pub(super) u64);

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        parse_size(&String::deserialize(from)?)
            .map(Self)
            .map_err(serde::de::Error::custom)
    }
}

/// An address with the prefix length of its subnet.
#[derive(Clone, Copy)]
pub(super) struct Subnet(pub(super) Ipv4Addr, pub(super) u8);

impl<'de> Deserialize<'de> for Subnet {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let parsed = text
            .split_once('/')
            .and_then(|(address, prefix)| Some(Self(address.parse().ok()?, prefix.parse().ok()?)));
        parsed.ok_or_else(|| {
            serde::de::Error::custom(format!("address `{text}` must be like 10.77.0.11/24"))
        })
    }
}

/// An Ethernet address.
pub(super) struct Mac(pub(super) [u8; 6]);

impl<'de> Deserialize<'de> for Mac {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let bytes: Vec<u8> = text
            .split(':')
            .filter_map(|b| u8::from_str_radix(b, 16).ok().filter(|_| b.len() == 2))
            .collect();
        let mac = <[u8; 6]>::try_from(bytes)
            .ok()
            .filter(|mac| mac[0] & 1 == 0 && text.len() == 17);
        mac.map(Self).ok_or_else(|| {
            serde::de::Error::custom(format!(
                "mac `{text}` must be six bytes like 02:00:0a:4d:00:0b, the first one even"
            ))
        })
    }
}
