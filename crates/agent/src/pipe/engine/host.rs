// SPDX-License-Identifier: Apache-2.0
//! Messages of the host.

use viola_proto::pipe::{PipeId, PipeReply};

use super::Pipes;
use super::entry::{Sink, Source};
use crate::pipe::life::{Event, Sides};
use crate::pipe::reason::Reason;

impl Pipes {
    /// Handles a message of the host.
    pub fn handle_message(&mut self, message: PipeReply) {
        match message {
            PipeReply::Refused { pipe, why } => {
                self.counters.set_last_detail(format!("the host: {why}"));
                self.apply(pipe, Event::Refused, Reason::RefusedByHost);
            }
            PipeReply::Held { pipe } => {
                self.apply(pipe, Event::Held, Reason::RefusedByHost);
                self.start_drain(pipe);
            }
            PipeReply::Progress { pipe, sent } => {
                let sent = self.clamp_sent(pipe, sent);
                self.apply(pipe, Event::Progress(sent), Reason::RefusedByHost);
            }
            PipeReply::Unread {
                pipe,
                source,
                bytes,
            } => {
                let side = Sides {
                    source,
                    sink: !source,
                };
                if let Some(pipe) = self.pipes.get_mut(&pipe) {
                    let ends = pipe.socket_ends(side);
                    ends.for_each(|end| end.unread.extend_from_slice(&bytes.0));
                }
            }
            PipeReply::Finished {
                pipe,
                source,
                sink,
                sent,
                errno,
                host_us,
            } => {
                let sent = self.clamp_sent(pipe, sent);
                let returned = Sides {
                    source: source.is_some(),
                    sink: sink.is_some(),
                };
                if let Some(pipe) = self.pipes.get_mut(&pipe) {
                    pipe.host_us = host_us;
                    if let Source::Socket(end) = &mut pipe.source {
                        end.returned = source;
                    }
                    if let Sink::Socket(end) = &mut pipe.sink {
                        end.returned = sink;
                    }
                }
                let event = Event::Returned {
                    returned,
                    sent,
                    errno,
                };
                self.apply(pipe, event, Reason::RefusedByHost);
            }
        }
    }

    fn clamp_sent(&self, pipe: PipeId, sent: u64) -> u64 {
        self.pipes
            .get(&pipe)
            .map_or(0, |p| sent.min(p.length - p.moved))
    }
}
