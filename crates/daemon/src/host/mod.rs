// SPDX-License-Identifier: Apache-2.0
//! What the daemon asks of its host.

pub mod affinity;
pub mod check;
pub mod exits;
pub mod libvirt;
pub mod lock;
pub mod users;
