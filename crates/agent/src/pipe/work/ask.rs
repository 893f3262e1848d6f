// SPDX-License-Identifier: Apache-2.0
//! From a program's wish to what the host is given.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{AtFlags, StatxFlags, statx};
use viola_proto::agent::{FileMap, FsId};
use viola_proto::pipe::{FromGuest, PipeId};

use super::{Pipe, Work};
use crate::core::pipe::{Event, Life};
use crate::pipe::programs::ProgramId;
use crate::pipe::reason::Reason;
use crate::pipe::socket::Stream;

impl Work {
    /// A program asks. An error means that nothing was done.
    pub(super) fn begin(
        &mut self,
        program: ProgramId,
        id: u64,
        (offset, length): (u64, u64),
        file: BorrowedFd<'_>,
        socket: OwnedFd,
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
        // before anything that a file system in user space could answer late
        let device = device_of(file)?;
        self.proven(&device)?;
        let stream = Stream::new(socket)?;
        let pipe = self.next;
        let key = self.leases.hold(file, pipe)?;
        self.next += 1;
        let leased = self.leases.get(key);
        let (size, job, is_mapped) = match leased {
            Some(leased) => (leased.size, Arc::clone(&leased.file), leased.map.is_some()),
            None => return Err(Reason::System),
        };
        if length == 0 || offset.checked_add(length).is_none_or(|end| end > size) {
            self.leases.let_go(key, pipe);
            return Err(Reason::Range);
        }
        let new = Pipe {
            life: Life::new(id),
            program,
            stream,
            file: key,
            device,
            offset,
            length,
            back: None,
        };
        self.pipes.insert(pipe, new);
        match is_mapped {
            true => self.give(pipe),
            // the mapper ends only with this
            false => drop(self.mapper.send((pipe, job))),
        }
        Ok(())
    }

    /// The file system of a device, if the host knows its disk.
    fn proven(&self, device: &str) -> Result<FsId, Reason> {
        match self.facts.volumes.get(device) {
            Some((fs, true)) => Ok(*fs),
            Some((_, false)) => Err(Reason::Disk),
            None => Err(Reason::Place),
        }
    }

    pub(super) fn mapped(&mut self, pipe: PipeId, result: Result<FileMap, Reason>) {
        let Some(key) = self.pipes.get(&pipe).map(|p| p.file) else {
            return;
        };
        match result {
            Ok(map) => {
                if let Some(leased) = self.leases.get(key) {
                    leased.map = Some(map);
                }
                self.give(pipe);
            }
            Err(reason) => self.on(pipe, Event::Unfit(reason.errno()), reason),
        }
    }

    /// Takes the connection out of its socket and gives it to the host.
    fn give(&mut self, pipe: PipeId) {
        match self.taken(pipe) {
            Ok(Some(message)) => {
                self.on(pipe, Event::Given, Reason::Refused);
                self.tell(message);
            }
            Ok(None) => {}
            Err(reason) => self.on(pipe, Event::Unfit(reason.errno()), reason),
        }
    }

    fn taken(&mut self, id: PipeId) -> Result<Option<FromGuest>, Reason> {
        let device = match self.pipes.get(&id) {
            Some(pipe) if pipe.life.is_asked() => pipe.device.clone(),
            _ => return Ok(None),
        };
        if self.facts.epoch.is_none() {
            return Err(Reason::Host);
        }
        let fs = self.proven(&device)?;
        let pipe = self.pipes.get_mut(&id).ok_or(Reason::System)?;
        let leased = self.leases.get(pipe.file).ok_or(Reason::System)?;
        let whole = leased.map.as_ref().ok_or(Reason::System)?;
        let end = pipe.offset + pipe.length;
        let map = FileMap {
            size: whole.size,
            extents: whole
                .extents
                .iter()
                .filter(|e| e.logical < end && e.logical + e.length > pipe.offset)
                .copied()
                .collect(),
        };
        let (local, peer) = pipe.stream.ends()?;
        let next_hop = self.hops.of(local, peer)?;
        let connection = Box::new(pipe.stream.take()?);
        Ok(Some(FromGuest::Give {
            pipe: id,
            connection,
            next_hop,
            fs,
            map,
            offset: pipe.offset,
            length: pipe.length,
        }))
    }
}

/// The number of a file's device, without a question to a file system that is elsewhere.
fn device_of(file: BorrowedFd<'_>) -> Result<String, Reason> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = statx(file, "", flags, StatxFlags::TYPE).map_err(|_| Reason::File)?;
    Ok(format!("{}:{}", stat.stx_dev_major, stat.stx_dev_minor))
}
