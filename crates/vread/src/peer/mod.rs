// SPDX-License-Identifier: Apache-2.0
//! The peer worker: blocks of this host's DataNode VMs for other hosts, and theirs for this host's readers.
//!
//! One process per host, which has the host's key and no other right. A reader's worker never sees the key nor the
//! network: it asks on a socket and finds the bytes in memory that it shares with this one.
//!
//! | module | does |
//! |---|---|
//! | `wire`, `frames` | what two hosts say to each other, and the stream cut into frames |
//! | `tls`, `channel` | who is who; a TLS connection that nobody waits for |
//! | `hosts` | the other hosts, what they may read, counts |
//! | `serve`, `jobs` | answers other hosts |
//! | `ask`, `line` | asks other hosts for one reader; a connection to one of them |
//! | `local`, `memory` | between a reader's worker and this one |
//! | `run` | the daemon's orders |

mod client;
pub(crate) mod connection;
pub(crate) mod datagram;
pub(crate) mod frames;
mod hosts;
mod requests;
mod server;
pub(crate) mod shared_memory;
#[cfg(test)]
mod tests;
mod tls;
mod tls_channel;
pub(crate) mod wire;
mod worker;

pub use shared_memory::new_memory;
pub use tls::{PeerError, check_identity, fingerprint};
pub use worker::{Params, run};
