// SPDX-License-Identifier: Apache-2.0
//! Files that the host sends down a VM's connections.
//!
//! A program in a VM has a file and a TCP connection. It hands both to the VM's agent, the host sends the file's bytes from
//! the disk image, and the connection comes back into the same descriptor. [`ffi`] is what C programs call, described in
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

pub use candidate::{Candidate, FileId, candidate, file_id};
pub use file::send;
pub use settings::{DEFAULT_MINIMUM, Settings, settings};
