// SPDX-License-Identifier: Apache-2.0
//! Starts a pipe: from a program's request to ends that are ready to be handed over.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use viola_proto::agent::FileMap;
use viola_proto::pipe::PipeId;
use viola_proto::pipe::library::LibraryRequest;

use super::Pipes;
use super::entry::{BOTH, Pipe, Sink, SocketEnd, Source};
use crate::pipe::lease::{FileInfo, FileKey};
use crate::pipe::life::{Event, Kind, Life};
use crate::pipe::programs::ProgramId;
use crate::pipe::reason::Reason;
use crate::pipe::sink::note::Notes;
use crate::pipe::sink::{Target, writable};
use crate::pipe::socket::Stream;
use crate::pipe::state::{PipeAccess, PipeVolume};

/// A program's request for a new pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The program's number of the pipe.
    pub id: u64,
    kind: Kind,
    /// First byte of a source file.
    offset: u64,
    /// First byte of a sink file.
    to: u64,
    length: u64,
}

impl Request {
    /// Parses a packet; `None` when it does not ask for a new pipe.
    pub fn of(ask: LibraryRequest) -> Option<Self> {
        let (id, kind, offset, to, length) = match ask {
            LibraryRequest::Send { id, offset, length } => (id, Kind::Send, offset, 0, length),
            LibraryRequest::Receive { id, offset, length } => {
                (id, Kind::Receive, 0, offset, length)
            }
            LibraryRequest::Copy {
                id,
                offset,
                length,
                to,
            } => (id, Kind::Copy, offset, to, length),
            LibraryRequest::Relay { id, length } => (id, Kind::Relay, 0, 0, length),
            LibraryRequest::Stop { .. } | LibraryRequest::Reset { .. } => return None,
        };
        Some(Self {
            id,
            kind,
            offset,
            to,
            length,
        })
    }
}

/// A descriptor that a program has sent.
enum Descriptor {
    File(OwnedFd),
    Socket(SocketEnd),
}

impl Pipes {
    /// Starts a pipe. On an error nothing was done.
    pub(super) fn start_pipe(
        &mut self,
        program: ProgramId,
        request: Request,
        (source, sink): (OwnedFd, OwnedFd),
    ) -> Result<(), Reason> {
        if !self.programs.is_allowed(program) {
            return Err(Reason::NotAllowed);
        }
        if self.host_state.epoch.is_none() || self.host_state.halt {
            return Err(Reason::NoSession);
        }
        if self.pipes.len() >= self.max_pipes {
            return Err(Reason::TooManyPipes);
        }
        if request.kind == Kind::Relay && !self.relay_allowed {
            return Err(Reason::Disabled);
        }
        // what leaves no trace is checked first
        let connections = request.kind.connections();
        let pipe = self.next;
        let from = match connections.source {
            true => Descriptor::Socket(SocketEnd::new(Stream::source(source)?)),
            false => Descriptor::File(source),
        };
        let to = match connections.sink {
            true => Descriptor::Socket(SocketEnd::new(Stream::new(sink)?)),
            false => Descriptor::File(sink),
        };
        if let (Descriptor::Socket(from), Descriptor::Socket(to)) = (&from, &to)
            && from.stream.is_same(&to.stream)
        {
            return Err(Reason::BadSocket);
        }
        if request.length == 0 {
            return Err(Reason::OutOfRange);
        }
        let into = match &to {
            Descriptor::File(file) => Some(self.may_write(file.as_fd())?),
            Descriptor::Socket(_) => None,
        };
        let source = match from {
            Descriptor::Socket(end) => Source::Socket(end),
            Descriptor::File(file) => {
                let held = self.hold(pipe, file.as_fd(), &request);
                // closed after the message to the host is on its way
                self.closable.push(file);
                held?
            }
        };
        let sink = match (to, into) {
            (Descriptor::Socket(end), _) => Ok(Sink::Socket(end)),
            (Descriptor::File(sink), Some((key, device, notes))) => match &source {
                Source::File { key: read, .. } if *read == key => Err(Reason::HasWriter),
                _ => {
                    let shared = (&self.completion_sender, &self.counters);
                    let part = (request.to, request.length);
                    let target = Target::begin(pipe, sink, part, notes, shared);
                    target.map(|target| Sink::File { target, device })
                }
            },
            (Descriptor::File(_), None) => Err(Reason::SystemError),
        };
        let sink = match (sink, &source) {
            (Ok(sink), _) => sink,
            (Err(reason), Source::File { key, .. }) => {
                self.leases.release(*key, pipe);
                return Err(reason);
            }
            (Err(reason), Source::Socket(_)) => return Err(reason),
        };
        self.next += 1;
        let new = Pipe {
            life: Life::new(request.id, request.kind),
            program,
            source,
            sink,
            length: request.length,
            moved: 0,
            ends: None,
            drain: None,
            reason: None,
            host_us: 0,
        };
        self.pipes.insert(pipe, new);
        self.advance(pipe);
        Ok(())
    }

    /// Takes a lease on a source file, and has it mapped.
    fn hold(
        &mut self,
        pipe: PipeId,
        file: BorrowedFd<'_>,
        request: &Request,
    ) -> Result<Source, Reason> {
        // this check asks no file system: one in user space could answer late
        let found = FileInfo::of(file)?;
        let device = found.device();
        self.proven(&device, |access| access.read)?;
        let key = self.leases.hold(file, &found, pipe)?;
        let offset = request.offset;
        let leased = self.leases.get(key).ok_or(Reason::SystemError)?;
        let (size, job, is_mapped) = (leased.size, Arc::clone(&leased.file), leased.map.is_some());
        if offset
            .checked_add(request.length)
            .is_none_or(|end| end > size)
        {
            self.leases.release(key, pipe);
            return Err(Reason::OutOfRange);
        }
        if !is_mapped {
            // the mapper lives as long as this sender
            let _ = self.mapper.send((pipe, job));
        }
        Ok(Source::File {
            key,
            device,
            offset,
        })
    }

    /// Checks that the host may write a program's file, and that no other pipe writes it.
    fn may_write(&self, file: BorrowedFd<'_>) -> Result<(FileKey, String, Notes), Reason> {
        let device = FileInfo::of(file)?.device();
        let notes = Notes::new(
            &self.proven(&device, |access| access.write)?.point,
            self.run,
        );
        let key = writable(file)?;
        let other = self
            .pipes
            .values()
            .any(|pipe| matches!(&pipe.sink, Sink::File { target, .. } if target.key == key));
        match other {
            true => Err(Reason::HasWriter),
            false => Ok((key, device, notes)),
        }
    }

    /// The file system of a device. Fails unless pipes may use it so and the host knows its disk.
    pub(super) fn proven(
        &self,
        device: &str,
        wanted: impl Fn(PipeAccess) -> bool,
    ) -> Result<&PipeVolume, Reason> {
        match self.host_state.volumes.get(device) {
            Some(disk) if !wanted(disk.access) => Err(Reason::Unmappable),
            Some(disk) if !disk.is_proven => Err(Reason::UnprovenDisk),
            Some(disk) => Ok(disk),
            None => Err(Reason::Unmappable),
        }
    }

    /// The mapper has found the extents of a source file, or failed.
    pub(super) fn mapped(&mut self, pipe: PipeId, result: Result<FileMap, Reason>) {
        let Some(Source::File { key, .. }) = self.pipes.get(&pipe).map(|p| &p.source) else {
            return;
        };
        let key = *key;
        match result {
            Ok(map) => {
                if let Some(leased) = self.leases.get(key) {
                    leased.map = Some(map);
                }
                self.advance(pipe);
            }
            Err(reason) => self.apply(pipe, Event::Failed(reason.errno()), reason),
        }
    }

    /// The sink file is prepared, or that failed.
    pub(super) fn prepared(&mut self, pipe: PipeId, result: Result<FileMap, Reason>) {
        let Some(Sink::File { target, .. }) = self.pipes.get_mut(&pipe).map(|p| &mut p.sink) else {
            return;
        };
        match result {
            Ok(map) => {
                target.map = Some(map);
                self.advance(pipe);
            }
            Err(reason) => self.apply(pipe, Event::Failed(reason.errno()), reason),
        }
    }

    /// Hands the pipe over, or has its source held, when both ends are ready.
    fn advance(&mut self, id: PipeId) {
        let Some(pipe) = self.pipes.get_mut(&id).filter(|p| p.life.is_requested()) else {
            return;
        };
        let is_read = match &pipe.source {
            Source::File { key, .. } => self.leases.get(*key).is_some_and(|f| f.map.is_some()),
            Source::Socket(_) => true,
        };
        let is_written = match &pipe.sink {
            Sink::File { target, .. } => target.map.is_some(),
            Sink::Socket(_) => true,
        };
        if !is_read || !is_written {
            return;
        }
        if !pipe.life.kind().is_held_first() {
            return self.hand_over(id);
        }
        // an unknown next hop is found before the host holds anything
        let mut ends = Err(Reason::SystemError);
        for end in pipe.socket_ends(BOTH) {
            let found = end.stream.ends();
            let reached = found.and_then(|(local, peer)| self.next_hops.get(local, peer));
            match (reached, &ends) {
                (Err(reason), _) => {
                    ends = Err(reason);
                    break;
                }
                // the source comes first
                (Ok(_), Err(_)) => ends = found,
                (Ok(_), Ok(_)) => {}
            }
        }
        match ends {
            Ok(ends) => {
                pipe.ends = Some(ends);
                self.apply(id, Event::Ready, Reason::RefusedByHost);
            }
            Err(reason) => self.apply(id, Event::Failed(reason.errno()), reason),
        }
    }
}
