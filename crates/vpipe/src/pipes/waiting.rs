// SPDX-License-Identifier: Apache-2.0
//! Connections that neither the VM nor the host has just now.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use viola_netdev::tcp_socket;
use viola_proto::pipe::Connection;

use super::PipeResources;
use crate::{Error, Flow, HostConnection, Result};

/// The VM has so long to take a connection back.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(30);
/// The VM has so long to give a connection that is held for it.
const HOLD_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection that is held until it is given: the VM still has it.
#[derive(Debug)]
pub(super) struct HeldConnection {
    pub(super) flow: Flow,
    since: Instant,
}

impl HeldConnection {
    pub(super) fn new(flow: Flow, now: Instant) -> Self {
        Self { flow, since: now }
    }

    pub(super) fn is_late(&self, now: Instant) -> bool {
        now >= self.since + HOLD_TIMEOUT
    }

    /// For so long the VM could not do anything.
    pub(super) fn postpone(&mut self, time: Duration) {
        self.since += time;
    }
}

/// Connections of a pipe that the VM has not taken back yet.
#[derive(Debug)]
pub(super) struct ReturnedConnections {
    since: Instant,
    ends: Vec<(Flow, Connection)>,
}

impl ReturnedConnections {
    pub(super) fn new(ends: Vec<(Flow, Connection)>, now: Instant) -> Self {
        Self { since: now, ends }
    }

    pub(super) fn flows(&self) -> impl Iterator<Item = Flow> {
        self.ends.iter().map(|(flow, _)| *flow)
    }

    pub(super) fn is_late(&self, now: Instant) -> bool {
        now >= self.since + RESTORE_TIMEOUT
    }

    /// As with [`HeldConnection::postpone`].
    pub(super) fn postpone(&mut self, time: Duration) {
        self.since += time;
    }

    /// Resets them: nobody will ever take them back, and the peers are not to wait for that.
    pub(super) fn reset(self, resources: &mut PipeResources) {
        for (flow, connection) in self.ends {
            resources.hold_queue.discard(&flow);
            let state = viola_handover::from_wire(connection);
            let end = socket_for(&flow).and_then(|socket| {
                HostConnection::restore(
                    &resources.flows,
                    resources.veth,
                    socket,
                    flow,
                    &state,
                    None,
                )
            });
            // when it fails, the peer finds out by itself
            drop(end);
            let _ = resources.flows.release(&flow);
        }
    }
}

/// Lets a connection go on at the VM, which gets what was kept for it.
pub(super) fn release_to_vm(resources: &mut PipeResources, flow: &Flow) {
    // a connection that is held for ever helps nobody, and the agent cannot do anything about it
    let _ = resources.hold_queue.release(&resources.flows, flow);
}

/// In the calling thread's network namespace.
pub(super) fn socket_for(flow: &Flow) -> Result<OwnedFd> {
    tcp_socket(flow.guest.ip()).map_err(Error::kernel("making a socket"))
}
