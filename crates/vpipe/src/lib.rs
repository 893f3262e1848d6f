// SPDX-License-Identifier: Apache-2.0
//! The host side of vpipe: a VM's connections are steered to sockets of the host, which move bytes in the VM's place.
//!
//! [`Steering`] decides, packet by packet at a VM's tap, who has a connection: the VM, nobody, or a socket in the VM's
//! [`VmNetns`] on the host, the [`HostConnection`] of the connection. [`transfer`] moves the bytes. [`EgressGate`] keeps those
//! sockets silent while the VM stands still. [`HoldQueue`] keeps what the
//! peer says while nobody has the connection. [`pipes`] does all that an agent asks for, on a thread. Mechanism: `bpf/pipe.bpf.c`; paper 003
//! (vPipe), section 4, for what it replaces.

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
pub use steering::{AttachedPrograms, Steering};
pub use vm_netns::VmNetns;

/// Why something cannot be steered.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// libbpf or the kernel refused the program or one of its maps.
    #[error("{step}: {source}")]
    Bpf {
        /// What was tried.
        step: &'static str,
        /// What libbpf says.
        source: libbpf_rs::Error,
    },
    /// A connection cannot be handed over.
    #[error("{0}")]
    Connection(#[source] viola_handover::Error),
    /// The kernel refused something else.
    #[error("{step}: {source}")]
    Kernel {
        /// What was tried.
        step: String,
        /// What the kernel says.
        source: std::io::Error,
    },
    /// Both ends of a connection are of one family.
    #[error("the ends of a connection are of different families")]
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
