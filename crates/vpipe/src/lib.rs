// SPDX-License-Identifier: Apache-2.0
//! The host side of vpipe: a VM's connections are steered to sockets of the host, which move bytes in the VM's place.
//!
//! [`Steering`] decides, packet by packet at a VM's tap, who has a connection: the VM, nobody, or a socket in the VM's
//! [`Space`] on the host, the [`HostEnd`] of the connection. [`moving`] moves the bytes. [`Gate`] keeps those
//! sockets silent while the VM stands still. [`Park`] keeps what the
//! peer says while nobody has the connection. [`work`] does all that an agent asks for, on a thread. Mechanism: `bpf/pipe.bpf.c`; paper 003
//! (vPipe), section 4, for what it replaces.

mod end;
mod flows;
mod gate;
pub mod moving;
mod park;
mod space;
mod steer;
pub mod work;

pub use end::HostEnd;
pub use flows::{Counts, Flow, Flows};
pub use gate::Gate;
pub use park::Park;
pub use space::Space;
pub use steer::{Attached, Steering};

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
    Families,
}

impl Error {
    fn kernel(step: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let step = step.into();
        move |source| Self::Kernel { step, source }
    }
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
