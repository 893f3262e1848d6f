// SPDX-License-Identifier: Apache-2.0
//! The thread that finds where files are: it waits for disks.

use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use viola_extents::guest::{Mapper, Refusal};
use viola_proto::pipe::PipeId;

use super::reason::Reason;
use super::tally::Tally;
use super::{In, Inbox};
use crate::io::worker::on_wire;

/// A file to be mapped for a pipe.
pub type ToMap = (PipeId, Arc<File>);

/// Finds extents, one file after the other.
pub fn map_all(jobs: &Receiver<ToMap>, results: &Inbox, tally: &Tally) {
    let mapper = Mapper::new();
    for (pipe, file) in jobs {
        let result = mapper.file_extents(&file).map(|map| on_wire(map).0);
        drop(file);
        let result = result.map_err(|refusal| {
            tally.say(refusal.to_string());
            match refusal {
                Refusal::Io { .. } => Reason::System,
                Refusal::Changed => Reason::Written,
                _ => Reason::Place,
            }
        });
        if !results.say(In::Mapped(pipe, result)) {
            break;
        }
    }
}
