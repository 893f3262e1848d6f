// SPDX-License-Identifier: Apache-2.0
//! Between the host and the pipes.

use viola_proto::agent::FromAgent;
use viola_proto::pipe::{End, FromGuest, ToGuest};

use super::volume::Proof;
use super::{Agent, Millis};
use crate::pipe::{Disk, Facts, Out, Pipes};

impl Agent {
    /// Tells the pipes what is known, and the host what it could not be told before.
    pub(super) fn keep_pipes(&mut self) {
        if self.pipes.is_none() {
            return;
        }
        if !self.session.open() {
            self.words.clear();
        }
        self.say_words();
        let facts = self.facts();
        if let Some(pipes) = &mut self.pipes {
            pipes.know(facts);
        }
        self.say_of_pipes();
    }

    /// The pipes' turn. Programs wait: what comes of it is said at once.
    pub(super) fn turn_pipes(&mut self, now: Millis) {
        if let Some(pipes) = &mut self.pipes {
            pipes.turn(std::mem::take(&mut self.woken));
            self.say_of_pipes();
            self.flush(now);
        }
    }

    /// Says what the pipes have to say.
    fn say_of_pipes(&mut self) {
        while let Some(out) = self.pipes.as_mut().and_then(Pipes::next_word) {
            self.say_of_pipe(out);
        }
    }

    fn say_words(&mut self) {
        while let Some(word) = self.words.pop_front() {
            if self.writer.push(&FromAgent::Pipe(word.clone())).is_err() {
                self.words.push_front(word);
                break;
            }
        }
    }

    fn facts(&self) -> Facts {
        let volumes = self.volumes.values().filter(|v| !v.retiring);
        Facts {
            epoch: self.session.epoch(),
            volumes: volumes
                .map(|v| {
                    let disk = Disk {
                        fs: v.fs,
                        point: v.mount.point.clone(),
                        is_good: v.proof == Proof::Good && !v.frozen,
                        uses: v.uses,
                    };
                    (v.mount.device.clone(), disk)
                })
                .collect(),
            halt: self.paused || self.ends.is_some(),
        }
    }

    /// What the host has said of a pipe.
    pub(super) fn hear_of_pipe(&mut self, message: ToGuest) {
        if let Some(pipes) = &mut self.pipes {
            pipes.hear(message);
        }
    }

    /// Says what a pipe has to say, if that is still of this session. What cannot be given now is never given; all else is
    /// said as soon as there is room.
    fn say_of_pipe(&mut self, out: Out) {
        let is_now = self.session.epoch() == Some(out.epoch);
        let FromGuest::Give {
            pipe, source, sink, ..
        } = &out.message
        else {
            if is_now {
                self.words.push_back(out.message);
            }
            return;
        };
        let pipe = *pipe;
        let good = [source, sink].into_iter().all(|end| match end {
            End::Connection { .. } => true,
            End::File { fs, .. } => {
                let volume = self.volumes.get(fs);
                volume.is_some_and(|v| v.proof == Proof::Good && !v.retiring)
            }
        });
        // a connection is given again only behind the word that it had come back
        self.say_words();
        let said = is_now
            && good
            && self.words.is_empty()
            && self.writer.push(&FromAgent::Pipe(out.message)).is_ok();
        if let Some(pipes) = self.pipes.as_mut().filter(|_| !said) {
            pipes.unsaid(pipe);
        }
    }

    /// Pipes that the host has.
    pub(super) fn reading(&self) -> u64 {
        self.pipes.as_ref().map_or(0, Pipes::reading)
    }

    /// Leases and pipes by which the host may still read or write.
    pub(super) fn outstanding(&self) -> u64 {
        self.ledger.outstanding() as u64 + self.reading()
    }
}
