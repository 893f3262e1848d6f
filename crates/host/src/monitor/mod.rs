// SPDX-License-Identifier: Apache-2.0
//! Sessions with the monitors of emulators: QMP, and the HTTP interfaces of Firecracker and Cloud Hypervisor.
//!
//! A VM may have taken over its emulator, so the daemon, which is root, does not read what an emulator sends. It connects,
//! checks who listens, and hands the connection to a process of its own for this session (`viola worker monitor`). That
//! process sends the daemon's requests, reads the answers and returns what they say, as one line of JSON each
//! ([`session`]). The daemon checks those lines as well: the process may be the emulator's by now.
//!
//! | file | runs in | does |
//! |---|---|---|
//! | `session.rs` | the daemon | starts the process, sends requests, decodes its lines |
//! | `serve.rs` | the process | runs the requests on the emulator's connection |

mod serve;
mod session;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::microvm::Page;
pub use serve::serve;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use session::decode;
pub(crate) use session::{Session, page};

/// What the daemon asks.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Negotiate QMP; an answer has this time. The other requests but `Page` need it.
    Open(Duration),
    /// Name, run state, threads and disks.
    State,
    /// The disks with their backing chains. From now on events that concern the disks are passed on.
    Chains,
    /// Devices with an id.
    Named,
    /// Virtio NICs with an id.
    VirtioNics,
    /// Whether the guest has negotiated the standby feature of this NIC.
    HasStandby(String),
    /// A PCIe root port without a device.
    FreePort,
    /// The guest's memory.
    Memory,
    /// Plug a device with these arguments.
    Plug(Value),
    /// Unplug the device of this id.
    Unplug(String),
    /// Get this page of an HTTP interface, and end.
    Page(Page),
}

/// A line from the process.
#[derive(Debug, Serialize, Deserialize)]
enum Line {
    /// An event that concerns the disks.
    Event(String),
    /// The answer to the oldest request, a `Result<_, QmpFailure>`.
    Answer(Value),
    /// The connection to the emulator is lost.
    Lost(String),
}

#[cfg(test)]
mod tests;
