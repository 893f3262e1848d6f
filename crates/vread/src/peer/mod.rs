// SPDX-License-Identifier: Apache-2.0
//! The peer worker: serves blocks of this host's DataNode VMs to other hosts, and fetches theirs for this host's
//! readers.
//!
//! One process per host, which holds the host's key and has no other privilege. A reader worker has no access to the
//! key or the network: it sends requests on a socket and finds the bytes in memory that it shares with the peer
//! worker.
//!
//! | module | does |
//! |---|---|
//! | `wire`, `frames` | the messages between hosts, and the parser of the stream |
//! | `versions` | which version of the protocol a connection has |
//! | `tls`, `tls_channel` | pinned certificates; a non-blocking TLS connection |
//! | `hosts` | the other hosts, their grants and counts |
//! | `server`, `requests` | answers other hosts |
//! | `places` | how many connections an address may have |
//! | `client`, `connection` | asks other hosts for one reader; a connection to one of them |
//! | `datagram`, `shared_memory` | between a reader worker and the peer worker |
//! | `worker` | the daemon's orders |

mod client;
pub(crate) mod connection;
pub(crate) mod datagram;
pub(crate) mod frames;
mod hosts;
mod places;
mod requests;
mod server;
pub(crate) mod shared_memory;
#[cfg(test)]
mod tests;
mod tls;
mod tls_channel;
mod versions;
pub(crate) mod wire;
mod worker;

pub use shared_memory::new_memory;
pub use tls::{PeerError, check_identity, fingerprint};
pub use worker::{Params, run};
