// SPDX-License-Identifier: Apache-2.0
//! The host side of vpipe: sockets of the host take over a VM's connections and move bytes for the VM.
//!
//! | type or module | what it is |
//! |---|---|
//! | [`Steering`] | the BPF programs at the VM's tap (`bpf/pipe.bpf.c`): they decide, packet by packet, who has a connection |
//! | [`FlowTable`] | the map of these programs: a connection is the VM's, held, or redirected to the host |
//! | [`VmNetns`] | the network namespace for the host's sockets, which have the VM's addresses |
//! | [`HoldQueue`] | the packets of peers while their connection is held |
//! | [`EgressGate`] | keeps the host's sockets silent while the VM is paused |
//! | [`HostConnection`] | a connection that the host has |
//! | [`transfer`] | moves bytes between files and sockets |
//! | [`pipes`] | the threads that serve the requests of a VM's agent |
//!
//! Paper 003 (vPipe), section 4, describes the mechanism that this replaces.

mod flow_table;
mod gate;
mod hold_queue;
mod host_connection;
pub mod pipes;
mod steering;
pub mod transfer;
mod vm_netns;

pub use flow_table::{Flow, FlowCounts, FlowTable};
pub use gate::EgressGate;
pub use hold_queue::HoldQueue;
pub use host_connection::HostConnection;
pub use steering::{AttachedPrograms, STEERING_LINKS, Steering};
pub use vm_netns::VmNetns;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// libbpf or the kernel refused the program or one of its maps.
    #[error("{step}: {source}")]
    Bpf {
        /// The step that failed.
        step: &'static str,
        /// The error of libbpf.
        source: libbpf_rs::Error,
    },
    /// A connection cannot be extracted or restored.
    #[error("{0}")]
    Connection(#[source] viola_handover::Error),
    /// The kernel refused another step.
    #[error("{step}: {source}")]
    Kernel {
        /// The step that failed.
        step: String,
        /// The error of the kernel.
        source: std::io::Error,
    },
    /// The ends of a connection are not of one address family.
    #[error("the ends of a connection are of different address families")]
    MixedAddressFamilies,
}

impl Error {
    fn kernel(step: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let step = step.into();
        move |source| Self::Kernel { step, source }
    }
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
