// SPDX-License-Identifier: Apache-2.0
//! The tap devices that a process has open.

use std::path::Path;

use super::read::{numbers, read_link, read_text, status_field};
use crate::error::HostError;
use crate::thread::Tid;

/// The interfaces behind a process's descriptors of `/dev/net/tun` and `/dev/tapN`.
///
/// # Errors
/// As [`super::read`].
pub fn taps(pid: Tid) -> Result<Vec<TapFd>, HostError> {
    let mut taps = Vec::new();
    for fd in numbers(Path::new(&format!("/proc/{pid}/fd")))? {
        let Some(target) = read_link(format!("/proc/{pid}/fd/{fd}"))? else {
            continue;
        };
        let target = target.to_string_lossy();
        if target == "/dev/net/tun" {
            let info = read_text(format!("/proc/{pid}/fdinfo/{fd}"))?.unwrap_or_default();
            if let Some(name) = status_field(&info, "iff").filter(|n| !n.is_empty()) {
                let name = name.to_owned();
                taps.push(TapFd::Tap { fd, name });
            }
        } else if let Some(ifindex) = target.strip_prefix("/dev/tap").and_then(|n| n.parse().ok()) {
            taps.push(TapFd::Macvtap { fd, ifindex });
        }
    }
    Ok(taps)
}

/// An open tap of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TapFd {
    /// A tap, by name.
    Tap {
        /// Descriptor.
        fd: u32,
        /// Name of the interface.
        name: String,
    },
    /// A macvtap; its device file carries the interface's number.
    Macvtap {
        /// Descriptor.
        fd: u32,
        /// Number of the interface.
        ifindex: u32,
    },
}
