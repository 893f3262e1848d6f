// SPDX-License-Identifier: Apache-2.0
//! libvpipe: a program in a VM lets the host move bytes between files and TCP connections.
//!
//! The program passes its descriptors to the VM's agent. The host moves the bytes between disk image and network, and
//! the connections return to the same descriptors. What the host cannot move is copied by ordinary system calls, so a
//! caller needs no second code path.
//!
//! | module | what it does |
//! |---|---|
//! | [`ffi`] | the C interface, see `vpipe_file(3)` |
//! | `transfer`, `job` | calls that wait for the end of a transfer, and calls that do not |
//! | [`engine`] | the connection to the agent and the table of pipes; the preload library uses it too |
//! | `candidate` | which descriptors the host can move bytes between |
//! | `copy` | ordinary system calls |
//! | [`threshold`] | from which size on a file is worth a pipe |
//! | `settings` | environment variables |

mod candidate;
mod copy;
pub mod engine;
pub mod ffi;
mod job;
mod settings;
pub mod threshold;
mod transfer;

pub use candidate::{Candidate, FileId, TransferKind, classify, file_id};
pub use settings::{DEFAULT_MIN_BYTES, Settings, settings};
pub use transfer::{MAX_COPY_BYTES, Offsets, pipe, transfer};
