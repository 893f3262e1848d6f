// SPDX-License-Identifier: Apache-2.0
//! Files that the VM wants to be sent: looked up and checked here, sent by [`viola_vpipe`].

use viola_extents::CheckedMap;
use viola_proto::agent::{FileMap, FsId, MAX_EXTENTS, ToAgent, short};
use viola_proto::pipe::{Connection, FromGuest, PipeId, ToGuest};
use viola_vpipe::work::{Give, Pipes};

use super::super::images;
use super::{Conversation, count};

impl Conversation {
    /// From now on files are sent by this.
    pub fn set_pipes(&mut self, pipes: Pipes) {
        self.pipes = Some(pipes);
    }

    /// What sends files.
    pub fn pipes(&self) -> Option<&Pipes> {
        self.pipes.as_ref()
    }

    pub(super) fn pipe(&mut self, message: FromGuest, out: &mut Vec<ToAgent>) {
        match message {
            FromGuest::Give {
                pipe,
                connection,
                next_hop,
                fs,
                map,
                offset,
                length,
            } => {
                let part = (offset, length);
                if let Err(why) = self.give(pipe, *connection, next_hop, fs, &map, part) {
                    count(&mut self.stat.refusals, "pipe");
                    let why = short(why);
                    out.push(ToAgent::Pipe(ToGuest::Refused { pipe, why }));
                }
            }
            FromGuest::Stop { pipe } => self.order(|pipes| pipes.stop(pipe)),
            FromGuest::Reset { pipe } => self.order(|pipes| pipes.reset(pipe)),
            FromGuest::Taken { pipe } => self.order(|pipes| pipes.taken(pipe)),
        }
    }

    fn order(&self, order: impl FnOnce(&Pipes)) {
        // without them nothing was ever given
        if let Some(pipes) = &self.pipes {
            order(pipes);
        }
    }

    fn give(
        &self,
        pipe: PipeId,
        connection: Connection,
        next_hop: [u8; 6],
        fs: FsId,
        map: &FileMap,
        (offset, length): (u64, u64),
    ) -> Result<(), String> {
        let pipes = self.pipes.as_ref();
        let pipes = pipes.ok_or("this VM's files are not sent by the host: see [vm.pipe]")?;
        let proved = self.proved.get(&fs).ok_or("file system not proved")?;
        if map.extents.len() > MAX_EXTENTS.min(self.limits.extents as usize) {
            return Err("too many extents".into());
        }
        let map = CheckedMap::new(&images::extents(map), map.size, proved.size)
            .map_err(|e| e.to_string())?;
        if length == 0 || offset.checked_add(length).is_none_or(|end| end > map.len()) {
            return Err("the file does not have these bytes".into());
        }
        let disk = self.disks.iter().find(|d| d.spec.id == proved.image);
        let disk = disk.ok_or("the disk is gone")?;
        // what was written since the image was opened may need tables that were not there then
        disk.image.refresh().map_err(|e| e.to_string())?;
        pipes.give(Give {
            pipe,
            connection,
            next_hop,
            image: disk.image.clone(),
            map,
            offset,
            length,
        });
        Ok(())
    }
}
