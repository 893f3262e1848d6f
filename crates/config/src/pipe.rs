// SPDX-License-Identifier: Apache-2.0
//! `[vm.pipe]`: the VM whose files the host sends, and its network.

use std::net::IpAddr;

use serde::Deserialize;
use serde::de::Error as _;

/// `[vm.pipe]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmPipe {
    /// The host takes over connections of these addresses of the VM only; empty for all.
    #[serde(default, deserialize_with = "addresses")]
    pub addresses: Vec<IpAddr>,
    /// Tap of its NIC on the host; `None` to find it.
    #[serde(default)]
    pub tap: Option<String>,
    /// MAC address of its NIC; `None` to find it.
    #[serde(default, deserialize_with = "mac")]
    pub mac: Option<[u8; 6]>,
    /// Whether the host may write to the VM's disks, for uploads and copies.
    #[serde(default)]
    pub writes: bool,
    /// Cap of what the host moves for the VM, bytes per second; `None` for no cap.
    #[serde(default, deserialize_with = "rate")]
    pub rate: Option<u64>,
    /// Connections that the host may hold for the VM at a time.
    #[serde(alias = "most", default = "default_max_connections")]
    pub max_connections: u16,
}

fn default_max_connections() -> u16 {
    256
}

fn addresses<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Vec<IpAddr>, D::Error> {
    let all = Vec::<IpAddr>::deserialize(d)?;
    match all.is_empty() {
        true => Err(D::Error::custom(
            "empty; name an address of the VM, or leave the key out for all",
        )),
        false => Ok(all),
    }
}

fn rate<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
    match u64::deserialize(d)? {
        0 => Err(D::Error::custom(
            "0 is not allowed; leave the key out for no cap",
        )),
        rate => Ok(Some(rate)),
    }
}

fn mac<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<[u8; 6]>, D::Error> {
    let text = String::deserialize(d)?;
    let wrong = || D::Error::custom("not a MAC address; write it as \"52:54:00:12:34:56\"");
    parse_mac(&text).map(Some).ok_or_else(wrong)
}

/// Parses a MAC address such as `52:54:00:12:34:56`.
pub fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let bytes: Vec<u8> = text
        .split(':')
        .map(|two| match two.len() {
            2 => u8::from_str_radix(two, 16).ok(),
            _ => None,
        })
        .collect::<Option<_>>()?;
    bytes.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_mac_address_is_none() {
        assert_eq!(
            parse_mac("52:54:00:12:34:aF"),
            Some([0x52, 0x54, 0, 0x12, 0x34, 0xaf])
        );
        for bad in [
            "",
            "52:54:00:12:34",
            "52:54:00:12:34:56:78",
            "52:54:0:12:34:56",
            "52-54-00-12-34-56",
        ] {
            assert_eq!(parse_mac(bad), None, "{bad}");
        }
    }
}
