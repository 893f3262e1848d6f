// SPDX-License-Identifier: Apache-2.0
//! Moves a live TCP connection from one socket to another without the peer's knowledge.
//!
//! [`extract`] reads the kernel's state of a connection (`TCP_REPAIR`, as CRIU uses it: kernel `net/ipv4/tcp.c`).
//! [`restore`] rebuilds the connection in another socket. In between the caller must keep the
//! connection's packets from both sockets, because the kernel answers a packet that finds no socket
//! with a reset. Needs CAP_NET_ADMIN in the user namespace of the network namespace.
//!
//! ```text
//! hold the packets;  extract(old);  restore(new, state);  redirect the packets to the new socket;  activate
//! ```
//!
//! After [`Extracted::detach`] the old socket stays in repair mode and sends nothing. [`disconnect_silently`] ends
//! its connection and keeps the descriptor; [`restore`] and [`restore_in_place`] can put a connection into it again.

mod extract;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
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
pub use sys::{Plain, buffers, get_option, peeks_from_start, set_option};
pub use wire::{QueueTooLong, from_wire, to_wire};

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket or its state cannot be moved; nothing was changed.
    #[error("the connection cannot be moved: {0}")]
    NotTransferable(&'static str),
    /// The kernel refused a step.
    #[error("{step}: {source}")]
    Kernel {
        /// The step.
        step: &'static str,
        /// The error of the kernel.
        source: std::io::Error,
    },
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
