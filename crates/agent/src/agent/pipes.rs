// SPDX-License-Identifier: Apache-2.0
//! Connects the pipes with the host's channel.

use viola_proto::agent::FromAgent;
use viola_proto::pipe::{Endpoint, PipeReply, PipeRequest};

use super::volume::ProofState;
use super::{Agent, Millis};
use crate::pipe::{HostState, Outgoing, PipeVolume, Pipes};

impl Agent {
    /// Tells the pipes the state of the host, and sends what could not be sent before.
    pub(super) fn update_pipes(&mut self) {
        if self.pipes.is_none() {
            return;
        }
        if !self.session.is_open() {
            self.pipe_outbox.clear();
        }
        self.flush_pipe_outbox();
        let host_state = self.host_state();
        if let Some(pipes) = &mut self.pipes {
            pipes.set_host_state(host_state);
        }
        self.send_pipe_messages();
    }

    /// Runs the pipes, and sends their messages at once, since programs wait.
    pub(super) fn run_pipes(&mut self, now: Millis) {
        if let Some(pipes) = &mut self.pipes {
            pipes.run(std::mem::take(&mut self.wakeups));
            self.send_pipe_messages();
            self.flush(now);
        }
    }

    /// Sends the pipes' messages.
    fn send_pipe_messages(&mut self) {
        while let Some(out) = self.pipes.as_mut().and_then(Pipes::next_message) {
            self.send_pipe_message(out);
        }
    }

    fn flush_pipe_outbox(&mut self) {
        while let Some(message) = self.pipe_outbox.pop_front() {
            if self.writer.push(&FromAgent::Pipe(message.clone())).is_err() {
                self.pipe_outbox.push_front(message);
                break;
            }
        }
    }

    fn host_state(&self) -> HostState {
        let volumes = self.volumes.values().filter(|v| !v.retiring);
        HostState {
            epoch: self.session.epoch(),
            volumes: volumes
                .map(|v| {
                    let disk = PipeVolume {
                        fs: v.fs,
                        point: v.mount.point.clone(),
                        is_proven: v.proof == ProofState::Accepted && !v.frozen,
                        access: v.pipe_access,
                    };
                    (v.mount.device.clone(), disk)
                })
                .collect(),
            halt: self.paused || self.end_by.is_some(),
        }
    }

    /// Handles a message of the host about a pipe.
    pub(super) fn handle_pipe_message(&mut self, message: PipeReply) {
        if let Some(pipes) = &mut self.pipes {
            pipes.handle_message(message);
        }
    }

    /// Sends a message of a pipe if its session is still open. A hand-over that cannot be sent now is taken back;
    /// every other message waits in the outbox for room.
    fn send_pipe_message(&mut self, out: Outgoing) {
        let is_current = self.session.epoch() == Some(out.epoch);
        let PipeRequest::Start {
            pipe, source, sink, ..
        } = &out.message
        else {
            if is_current {
                self.pipe_outbox.push_back(out.message);
            }
            return;
        };
        let pipe = *pipe;
        let is_proven = [source, sink].into_iter().all(|end| match end {
            Endpoint::Connection { .. } => true,
            Endpoint::File { fs, .. } => {
                let volume = self.volumes.get(fs);
                volume.is_some_and(|v| v.proof == ProofState::Accepted && !v.retiring)
            }
        });
        // the host must hear that a connection was put back before it is given the connection again
        self.flush_pipe_outbox();
        let sent = is_current
            && is_proven
            && self.pipe_outbox.is_empty()
            && self.writer.push(&FromAgent::Pipe(out.message)).is_ok();
        if let Some(pipes) = self.pipes.as_mut().filter(|_| !sent) {
            pipes.message_not_sent(pipe);
        }
    }

    /// Number of pipes that the host works on.
    pub(super) fn active_pipes(&self) -> u64 {
        self.pipes.as_ref().map_or(0, Pipes::active)
    }

    /// Number of leases and pipes by which the host may still read or write.
    pub(super) fn outstanding(&self) -> u64 {
        self.ledger.outstanding() as u64 + self.active_pipes()
    }
}
