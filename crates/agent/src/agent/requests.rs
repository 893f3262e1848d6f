// SPDX-License-Identifier: Apache-2.0
//! Answers `viola-agent status`, `pause` and `resume`.

use viola_proto::agent::{Stats, WithdrawReason};

use super::volume::Volume;
use super::{Agent, Millis, WITHDRAW_TIMEOUT};
use crate::blocks::block::Disposition;
use crate::lane::service::Lane;
use crate::pipe::Pipes;
use crate::relay::Relay;
use crate::status::{self, Command};
use crate::turbo::service::Turbo;

impl Agent {
    /// Answers status requests, and pauses that have waited for the last read.
    pub(super) fn answer_requests(&mut self, now: Millis) {
        while let Some(request) = self.requests.try_recv() {
            match request.command {
                Command::Status => {
                    // a program that learns of a disk here may ask for a pipe on it at once
                    self.update_pipes();
                    let _ = request.reply.send(self.status_report());
                }
                Command::Pause => {
                    self.pause(now, true);
                    self.pause_waiters.push((request, now + WITHDRAW_TIMEOUT));
                }
                Command::Resume => {
                    self.pause(now, false);
                    let _ = request.reply.send(self.status_report());
                }
            }
        }
        let none = self.outstanding() == 0;
        let (done, pause_waiters): (Vec<_>, Vec<_>) = std::mem::take(&mut self.pause_waiters)
            .into_iter()
            .partition(|(_, until)| none || *until <= now);
        self.pause_waiters = pause_waiters;
        for (request, _) in done {
            let _ = request.reply.send(self.status_report());
        }
    }

    pub(super) fn pause(&mut self, now: Millis, paused: bool) {
        self.paused = paused;
        self.ledger.pause(self.is_paused());
        if paused {
            for fs in self.volumes.keys().copied().collect::<Vec<_>>() {
                self.withdraw_all(now, fs, Disposition::Remap, WithdrawReason::Filesystem);
            }
        }
    }

    /// The status report.
    pub(super) fn status_report(&self) -> status::Report {
        status::Report {
            version: env!("CARGO_PKG_VERSION").into(),
            host: match &self.channel {
                Some(_) => self.session.describe(),
                None => format!("{} cannot be opened", self.address),
            },
            paused: self.paused,
            closed: self.why_closed(),
            outstanding: self.outstanding(),
            stats: self.stats(),
            volumes: self.volumes.values().map(Volume::report).collect(),
            missing: self.unusable.clone(),
            mount: self.relay.as_ref().map(Relay::report),
            pipe: self.pipes.as_ref().map(Pipes::report),
            turbo: self.turbo.as_ref().map(Turbo::report),
            lane: self.lane.as_ref().map(Lane::report),
        }
    }

    /// The ledger's counts, and why nothing is named.
    pub(super) fn stats(&self) -> Stats {
        Stats {
            why: self.why_closed(),
            ..self.ledger.stats()
        }
    }
}
