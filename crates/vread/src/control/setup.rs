// SPDX-License-Identifier: Apache-2.0
//! What a worker is told before anything else, on the socket that is its standard input.

use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Control, ControlError, Limits, Received, Secret};

/// What to be. Descriptors come with it in the order named here; the first is always the listening socket for orders.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "begin", rename_all = "lowercase")]
pub enum WorkerSetup {
    /// The worker of a VM with an agent. Then: the VM's table, to be written; and what sends its files, where that is wanted: the
    /// network namespace for it, the maps of its connections and of its gate, two packet sockets, four links.
    Agent {
        /// Identity of the VM.
        vm: String,
        /// Bounds for its agent.
        limits: Limits,
        /// Where its files are to be sent from, if at all.
        pipes: Option<PipeSetup>,
        /// Numbers of the user and group to become; none to stay who it is.
        user: Option<(u32, u32)>,
    },
    /// The worker of a reading VM. Then: the listening socket for its hypervisor, its hazards.
    Reader {
        /// Name of the VM in the configuration.
        vm: String,
        /// Name by which the VM mounts the device.
        tag: String,
        /// Queues for requests.
        queues: usize,
        /// Threads that wait for disks.
        waiters: usize,
        /// How long a queue's thread looks for further requests before it sleeps, microseconds.
        poll_us: u64,
        /// User in the VM to whom the files belong.
        uid: u32,
        /// As above.
        user: Option<(u32, u32)>,
    },
    /// The worker for other hosts. Then: its hazards, `listeners` listening TCP sockets.
    Peer {
        /// Name of this host, for the journal.
        host: String,
        /// Certificate of this host, PEM.
        certificate: String,
        /// Its private key, PEM.
        key: Secret,
        /// Sockets on which other hosts are awaited.
        listeners: usize,
        /// TCP ports to which it may connect.
        ports: Vec<u16>,
        /// As above.
        user: Option<(u32, u32)>,
    },
}

/// The devices around a VM's sockets on the host, and what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PipeSetup {
    /// Interface index of the VM's tap.
    pub tap: u32,
    /// Of the veth to the sockets.
    pub veth: u32,
    /// Of the veth for held packets.
    pub parked: u32,
    /// The VM's own addresses.
    pub addresses: Vec<IpAddr>,
    /// Most pipes at a time.
    pub most: usize,
    /// Most bytes a second for all of them together.
    #[serde(default)]
    pub rate: Option<u64>,
}

/// Descriptors that go with [`PipeSetup`].
const PIPE_DESCRIPTORS: usize = 9;

/// How long a worker waits for it.
const SETUP_TIMEOUT: Duration = Duration::from_secs(10);

impl Control {
    /// Tells a worker what it is to be. There is no answer; orders are answered.
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

    /// Waits to be told.
    ///
    /// # Errors
    /// [`ControlError`], also when descriptors are missing.
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
                "{} descriptors instead of {wanted}",
                fds.len()
            )));
        }
        Ok((message, fds))
    }
}
