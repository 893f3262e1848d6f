// SPDX-License-Identifier: Apache-2.0
//! The thread that finds the extents of files to be read; it waits for disks.

use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use viola_extents::guest::{Mapper, Refusal};
use viola_proto::pipe::PipeId;

use super::counters::Counters;
use super::reason::Reason;
use super::state::Completion;
use crate::io::extents::to_wire;
use crate::io::queue;

/// A file to be mapped for a pipe.
pub type MapJob = (PipeId, Arc<File>);

/// Maps files in the order of the jobs, until the sender is gone.
pub fn run_mapper(
    jobs: &Receiver<MapJob>,
    results: &queue::Sender<Completion>,
    counters: &Counters,
) {
    let mapper = Mapper::new();
    for (pipe, file) in jobs {
        let result = mapper.file_extents(&file).map(|map| to_wire(map).0);
        drop(file);
        let result = result.map_err(|refusal| {
            counters.set_last_detail(refusal.to_string());
            match refusal {
                Refusal::Io { .. } => Reason::SystemError,
                Refusal::Changed => Reason::HasWriter,
                _ => Reason::Unmappable,
            }
        });
        if !results.send(Completion::Mapped(pipe, result)) {
            break;
        }
    }
}
