// SPDX-License-Identifier: Apache-2.0
//! The sched_ext scheduler in a kernel that has sched_ext: a QEMU guest is the host. In [`mechanism`] and [`turbo`] processes
//! in it stand for VMs, in [`daemon_turbo`] for those of `viola run`, which has real guests (User Mode Linux) in [`daemon`].
//! It is emulated: part of `make test-beds`. Its time is counted in instructions, so that what it measures of itself does not
//! depend on what else runs here.
#![allow(clippy::unwrap_used)]

mod daemon;
mod daemon_turbo;
mod host;
mod mechanism;
mod turbo;
