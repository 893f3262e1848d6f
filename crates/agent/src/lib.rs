// SPDX-License-Identifier: Apache-2.0
//! The agent in a guest: names finished HDFS blocks to the host, and withdraws them before they change.
//!
//! It holds a hard link to each named block and its checksum file in a folder of its own on the same file
//! system, so that their extents stay allocated while the host may read them, and HDFS itself copies a
//! linked block before it changes it. [`core`] decides, without a clock or a file; [`io`] touches the
//! system; [`agent`] joins them.
//!
//! In a VM that reads blocks without shared memory it keeps the mount that they appear in: [`relay`];
//! [`reading`] is an agent that does nothing else.
//!
//! Bytes that the host moves for this VM's programs, from files and connections to others: [`pipe`].
//!
//! A virtual function of the host's NIC that comes and goes: [`lane`].
//!
//! A vCPU of this VM that the host runs on a turbo core, and the kernel's I/O on it: [`turbo`].
//!
//! # What is noticed, and what is not
//!
//! - Creation, renaming and deletion of blocks, and files closed after writing: by fanotify, over the whole
//!   file system; after an overflow of its queue everything is read and compared again.
//! - Defragmentation moves extents without a time stamp: e4defrag and xfs_fsr are noticed by their helper
//!   files and by closing the file; other ways (an ioctl by a program that keeps the file open) only by the
//!   comparison every `recheck_s` seconds. The reader's checksums have the last word.
//! - A remount, an unmount or another mount over a data directory, and another size of the file system: by
//!   a look at the mounts every second.
//! - A frozen file system (FIFREEZE) cannot be seen: no event and no file says so. It changes no extent
//!   either. What freezes in order to put an older state in place must call `viola-agent pause` before and
//!   `viola-agent resume` after (as a hook of the QEMU guest agent). If a link cannot be made or removed
//!   for ten seconds, the file system is taken for frozen.
//! - A trim (FITRIM) gives only free extents to the disk; those of named blocks are never free.
//! - What is done to the disk past the file system (an offline resize, a restore of an image) can only be
//!   known by the host.

pub mod agent;
pub mod config;
pub mod core;
pub mod io;
pub mod lane;
pub mod pipe;
pub mod reading;
pub mod relay;
pub mod turbo;
