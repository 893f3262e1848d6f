// SPDX-License-Identifier: Apache-2.0
//! The setup message: the first message to a worker, on the socket that is its standard input.

use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Control, ControlError, Limits, Received, Secret};

/// The worker's role and parameters. The descriptors come in the order named here; the first is always the listening
/// socket for orders.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "begin", rename_all = "lowercase")]
pub enum WorkerSetup {
    /// An agent worker. Descriptors: the VM's table, writable; for vpipe the VM's network namespace, the maps of its
    /// connections and of its gate, the hold queue's packet socket and five links.
    Agent {
        /// Identity of the VM.
        vm: String,
        /// Limits for its agent.
        limits: Limits,
        /// vpipe's devices; `None` without vpipe.
        pipes: Option<PipeSetup>,
        /// User and group ID to switch to; `None` keeps the current ones.
        user: Option<(u32, u32)>,
    },
    /// A reader worker. Descriptors: the listening socket for the hypervisor, the worker's hazard cells.
    Reader {
        /// Name of the VM in the configuration.
        vm: String,
        /// ID of the user in the VM who owns the files.
        uid: u32,
        /// As for an agent worker.
        user: Option<(u32, u32)>,
    },
    /// The peer worker. Descriptors: its hazard cells, `listeners` listening TCP sockets.
    Peer {
        /// Name of this host, for the journal.
        host: String,
        /// This host's certificate, PEM.
        certificate: String,
        /// Its private key, PEM.
        key: Secret,
        /// Number of listening sockets.
        listeners: usize,
        /// TCP ports to which the worker may connect.
        ports: Vec<u16>,
        /// As for an agent worker.
        user: Option<(u32, u32)>,
    },
}

/// The devices of a VM's vpipe sockets on the host, and its limits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PipeSetup {
    /// Interface index of the VM's tap.
    pub tap: u32,
    /// Interface index of the veth to the sockets.
    pub veth: u32,
    /// Interface index of the veth for held packets.
    pub hold_veth: u32,
    /// The VM's connections must have one of these addresses; empty for any.
    pub addresses: Vec<IpAddr>,
    /// Maximum number of pipes at a time.
    pub max_pipes: usize,
    /// Maximum bytes per second of all pipes together; `None` for no limit.
    #[serde(default)]
    pub rate: Option<u64>,
    /// What limits the rate at which the VM receives; `None` for no limit. With a limit the worker takes no connection as a source.
    #[serde(default)]
    pub receive_limit: Option<String>,
}

/// Number of descriptors for [`PipeSetup`].
const PIPE_DESCRIPTORS: usize = 9;

/// Time limit for sending and for receiving the setup message.
const SETUP_TIMEOUT: Duration = Duration::from_secs(10);

impl Control {
    /// Sends the setup message to a worker. There is no answer.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn send_setup(
        &self,
        setup: &WorkerSetup,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ControlError> {
        self.send_message(setup, fds, SETUP_TIMEOUT)
    }

    /// Waits for the setup message.
    ///
    /// # Errors
    /// [`ControlError`], also when the number of descriptors is wrong.
    pub fn receive_setup(&self) -> Result<(WorkerSetup, Vec<OwnedFd>), ControlError> {
        let Received { message, fds } = self.receive_within::<WorkerSetup>(SETUP_TIMEOUT)?;
        let wanted = match message {
            WorkerSetup::Agent { pipes: None, .. } => 2,
            WorkerSetup::Agent { pipes: Some(_), .. } => 2 + PIPE_DESCRIPTORS,
            WorkerSetup::Reader { .. } => 3,
            WorkerSetup::Peer { listeners, .. } => listeners.saturating_add(2),
        };
        if fds.len() != wanted {
            return Err(ControlError::Garbage(format!(
                "{} descriptors came, expected {wanted}",
                fds.len()
            )));
        }
        Ok((message, fds))
    }
}
