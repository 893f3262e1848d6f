// SPDX-License-Identifier: Apache-2.0
//! The sched_ext scheduler in a kernel that has sched_ext: a QEMU guest is the host. In [`mechanism`] processes in it stand
//! for VMs; in [`daemon`] it has real guests (User Mode Linux) and `viola run`. It is emulated: part of `make test-beds`. Its
//! time is counted in instructions, so that what it measures of itself does not depend on what else runs here.
#![allow(clippy::unwrap_used)]

mod daemon;
mod host;
mod mechanism;
