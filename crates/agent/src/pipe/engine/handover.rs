// SPDX-License-Identifier: Apache-2.0
//! Extracts connections from their sockets, and hands a pipe over to the host.

use viola_proto::agent::FileMap;
use viola_proto::pipe::{Endpoint, PipeId, PipeRequest};

use super::Pipes;
use super::entry::{Sink, Source};
use crate::pipe::life::Event;
use crate::pipe::reason::Reason;

impl Pipes {
    /// Hands over a pipe whose ends are ready.
    pub(super) fn hand_over(&mut self, pipe: PipeId) {
        match self.extract(pipe) {
            Ok(Some(message)) => {
                self.apply(pipe, Event::HandedOver, Reason::RefusedByHost);
                self.send(message);
            }
            Ok(None) => {}
            Err(reason) => self.apply(pipe, Event::Failed(reason.errno()), reason),
        }
    }

    /// Extracts the connections and builds the message; `None` when the pipe may not be handed over
    /// now. On an error they are back in their sockets.
    pub(super) fn extract(&mut self, id: PipeId) -> Result<Option<PipeRequest>, Reason> {
        let Some(pipe) = self.pipes.get(&id).filter(|p| p.life.can_hand_over()) else {
            return Ok(None);
        };
        if self.host_state.epoch.is_none() {
            return Err(Reason::NoSession);
        }
        let reads = match &pipe.source {
            Source::File { device, .. } => Some(self.proven(device, |access| access.read)?.fs),
            Source::Socket(_) => None,
        };
        let writes = match &pipe.sink {
            Sink::File { device, .. } => Some(self.proven(device, |access| access.write)?.fs),
            Sink::Socket(_) => None,
        };
        let pipe = self.pipes.get_mut(&id).ok_or(Reason::SystemError)?;
        let length = pipe.length - pipe.moved;
        // steps that leave no trace when they fail come first, and the source comes last: it must
        // continue when the sink fails
        let source_hop = match &pipe.source {
            Source::Socket(end) => {
                let (local, peer) = end.stream.ends()?;
                self.next_hops.get(local, peer)?
            }
            Source::File { .. } => [0; 6],
        };
        let sink = match &mut pipe.sink {
            Sink::Socket(end) => {
                let hop = |(local, peer)| self.next_hops.get(local, peer);
                let (connection, next_hop) = end.stream.extract(hop)?;
                Endpoint::Connection {
                    connection: Box::new(connection),
                    next_hop,
                }
            }
            Sink::File { target, .. } => Endpoint::File {
                fs: writes.ok_or(Reason::SystemError)?,
                map: target.map.clone().ok_or(Reason::SystemError)?,
                offset: target.offset + pipe.moved,
            },
        };
        let source = match &mut pipe.source {
            Source::Socket(end) => {
                let taken = end.stream.extract(|_| Ok(source_hop));
                taken.map(|(connection, next_hop)| Endpoint::Connection {
                    connection: Box::new(connection),
                    next_hop,
                })
            }
            Source::File { key, offset, .. } => {
                let whole = self.leases.get(*key).and_then(|leased| leased.map.as_ref());
                match (whole, reads) {
                    (Some(whole), Some(fs)) => Ok(Endpoint::File {
                        fs,
                        map: part(whole, *offset, *offset + length),
                        offset: *offset,
                    }),
                    _ => Err(Reason::SystemError),
                }
            }
        };
        match source {
            Ok(source) => Ok(Some(PipeRequest::Start {
                pipe: id,
                source,
                sink,
                length,
            })),
            Err(reason) => {
                if let Sink::Socket(end) = &pipe.sink {
                    end.stream.resume();
                }
                Err(reason)
            }
        }
    }
}

/// The extents of a part of a file.
fn part(whole: &FileMap, from: u64, to: u64) -> FileMap {
    let is_wanted = |e: &&viola_proto::agent::Extent| e.logical < to && e.logical + e.length > from;
    FileMap {
        size: whole.size,
        extents: whole.extents.iter().filter(is_wanted).copied().collect(),
    }
}
