// SPDX-License-Identifier: Apache-2.0
//! The guest agent: it names finished HDFS blocks to the host and withdraws them before they change.
//!
//! The agent keeps a hard link to each named block and to its checksum file in a directory of its own on the same
//! file system. The links keep the extents allocated while the host may read them, and make HDFS copy a block before
//! it changes it.
//!
//! Each further service has a module of its own:
//!
//! - [`relay`]: the mount in which a VM without shared memory reads the blocks of other VMs.
//! - [`pipe`]: files and connections whose bytes the host moves for this VM's programs.
//! - [`lane`]: a bond of the VM's own NIC and a virtual function (VF) of the host's NIC.
//! - [`turbo`]: the kernel's I/O on the vCPU that the host runs on a turbo core.
//!
//! [`blocks`] has the block ledger, [`agent`] the main loop, [`status`] the socket that `viola-agent status` asks.
//!
//! # Which changes the agent notices
//!
//! - Files created, renamed, deleted, or closed after writing: by fanotify, over the whole file system. After an
//!   overflow of the fanotify queue the agent scans and compares everything again.
//! - Defragmentation moves extents and leaves the time stamps. The agent recognises e4defrag and xfs_fsr by their
//!   temporary files and by the close of the file. An ioctl from a program that keeps the file open shows only in the
//!   comparison every `recheck_s` seconds. The reader's checksums catch the rest.
//! - A remount, an unmount, another mount over a data directory, or a resize: the agent reads the mount table every
//!   second.
//! - A frozen file system (FIFREEZE) sends no event. A freeze changes no extent. Software that freezes a file system
//!   to put an older state in place must call `viola-agent pause` before and `viola-agent resume` after, for example
//!   from a hook of the QEMU guest agent. The agent treats a file system as frozen when a link takes longer than ten
//!   seconds.
//! - A trim (FITRIM) discards free extents only; the extents of named blocks are allocated.
//! - Changes to the disk below the file system (offline resize, image restore) are for the host to notice.

pub mod agent;
pub mod blocks;
pub mod clock;
pub mod config;
pub mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod io;
pub mod lane;
pub mod pipe;
pub mod relay;
pub mod setup;
pub mod status;
pub mod turbo;
