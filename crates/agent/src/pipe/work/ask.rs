// SPDX-License-Identifier: Apache-2.0
//! From a program's wish to ends that are ready to be given.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use viola_proto::agent::FileMap;
use viola_proto::pipe::PipeId;
use viola_proto::pipe::library::Ask;

use super::{BOTH, Line, Pipe, Sink, Source, Work};
use crate::core::pipe::{Event, Kind, Life};
use crate::pipe::lease::{FileKey, Found};
use crate::pipe::programs::ProgramId;
use crate::pipe::reason::Reason;
use crate::pipe::sink::note::Notes;
use crate::pipe::sink::{Target, writable};
use crate::pipe::socket::Stream;
use crate::pipe::{Disk, Uses};

/// What a program wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wish {
    /// Its own number for it.
    pub id: u64,
    kind: Kind,
    /// First byte of a file that is read.
    offset: u64,
    /// First byte of one that is written to.
    to: u64,
    length: u64,
}

impl Wish {
    /// Of a packet, if it is for something new.
    pub fn of(ask: Ask) -> Option<Self> {
        let (id, kind, offset, to, length) = match ask {
            Ask::Send { id, offset, length } => (id, Kind::Send, offset, 0, length),
            Ask::Receive { id, offset, length } => (id, Kind::Receive, 0, offset, length),
            Ask::Copy {
                id,
                offset,
                length,
                to,
            } => (id, Kind::Copy, offset, to, length),
            Ask::Relay { id, length } => (id, Kind::Relay, 0, 0, length),
            Ask::Stop { .. } | Ask::Reset { .. } => return None,
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

/// What a program has given with its wish.
enum Given {
    File(OwnedFd),
    Socket(Line),
}

impl Work {
    /// A program asks. An error means that nothing was done.
    pub(super) fn begin(
        &mut self,
        program: ProgramId,
        wish: Wish,
        (source, sink): (OwnedFd, OwnedFd),
    ) -> Result<(), Reason> {
        if !self.programs.is_allowed(program) {
            return Err(Reason::User);
        }
        if self.facts.epoch.is_none() || self.facts.halt {
            return Err(Reason::Host);
        }
        if self.pipes.len() >= self.most {
            return Err(Reason::Many);
        }
        if wish.kind == Kind::Relay && !self.relays {
            return Err(Reason::Off);
        }
        // what is not written in the end is asked first
        let connections = wish.kind.connections();
        let pipe = self.next;
        let from = match connections.source {
            true => Given::Socket(Line::new(Stream::source(source)?)),
            false => Given::File(source),
        };
        let to = match connections.sink {
            true => Given::Socket(Line::new(Stream::new(sink)?)),
            false => Given::File(sink),
        };
        if let (Given::Socket(from), Given::Socket(to)) = (&from, &to)
            && from.stream.is_same(&to.stream)
        {
            return Err(Reason::Socket);
        }
        if wish.length == 0 {
            return Err(Reason::Range);
        }
        let into = match &to {
            Given::File(file) => Some(self.may_write(file.as_fd())?),
            Given::Socket(_) => None,
        };
        let source = match from {
            Given::Socket(line) => Source::Socket(line),
            Given::File(file) => {
                let held = self.hold(pipe, file.as_fd(), &wish);
                // closed when the host has been told
                self.used.push(file);
                held?
            }
        };
        let sink = match (to, into) {
            (Given::Socket(line), _) => Ok(Sink::Socket(line)),
            (Given::File(sink), Some((key, device, notes))) => match &source {
                Source::File { key: read, .. } if *read == key => Err(Reason::Written),
                _ => {
                    let said = (&self.inbox, &self.tally);
                    let part = (wish.to, wish.length);
                    let target = Target::begin(pipe, sink, part, notes, said);
                    target.map(|target| Sink::File { target, device })
                }
            },
            (Given::File(_), None) => Err(Reason::System),
        };
        let sink = match (sink, &source) {
            (Ok(sink), _) => sink,
            (Err(reason), Source::File { key, .. }) => {
                self.leases.let_go(*key, pipe);
                return Err(reason);
            }
            (Err(reason), Source::Socket(_)) => return Err(reason),
        };
        self.next += 1;
        let new = Pipe {
            life: Life::new(wish.id, wish.kind),
            program,
            source,
            sink,
            length: wish.length,
            moved: 0,
            ends: None,
            look: None,
            reason: None,
            spent: 0,
        };
        self.pipes.insert(pipe, new);
        self.go_on(pipe);
        Ok(())
    }

    /// Keeps a file that is read from changes, and has it mapped.
    fn hold(&mut self, pipe: PipeId, file: BorrowedFd<'_>, wish: &Wish) -> Result<Source, Reason> {
        // before anything that a file system in user space could answer late
        let found = Found::of(file)?;
        let device = found.device();
        self.proven(&device, |uses| uses.from)?;
        let key = self.leases.hold(file, &found, pipe)?;
        let offset = wish.offset;
        let leased = self.leases.get(key).ok_or(Reason::System)?;
        let (size, job, is_mapped) = (leased.size, Arc::clone(&leased.file), leased.map.is_some());
        if offset.checked_add(wish.length).is_none_or(|end| end > size) {
            self.leases.let_go(key, pipe);
            return Err(Reason::Range);
        }
        if !is_mapped {
            // the mapper ends only with this
            let _ = self.mapper.send((pipe, job));
        }
        Ok(Source::File {
            key,
            device,
            offset,
        })
    }

    /// Whether a program's file may be written to by the host, and by nobody else now.
    fn may_write(&self, file: BorrowedFd<'_>) -> Result<(FileKey, String, Notes), Reason> {
        let device = Found::of(file)?.device();
        let notes = Notes::new(&self.proven(&device, |uses| uses.into)?.point, self.run);
        let key = writable(file)?;
        let other = self
            .pipes
            .values()
            .any(|pipe| matches!(&pipe.sink, Sink::File { target, .. } if target.key == key));
        match other {
            true => Err(Reason::Written),
            false => Ok((key, device, notes)),
        }
    }

    /// The file system of a device, if it is for this and the host knows its disk.
    pub(super) fn proven(
        &self,
        device: &str,
        wanted: impl Fn(Uses) -> bool,
    ) -> Result<&Disk, Reason> {
        match self.facts.volumes.get(device) {
            Some(disk) if !wanted(disk.uses) => Err(Reason::Place),
            Some(disk) if !disk.is_good => Err(Reason::Disk),
            Some(disk) => Ok(disk),
            None => Err(Reason::Place),
        }
    }

    /// What the mapper has found of a file that is read.
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
                self.go_on(pipe);
            }
            Err(reason) => self.on(pipe, Event::Unfit(reason.errno()), reason),
        }
    }

    /// What has come of making a file ready that is written to.
    pub(super) fn prepared(&mut self, pipe: PipeId, result: Result<FileMap, Reason>) {
        let Some(Sink::File { target, .. }) = self.pipes.get_mut(&pipe).map(|p| &mut p.sink) else {
            return;
        };
        match result {
            Ok(map) => {
                target.map = Some(map);
                self.go_on(pipe);
            }
            Err(reason) => self.on(pipe, Event::Unfit(reason.errno()), reason),
        }
    }

    /// Takes the next step when both ends are ready.
    fn go_on(&mut self, id: PipeId) {
        let Some(pipe) = self.pipes.get_mut(&id).filter(|p| p.life.is_asked()) else {
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
            return self.give(id);
        }
        // what the host would hold for nothing is found out before
        let mut ends = Err(Reason::System);
        for line in pipe.lines(BOTH) {
            let found = line.stream.ends();
            let reached = found.and_then(|(local, peer)| self.hops.of(local, peer));
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
                self.on(id, Event::Ready, Reason::Refused);
            }
            Err(reason) => self.on(id, Event::Unfit(reason.errno()), reason),
        }
    }
}
