// SPDX-License-Identifier: Apache-2.0
//! QEMU VMs.
//!
//! | file | what it has |
//! |---|---|
//! | `program.rs` | recognises a QEMU process |
//! | `process.rs` | one QEMU process: its threads, and when to query QMP |
//! | `options.rs`, `args.rs` | its command line |
//! | `view.rs` | QMP's answers in terms of the host's threads |
//! | `state.rs` | the QMP queries for state, threads and disks |
//! | [`qmp`], `message.rs`, `line_stream.rs` | the QMP connection |
//! | [`devices`] | plugs and unplugs devices |
//! | [`disk_watch`] | waits for events that concern the disks |
//!
//! QMP tells which thread is which vCPU. A QMP socket serves one client at a time; when it is taken (libvirt holds its own),
//! QEMU's thread names tell the same: `CPU 0/KVM`, `IO name`, given `-name ...,debug-threads=on`, which libvirt and Proxmox
//! set.

mod args;
pub mod devices;
pub mod disk_watch;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
pub(crate) mod line_stream;
pub(crate) mod message;
mod options;
mod process;
mod program;
pub mod qmp;
pub(crate) mod state;
mod view;

pub(crate) use args::{Chardev, QemuArgs};
pub(crate) use process::{Qemu, vhost_owner};
pub(crate) use program::is_qemu;
