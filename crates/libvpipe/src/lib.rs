// SPDX-License-Identifier: Apache-2.0
//! Bytes that the host moves for a VM, from a file or a connection to another one.
//!
//! A program in a VM has a file and a TCP connection, or two of either. It hands both to the VM's agent, the host moves the bytes
//! between disk image and network, and connections come back into the same descriptors. [`ffi`] is what C programs call, described in
//! `vpipe_file(3)`; [`engine`] is the part that talks to the agent, which the preload library uses too.
//!
//! What cannot be piped is copied by the ordinary system calls: a caller needs no second way.

mod candidate;
mod copy;
pub mod engine;
pub mod ffi;
mod file;
mod job;
mod settings;
pub mod threshold;

pub use candidate::{Candidate, FileId, Route, candidate, file_id};
pub use file::{PIECE, Place, pipe, send};
pub use settings::{DEFAULT_MINIMUM, Settings, settings};
