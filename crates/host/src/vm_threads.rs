// SPDX-License-Identifier: Apache-2.0
//! The threads of a VM, as a hypervisor's module reads them.

use crate::vm::{ServiceThread, Vcpu};

/// What may change while a VM runs.
pub(crate) struct VmThreads {
    pub(crate) vcpus: Vec<Vcpu>,
    pub(crate) service: Vec<ServiceThread>,
    /// What is missing, with the remedy.
    pub(crate) warning: Option<String>,
    /// Whether a query of the hypervisor has ended, so that disks and NICs may have changed too.
    pub(crate) queried: bool,
}
