// SPDX-License-Identifier: Apache-2.0
//! Bytes that the host moves for this VM's programs between files and connections: see [`viola_proto::pipe`].
//!
//! | module | contents |
//! |---|---|
//! | [`settings`] | `[pipe]` in the configuration |
//! | [`programs`] | the socket at which programs ask |
//! | [`lease`] | read leases: a file stays unchanged while the host reads it |
//! | `sink` | prepares a file for the host's writes, and returns it to the program |
//! | [`socket`] | extracts a connection from a program's socket, and restores it |
//! | `forward` | moves what a held connection has received |
//! | [`next_hop`] | the MAC address that a connection's packets go to |
//! | `life` | the life of one pipe, a state machine |
//! | `mapper` | the thread that finds extents |
//! | `engine` | joins all of them |
//! | [`report`], `counters`, `reason` | what `viola-agent status` shows |
//!
//! The main loop runs the engine: it has the channel to the host, and a thread of its own would add a wake-up to each
//! step that a program waits for. The engine never waits for a disk: other threads find extents and write, and send
//! completions.
//!
//! When the session ends, the host resets the connections that it has, so their programs lose them. When the agent is
//! killed, the sockets of extracted connections stay silent: the program sees the agent's socket closed and must
//! close those sockets too.

mod counters;
mod engine;
mod forward;
pub mod lease;
mod life;
mod mapper;
pub mod next_hop;
pub mod programs;
mod reason;
pub mod report;
pub mod settings;
mod sink;
pub mod socket;
mod state;

pub use engine::{Pipes, Wakeups};
pub use reason::Reason;
pub use state::{HostState, Outgoing, PipeAccess, PipeVolume};
