// SPDX-License-Identifier: Apache-2.0
//! A live TCP connection, taken from one socket and put into another, without a word to the peer.
//!
//! [`take`] reads all that the kernel knows of a connection (`TCP_REPAIR`, as CRIU uses it: kernel
//! `net/ipv4/tcp.c`), [`put`] makes a socket that goes on where the first one stopped. In between the
//! caller has to keep the connection's packets from both sockets; a gap of a second ends in a reset.
//! Needs CAP_NET_ADMIN in the user namespace of the network namespace.
//!
//! ```text
//! hold the packets;  take(old);  put(new, state);  let them go to the new one;  go(new)
//! ```
//!
//! The first socket stays as it is, in repair mode, and sends nothing: [`drop_quietly`] ends its connection on the same
//! descriptor, [`put`] may later bring it back into that descriptor.

mod put;
mod state;
mod sys;
mod take;
mod wire;

pub use put::{Ready, drop_quietly, drop_with_reset, pace, put, put_back};
pub use state::{Buffers, Scale, State, Window};
pub use sys::{buffers, peeks_from_the_beginning};
pub use take::{Taken, bound, ends, narrow, nudge, outstanding, reach, resume, take, take_between};
pub use wire::{TooLong, from_wire, to_wire};

/// Why a connection cannot be handed over.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is not what can be handed over; nothing was changed.
    #[error("not handed over: {0}")]
    Unfit(&'static str),
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
