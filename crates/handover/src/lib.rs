// SPDX-License-Identifier: Apache-2.0
//! A live TCP connection, taken from one socket and put into another, without a word to the peer.
//!
//! [`extract`] reads all that the kernel knows of a connection (`TCP_REPAIR`, as CRIU uses it: kernel
//! `net/ipv4/tcp.c`), [`restore`] makes a socket that goes on where the first one stopped. In between the
//! caller has to keep the connection's packets from both sockets; a gap of a second ends in a reset.
//! Needs CAP_NET_ADMIN in the user namespace of the network namespace.
//!
//! ```text
//! hold the packets;  take(old);  put(new, state);  let them go to the new one;  go(new)
//! ```
//!
//! The first socket stays as it is, in repair mode, and sends nothing: [`disconnect_silently`] ends its connection on the same
//! descriptor, [`restore`] may later bring it back into that descriptor.

mod extract;
mod restore;
mod state;
mod sys;
mod wire;

pub use extract::{
    Extracted, clamp_window, endpoints, extract, extract_between, leave_repair_mode,
    limit_receive_buffer, receivable_bytes, send_window_probe, unacknowledged_bytes,
};
pub use restore::{
    RestoredConnection, apply_pacing, disconnect_silently, disconnect_with_reset, restore,
    restore_in_place,
};
pub use state::{RepairWindow, SocketBuffers, TcpState, WindowScale};
pub use sys::{buffers, peeks_from_start};
pub use wire::{QueueTooLong, from_wire, to_wire};

/// Why a connection cannot be handed over.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is not what can be handed over; nothing was changed.
    #[error("not handed over: {0}")]
    NotTransferable(&'static str),
    /// The kernel refused a step.
    #[error("{step}: {source}")]
    Kernel {
        /// What was tried.
        step: &'static str,
        /// What the kernel says.
        source: std::io::Error,
    },
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
