// SPDX-License-Identifier: Apache-2.0
//! What the services of the agent share of the system.
//!
//! | module | contents |
//! |---|---|
//! | [`channel`] | the byte stream to the host: virtio-serial, serial line, unix socket |
//! | [`extents`] | file maps in the form of the protocol |
//! | [`handle`] | file handles, by which a file is opened without its path |
//! | [`mounts`] | `/proc/self/mountinfo` |
//! | [`passwd`] | users by name and number, `/etc/passwd` |
//! | [`queue`] | a queue between threads whose receiver can be polled |
//! | [`random`] | random numbers |
//! | [`service`] | a service on a thread of its own |
//! | [`signals`] | signals as descriptors |

pub mod channel;
pub mod extents;
pub mod handle;
pub mod mounts;
pub mod passwd;
pub mod queue;
pub mod random;
pub mod service;
pub mod signals;

/// The agent's directory at the root of each file system that it names blocks or files of.
pub const AGENT_DIR: &str = ".viola";
