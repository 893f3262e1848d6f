// SPDX-License-Identifier: Apache-2.0
//! vpipe requests of the VM: checks files and hands them to [`viola_vpipe`], which moves the bytes.

use viola_extents::CheckedMap;
use viola_proto::agent::{FileMap, FsId, MAX_EXTENTS, ToAgent, truncate_text};
use viola_proto::pipe::{self as proto, PipeId, PipeReply, PipeRequest};
use viola_vpipe::pipes::{Endpoint, PipeSpec, Pipes};
use viola_vpipe::transfer::FileRange;

use super::{AgentSession, count};

impl AgentSession {
    /// Enables vpipe.
    pub fn set_pipes(&mut self, pipes: Pipes) {
        self.pipes = Some(pipes);
    }

    /// The VM's vpipe worker, if vpipe is enabled.
    pub fn pipes(&self) -> Option<&Pipes> {
        self.pipes.as_ref()
    }

    pub(super) fn pipe(&mut self, message: PipeRequest, out: &mut Vec<ToAgent>) {
        match message {
            PipeRequest::Hold { pipe, local, peer } => match &self.pipes {
                Some(pipes) => pipes.hold(pipe, local, peer),
                None => self.refuse(pipe, NO_PIPES.into(), out),
            },
            PipeRequest::Start {
                pipe,
                source,
                sink,
                length,
            } => {
                if let Err(why) = self.give(pipe, source, sink, length) {
                    // Releases a connection that is held for this pipe.
                    self.order(|pipes| pipes.reset(pipe));
                    self.refuse(pipe, why, out);
                }
            }
            PipeRequest::Stop { pipe } => self.order(|pipes| pipes.stop(pipe)),
            PipeRequest::Reset { pipe } => self.order(|pipes| pipes.reset(pipe)),
            PipeRequest::Restored { pipe } => self.order(|pipes| pipes.restored(pipe)),
        }
    }

    fn refuse(&mut self, pipe: PipeId, why: String, out: &mut Vec<ToAgent>) {
        count(&mut self.stat.refusals, "pipe");
        let why = truncate_text(why);
        out.push(ToAgent::Pipe(PipeReply::Refused { pipe, why }));
    }

    fn order(&self, order: impl FnOnce(&Pipes)) {
        // Without vpipe there is no pipe to act on.
        if let Some(pipes) = &self.pipes {
            order(pipes);
        }
    }

    fn give(
        &self,
        pipe: PipeId,
        source: proto::Endpoint,
        sink: proto::Endpoint,
        length: u64,
    ) -> Result<(), String> {
        let pipes = self.pipes.as_ref().ok_or(NO_PIPES)?;
        if length == 0 {
            return Err("the length is 0".into());
        }
        pipes.start(PipeSpec {
            pipe,
            source: self.end_of(source, length)?,
            sink: self.end_of(sink, length)?,
            length,
        })
    }

    fn end_of(&self, end: proto::Endpoint, length: u64) -> Result<Endpoint, String> {
        match end {
            proto::Endpoint::Connection {
                connection,
                next_hop,
            } => Ok(Endpoint::Connection {
                connection: *connection,
                next_hop,
            }),
            proto::Endpoint::File { fs, map, offset } => {
                self.part(fs, &map, offset, length).map(Endpoint::File)
            }
        }
    }

    fn part(&self, fs: FsId, map: &FileMap, offset: u64, length: u64) -> Result<FileRange, String> {
        let proved = self.proved.get(&fs).ok_or("file system not proved")?;
        if map.extents.len() > MAX_EXTENTS.min(self.limits.extents as usize) {
            return Err("too many extents".into());
        }
        let map = CheckedMap::new(&crate::images::extents(map), map.size, proved.size)
            .map_err(|e| e.to_string())?;
        if (offset.checked_add(length)).is_none_or(|end| end > map.len()) {
            return Err("the range exceeds the file".into());
        }
        let disk = self.disks.iter().find(|d| d.spec.id == proved.image);
        let disk = disk.ok_or("the disk is gone")?;
        // The image's tables may be older than the file.
        disk.image.refresh().map_err(|e| e.to_string())?;
        Ok(FileRange {
            image: disk.image.clone(),
            map,
            offset,
        })
    }
}

const NO_PIPES: &str = "vpipe is off for this VM: see [vm.pipe]";
