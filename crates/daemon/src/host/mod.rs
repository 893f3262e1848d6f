// SPDX-License-Identifier: Apache-2.0
//! What the daemon needs of its host, whichever accelerator uses it.
//!
//! | file | does |
//! |---|---|
//! | `libvirt` | takes events of libvirt |
//! | `exits`, `process` | notices the end of VMs; kills processes |
//! | `affinity` | keeps the daemon off the cores of VMs |
//! | `launchers`, `registrations` | who may confirm a VM; notices what `viola register` does |
//! | `files` | directories and sockets of the daemon |
//! | `lock`, `users` | one daemon per run directory; numbers of users and groups |
//! | `check` | what `viola check` says of kernel, VMs and libvirt |

pub mod affinity;
pub mod check;
pub mod exits;
pub mod files;
pub mod launchers;
pub mod libvirt;
pub mod lock;
pub mod process;
pub mod registrations;
pub mod users;
