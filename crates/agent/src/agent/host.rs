// SPDX-License-Identifier: Apache-2.0
//! Talking with the host.

use viola_proto::agent::{
    Bytes, FromAgent, FsId, LINE, Lease, MAX_LEASES, ToAgent, TooMuch, VERSION, Why, short,
};

use super::volume::Proof;
use super::{Agent, Millis};
use crate::core::block::After;
use crate::core::place::EntryId;
use crate::core::session::Step;
use crate::io::channel::Channel;
use crate::io::worker::{self, Job};

/// A channel that cannot be opened is tried again after so long.
const REOPEN: Millis = 2000;
/// Stats are sent so often.
const STATS: Millis = 5000;
/// A proof without an answer is sent again after so long.
const PROOF: Millis = 15_000;

impl Agent {
    /// Opens the channel, says hello, proves file systems, sends stats: whatever is due.
    pub(super) fn greet(&mut self, now: Millis) {
        if self.channel.is_none() && self.open_at <= now {
            match Channel::open(&self.address) {
                Ok(channel) => {
                    self.channel = Some(channel);
                    self.session.reset(now);
                }
                Err(e) => {
                    if self.open_at == 0 {
                        eprintln!("viola-agent: {}: {e}; trying again", self.address);
                    }
                    self.open_at = now + REOPEN;
                }
            }
        }
        if self.channel.is_none() || self.ends.is_some() {
            return;
        }
        let step = self.session.tick(now, self.fresh);
        self.step(now, step);
        if !self.session.open() {
            return;
        }
        let paused = self.paused;
        for volume in self.volumes.values_mut().filter(|v| !v.retiring) {
            match volume.proof {
                Proof::None if !paused && !volume.frozen => volume.prove(),
                Proof::Sent(at) if at + PROOF <= now => {
                    volume.not_proven("the host does not answer".into(), now);
                }
                Proof::Bad(_, until) if until <= now && !paused => volume.prove(),
                _ => {}
            }
        }
        if self.stats_at <= now {
            self.stats_at = now + STATS;
            let stats = self.stats();
            self.say(&FromAgent::Stats(stats));
        }
    }

    /// Reads what the host has said.
    pub(super) fn hear(&mut self, now: Millis) {
        if !self.ready.channel {
            return;
        }
        let Some(channel) = &mut self.channel else {
            return;
        };
        // once: there is more in the next round, and a host that never stops does not keep the agent from its file systems
        match self.reader.fill(channel) {
            Ok(Some(0)) | Err(_) => return self.hang_up(now),
            Ok(None) => return,
            Ok(Some(_)) => {}
        }
        while let Some(message) = self.reader.next::<ToAgent>() {
            match message {
                Ok(message) => self.take(now, &message),
                Err(e) => eprintln!("viola-agent: from the host: {e}"),
            }
        }
    }

    fn take(&mut self, now: Millis, message: &ToAgent) {
        let step = self.session.hear(now, message, self.fresh);
        self.step(now, step);
        // before its welcome the host speaks of sessions before
        if !self.session.open() {
            return;
        }
        match message {
            ToAgent::Named { lease } => self.ledger.host_named(now, *lease),
            ToAgent::Refused { lease, why } => {
                if let Some(volume) = self
                    .ledger
                    .of_lease(*lease)
                    .and_then(|id| self.volume_of(id))
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
                    && matches!(volume.proof, Proof::Sent(_))
                {
                    volume.proof = Proof::Good;
                    volume.failures = 0;
                    self.ledger.proven(*fs);
                }
            }
            ToAgent::ProofBad { fs, why } => {
                if let Some(volume) = self.volumes.get_mut(fs) {
                    volume.not_proven(format!("the host: {why}"), now);
                    self.ledger
                        .unproven(now, *fs, After::Again, Why::Filesystem);
                }
            }
            ToAgent::ProveAgain { fs } => {
                self.ledger
                    .unproven(now, *fs, After::Again, Why::Filesystem);
                if let Some(volume) = self.volumes.get_mut(fs) {
                    volume.prove();
                }
            }
            ToAgent::Hail { .. } | ToAgent::Welcome { .. } | ToAgent::Ping { .. } => {}
            ToAgent::Pipe(message) => self.hear_of_pipe(message.clone()),
        }
    }

    fn step(&mut self, now: Millis, step: Option<Step>) {
        match step {
            Some(Step::Hello(session)) => {
                self.fresh = random();
                self.ledger.close();
                self.say(&FromAgent::Hello {
                    version: VERSION,
                    agent_version: env!("CARGO_PKG_VERSION").into(),
                    boot_id: self.boot_id.clone(),
                    session,
                    window: self.channel.as_ref().map_or(LINE, Channel::window),
                });
            }
            Some(Step::Open(limits)) => {
                self.ledger.welcome(now, limits);
                for volume in self.volumes.values_mut() {
                    volume.proof = match volume.proof {
                        Proof::Writing => Proof::Writing,
                        _ => Proof::None,
                    };
                    volume.failures = 0;
                    // whatever a dead agent has named, the host has ended it before this welcome
                    volume.workers.give(Job::Earlier(true));
                }
                self.stats_at = now;
            }
            Some(Step::Pong(n)) => self.say(&FromAgent::Pong { n }),
            None => {}
        }
    }

    pub(super) fn send_proof(
        &mut self,
        now: Millis,
        fs: FsId,
        result: Result<worker::Proof, String>,
    ) {
        let open = self.session.open();
        let Some(volume) = self.volumes.get_mut(&fs) else {
            return;
        };
        match result {
            _ if !open || volume.proof != Proof::Writing => volume.proof = Proof::None,
            Err(why) => volume.not_proven(why, now),
            Ok(proof) => {
                volume.proof = Proof::Sent(now);
                let mount = short(volume.mount.point.display().to_string());
                let message = FromAgent::Proof {
                    fs,
                    mount,
                    kind: volume.mount.kind.clone(),
                    disk: proof.disk,
                    content: Bytes(proof.content),
                    map: proof.map,
                };
                self.say(&message);
            }
        }
    }

    pub(super) fn send_name(&mut self, now: Millis, id: EntryId, lease: Lease) {
        let Some((place, maps)) = self.ledger.named(id) else {
            return;
        };
        let message = FromAgent::Name {
            lease,
            fs: place.fs,
            key: place.key.clone(),
            data: maps.data.clone(),
            meta: maps.meta.clone(),
        };
        match self.writer.push(&message) {
            Ok(()) => {}
            // the host has never heard of it
            Err(TooMuch::Message(_)) => self.ledger.host_refused(now, lease),
            Err(TooMuch::Waiting(_)) => self.ledger.host_withdrew(now, lease),
        }
    }

    pub(super) fn send_withdrawals(&mut self, leases: &[Lease], why: Why) {
        for some in leases.chunks(MAX_LEASES) {
            let leases = some.to_vec();
            self.say(&FromAgent::Withdraw { leases, why });
        }
    }

    /// What does not fit now is said again by whoever waits for the answer.
    pub(super) fn say(&mut self, message: &FromAgent) {
        let _ = self.writer.push(message);
    }

    pub(super) fn flush(&mut self, now: Millis) {
        if let Some(channel) = &mut self.channel
            && self.writer.flush(channel).is_err()
        {
            self.hang_up(now);
        }
    }

    /// The channel is gone; the next one begins with a hello. Leases stay as they are until then.
    fn hang_up(&mut self, now: Millis) {
        self.channel = None;
        self.open_at = now + REOPEN;
        self.reader.clear();
        self.writer.clear();
        self.session.reset(now);
        self.ledger.close();
    }
}

/// A number that nobody guesses, for sessions and folders.
pub(crate) fn random() -> u64 {
    let mut bytes = [0; 8];
    let mut have = 0;
    while have < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[have..], rustix::rand::GetRandomFlags::empty()) {
            Ok(n) => have += n,
            Err(rustix::io::Errno::INTR) => {}
            // no kernel that has fanotify with names is without it
            Err(_) => return u64::from(std::process::id()) << 32 | worker::now(),
        }
    }
    u64::from_ne_bytes(bytes)
}
