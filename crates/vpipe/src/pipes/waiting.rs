// SPDX-License-Identifier: Apache-2.0
//! Held connections before and after a pipe: they wait for the VM.

use std::time::{Duration, Instant};

use viola_proto::pipe::Connection;

use super::PipeResources;
use crate::vm_netns::vm_socket;
use crate::{Flow, HostConnection};

/// Time for the VM to restore returned connections; then the host resets them.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for the VM to start the pipe of a held connection; then the host releases it.
const HOLD_TIMEOUT: Duration = Duration::from_secs(10);

/// A held connection before its pipe starts. The VM still has it.
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

    /// Extends the timeout by `time`, for which the VM was paused.
    pub(super) fn postpone(&mut self, time: Duration) {
        self.since += time;
    }
}

/// Connections of an ended pipe that the VM has not restored yet.
#[derive(Debug)]
pub(super) struct ReturnedConnections {
    since: Instant,
    connections: Vec<(Flow, Connection)>,
}

impl ReturnedConnections {
    pub(super) fn new(connections: Vec<(Flow, Connection)>, now: Instant) -> Self {
        Self {
            since: now,
            connections,
        }
    }

    pub(super) fn flows(&self) -> impl Iterator<Item = Flow> {
        self.connections.iter().map(|(flow, _)| *flow)
    }

    pub(super) fn is_late(&self, now: Instant) -> bool {
        now >= self.since + RESTORE_TIMEOUT
    }

    /// Extends the timeout, as [`HeldConnection::postpone`].
    pub(super) fn postpone(&mut self, time: Duration) {
        self.since += time;
    }

    /// Resets the connections. The host restores each one and closes it, so that the peers learn of it.
    pub(super) fn reset(self, resources: &mut PipeResources) {
        for (flow, connection) in self.connections {
            resources.hold_queue.discard(&flow);
            let state = viola_handover::from_wire(connection);
            let end = vm_socket(flow.guest.ip()).and_then(|socket| {
                HostConnection::restore(
                    &resources.flows,
                    resources.veth,
                    socket,
                    flow,
                    &state,
                    None,
                )
            });
            // if this fails, the peer notices by its own timeouts
            drop(end);
            let _ = resources.flows.release(&flow);
        }
    }
}

/// Releases a connection to the VM, with the held packets.
pub(super) fn release_to_vm(resources: &mut PipeResources, flow: &Flow) {
    // if this fails, the agent could do nothing about it either
    let _ = resources.hold_queue.release(&resources.flows, flow);
}
