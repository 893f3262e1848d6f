// SPDX-License-Identifier: Apache-2.0
//! Messages to and from the host.

use viola_proto::agent::{
    Challenge, FromAgent, FsId, Lease, MAX_LEASES, SERIAL_LINE_BYTES, SendError, ToAgent, VERSION,
    WithdrawReason, truncate_text,
};

use super::session::Step;
use super::volume::{ProofState, WrittenProof};
use super::{Agent, Millis};
use crate::blocks::block::Disposition;
use crate::blocks::types::EntryId;
use crate::blocks::worker::{self, Job};
use crate::io::channel::Channel;
use crate::io::random::random;

/// Between two attempts to open the channel.
const RECONNECT_INTERVAL: Millis = 2000;
/// Between two stats messages.
const STATS_INTERVAL: Millis = 5000;
/// Time limit for the host's answer to a proof.
const PROOF_TIMEOUT: Millis = 15_000;

impl Agent {
    /// Opens the channel, sends hello, proves file systems, and sends stats, each when due.
    pub(super) fn drive_session(&mut self, now: Millis) {
        if self.channel.is_none() && self.reconnect_at <= now {
            match Channel::open(&self.address) {
                Ok(channel) => {
                    self.channel = Some(channel);
                    self.session.reset(now);
                }
                Err(e) => {
                    if self.reconnect_at == 0 {
                        eprintln!(
                            "viola-agent: host: cannot open {}: {e}; trying again",
                            self.address
                        );
                    }
                    self.reconnect_at = now + RECONNECT_INTERVAL;
                }
            }
        }
        if self.channel.is_none() || self.end_by.is_some() {
            return;
        }
        let step = self.session.tick(now, self.next_session);
        self.apply_step(now, step);
        let Some(challenge) = self.session.challenge() else {
            return;
        };
        let paused = self.paused;
        for volume in self.volumes.values_mut().filter(|v| !v.retiring) {
            match volume.proof {
                ProofState::Unproven if !paused && !volume.frozen => volume.prove(challenge),
                ProofState::Sent(at) if at + PROOF_TIMEOUT <= now => {
                    volume.proof_failed("the host does not answer".into(), now);
                }
                ProofState::Failed(_, until) if until <= now && !paused => volume.prove(challenge),
                _ => {}
            }
        }
        if self.next_stats <= now {
            self.next_stats = now + STATS_INTERVAL;
            let stats = self.stats();
            self.send(&FromAgent::Stats(stats));
        }
    }

    /// Reads and handles messages of the host.
    pub(super) fn read_host(&mut self, now: Millis) {
        if !self.ready.channel {
            return;
        }
        let Some(channel) = &mut self.channel else {
            return;
        };
        // reads once: a host that sends without end must not keep the agent from its file systems
        match self.reader.fill(channel) {
            Ok(Some(0)) | Err(_) => return self.disconnect(now),
            Ok(None) => return,
            Ok(Some(_)) => {}
        }
        while let Some(message) = self.reader.next::<ToAgent>() {
            match message {
                Ok(message) => self.handle_message(now, &message),
                Err(e) => eprintln!("viola-agent: host: malformed message: {e}"),
            }
        }
    }

    fn handle_message(&mut self, now: Millis, message: &ToAgent) {
        let step = self.session.handle(now, message, self.next_session);
        self.apply_step(now, step);
        // before its welcome the host's messages are about earlier sessions
        let Some(challenge) = self.session.challenge() else {
            return;
        };
        match message {
            ToAgent::Named { lease } => self.ledger.host_named(now, *lease),
            ToAgent::Refused { lease, why } => {
                if let Some(volume) = self
                    .ledger
                    .entry_of_lease(*lease)
                    .and_then(|id| self.volume_of_entry(id))
                {
                    volume.refusal = Some(format!("the host: {why}"));
                }
                self.ledger.host_refused(now, *lease);
            }
            ToAgent::Withdrawn { leases } => {
                for lease in leases {
                    self.ledger.host_withdrew(now, *lease);
                }
            }
            ToAgent::ProofOk { fs } => {
                if let Some(volume) = self.volumes.get_mut(fs)
                    && matches!(volume.proof, ProofState::Sent(_))
                {
                    volume.proof = ProofState::Accepted;
                    volume.failures = 0;
                    self.ledger.fs_proven(*fs);
                }
            }
            ToAgent::ProofBad { fs, why } => {
                if let Some(volume) = self.volumes.get_mut(fs) {
                    volume.proof_failed(format!("the host: {why}"), now);
                    self.ledger.fs_unproven(
                        now,
                        *fs,
                        Disposition::Remap,
                        WithdrawReason::Filesystem,
                    );
                }
            }
            ToAgent::ProveAgain { fs } => {
                self.ledger
                    .fs_unproven(now, *fs, Disposition::Remap, WithdrawReason::Filesystem);
                if let Some(volume) = self.volumes.get_mut(fs) {
                    volume.prove(challenge);
                }
            }
            ToAgent::HelloRequest { .. } | ToAgent::Welcome { .. } | ToAgent::Ping { .. } => {}
            ToAgent::Pipe(message) => self.handle_pipe_message(message.clone()),
        }
    }

    fn apply_step(&mut self, now: Millis, step: Option<Step>) {
        match step {
            Some(Step::Hello(session)) => {
                self.next_session = random();
                self.ledger.session_closed();
                self.send(&FromAgent::Hello {
                    version: VERSION,
                    agent_version: env!("CARGO_PKG_VERSION").into(),
                    boot_id: self.boot_id.clone(),
                    session,
                    window: self
                        .channel
                        .as_ref()
                        .map_or(SERIAL_LINE_BYTES, Channel::window),
                });
            }
            Some(Step::Open(limits)) => {
                self.ledger.session_opened(now, limits);
                for volume in self.volumes.values_mut() {
                    // a proof that is being written belongs to an earlier session: another one follows it
                    if !matches!(volume.proof, ProofState::Writing(_)) {
                        volume.proof = ProofState::Unproven;
                    }
                    volume.failures = 0;
                    // the host ended every lease of earlier agents before this welcome
                    volume.workers.send(Job::EarlierLinks(true));
                }
                self.next_stats = now;
            }
            Some(Step::Pong(n)) => self.send(&FromAgent::Pong { n }),
            None => {}
        }
    }

    pub(super) fn send_proof(
        &mut self,
        now: Millis,
        fs: FsId,
        challenge: Challenge,
        result: Result<worker::Proof, String>,
    ) {
        let current = self.session.challenge();
        let Some(volume) = self.volumes.get_mut(&fs) else {
            return;
        };
        match volume.proof.written(challenge, current) {
            WrittenProof::Send => {}
            WrittenProof::Repeat => {
                volume.proof = ProofState::Unproven;
                return;
            }
            WrittenProof::Ignore => return,
        }
        match result {
            Err(why) => volume.proof_failed(why, now),
            Ok(proof) => {
                volume.proof = ProofState::Sent(now);
                let mount = truncate_text(volume.mount.point.display().to_string());
                let message = FromAgent::Proof {
                    fs,
                    mount,
                    kind: volume.mount.kind.clone(),
                    disk: proof.disk,
                    map: proof.map,
                };
                self.send(&message);
            }
        }
    }

    pub(super) fn send_name(&mut self, now: Millis, id: EntryId, lease: Lease) {
        let Some((location, maps)) = self.ledger.name_message_parts(id) else {
            return;
        };
        let message = FromAgent::Name {
            lease,
            fs: location.fs,
            key: location.key.clone(),
            data: maps.data.clone(),
            meta: maps.meta.clone(),
        };
        match self.writer.push(&message) {
            Ok(()) => {}
            // the host has never seen this lease
            Err(SendError::TooLong(_)) => self.ledger.host_refused(now, lease),
            Err(SendError::QueueFull(_)) => self.ledger.host_withdrew(now, lease),
        }
    }

    pub(super) fn send_withdrawals(&mut self, leases: &[Lease], why: WithdrawReason) {
        for chunk in leases.chunks(MAX_LEASES) {
            let leases = chunk.to_vec();
            self.send(&FromAgent::Withdraw { leases, why });
        }
    }

    /// Queues a message. A message that does not fit is dropped; the caller sends it again when no answer comes.
    pub(super) fn send(&mut self, message: &FromAgent) {
        let _ = self.writer.push(message);
    }

    pub(super) fn flush(&mut self, now: Millis) {
        if let Some(channel) = &mut self.channel
            && self.writer.flush(channel).is_err()
        {
            self.disconnect(now);
        }
    }

    /// Closes the channel. Leases stay as they are until the next welcome.
    fn disconnect(&mut self, now: Millis) {
        self.channel = None;
        self.reconnect_at = now + RECONNECT_INTERVAL;
        self.reader.clear();
        self.writer.clear();
        self.session.reset(now);
        self.ledger.session_closed();
    }
}
