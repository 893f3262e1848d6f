// SPDX-License-Identifier: Apache-2.0
//! The sched_ext scheduler in a kernel that has sched_ext: a QEMU VM is the host. In [`mechanism`] and [`turbo`] processes
//! stand for VMs, in [`daemon_turbo`] they stand for VMs of `viola run`, and in [`daemon`] it has real VMs (User Mode Linux).
//! The host is emulated: part of `make test-beds`. Its clock counts instructions, so that its measurements do not depend on
//! other load on this machine.
#![allow(clippy::unwrap_used)]

mod daemon;
mod daemon_turbo;
mod host;
mod mechanism;
mod turbo;
