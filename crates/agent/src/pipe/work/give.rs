// SPDX-License-Identifier: Apache-2.0
//! Takes connections out of their sockets, and gives all to the host.

use viola_proto::agent::FileMap;
use viola_proto::pipe::{End, FromGuest, PipeId};

use super::{Sink, Source, Work};
use crate::core::pipe::Event;
use crate::pipe::reason::Reason;

impl Work {
    /// Gives a pipe whose ends are ready to the host.
    pub(super) fn give(&mut self, pipe: PipeId) {
        match self.taken(pipe) {
            Ok(Some(message)) => {
                self.on(pipe, Event::Given, Reason::Refused);
                self.tell(message);
            }
            Ok(None) => {}
            Err(reason) => self.on(pipe, Event::Unfit(reason.errno()), reason),
        }
    }

    /// What the host is given; an error means that the connections are in their sockets.
    pub(super) fn taken(&mut self, id: PipeId) -> Result<Option<FromGuest>, Reason> {
        let Some(pipe) = self.pipes.get(&id).filter(|p| p.life.is_fit()) else {
            return Ok(None);
        };
        if self.facts.epoch.is_none() {
            return Err(Reason::Host);
        }
        let reads = match &pipe.source {
            Source::File { device, .. } => Some(self.proven(device, |uses| uses.from)?.fs),
            Source::Socket(_) => None,
        };
        let writes = match &pipe.sink {
            Sink::File { device, .. } => Some(self.proven(device, |uses| uses.into)?.fs),
            Sink::Socket(_) => None,
        };
        let pipe = self.pipes.get_mut(&id).ok_or(Reason::System)?;
        let length = pipe.length - pipe.moved;
        // whatever can fail without a trace comes first, and the source last: it has to go on when the sink cannot
        let source_hop = match &pipe.source {
            Source::Socket(line) => {
                let (local, peer) = line.stream.ends()?;
                self.hops.of(local, peer)?
            }
            Source::File { .. } => [0; 6],
        };
        let sink = match &mut pipe.sink {
            Sink::Socket(line) => {
                let hop = |(local, peer)| self.hops.of(local, peer);
                let (connection, next_hop) = line.stream.take(hop)?;
                End::Connection {
                    connection: Box::new(connection),
                    next_hop,
                }
            }
            Sink::File { target, .. } => End::File {
                fs: writes.ok_or(Reason::System)?,
                map: target.map.clone().ok_or(Reason::System)?,
                offset: target.offset + pipe.moved,
            },
        };
        let source = match &mut pipe.source {
            Source::Socket(line) => {
                let taken = line.stream.take(|_| Ok(source_hop));
                taken.map(|(connection, next_hop)| End::Connection {
                    connection: Box::new(connection),
                    next_hop,
                })
            }
            Source::File { key, offset, .. } => {
                let whole = self.leases.get(*key).and_then(|leased| leased.map.as_ref());
                match (whole, reads) {
                    (Some(whole), Some(fs)) => Ok(End::File {
                        fs,
                        map: part(whole, *offset, *offset + length),
                        offset: *offset,
                    }),
                    _ => Err(Reason::System),
                }
            }
        };
        match source {
            Ok(source) => Ok(Some(FromGuest::Give {
                pipe: id,
                source,
                sink,
                length,
            })),
            Err(reason) => {
                if let Sink::Socket(line) = &pipe.sink {
                    line.stream.resume();
                }
                Err(reason)
            }
        }
    }
}

/// What of a file's places is wanted.
fn part(whole: &FileMap, from: u64, to: u64) -> FileMap {
    let is_wanted = |e: &&viola_proto::agent::Extent| e.logical < to && e.logical + e.length > from;
    FileMap {
        size: whole.size,
        extents: whole.extents.iter().filter(is_wanted).copied().collect(),
    }
}
