// SPDX-License-Identifier: Apache-2.0
//! Counts for `viola-agent status`, shared with the pipes' threads.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use super::reason::Reason;
use crate::pipe::report::PipeReport;

/// Counts since the start of the agent, and the present numbers of pipes.
#[derive(Debug, Default)]
pub struct Counters(Mutex<Counts>);

#[derive(Debug, Default, Clone)]
struct Counts {
    now: u64,
    active: u64,
    pipes: u64,
    bytes: u64,
    lost: u64,
    refused: BTreeMap<&'static str, u64>,
    refusal: Option<String>,
}

impl Counters {
    fn with<T>(&self, work: impl FnOnce(&mut Counts) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sets the number of pipes that programs wait for, and of those whose files the host may touch.
    pub fn set_active(&self, awaited: usize, active: usize) {
        self.with(|c| (c.now, c.active) = (awaited as u64, active as u64));
    }

    /// Counts a pipe that has ended.
    pub fn count_ended(&self, sent: u64, errno: i32) {
        self.with(|c| {
            c.pipes += 1;
            c.bytes = c.bytes.saturating_add(sent);
            c.lost += u64::from(errno == libc::ECONNRESET);
        });
    }

    /// Counts a refused pipe.
    pub fn count_refusal(&self, reason: Reason) {
        self.with(|c| *c.refused.entry(reason.text()).or_default() += 1);
    }

    /// Sets the detail of the last failure.
    pub fn set_last_detail(&self, why: String) {
        self.with(|c| c.refusal = Some(why));
    }

    /// Number of pipes whose files the host may touch.
    pub fn active(&self) -> u64 {
        self.with(|c| c.active)
    }

    /// Number of pipes that have not ended.
    pub fn busy(&self) -> u64 {
        self.with(|c| c.now.max(c.active))
    }

    /// The report.
    pub fn report(&self, socket: &Path) -> PipeReport {
        let c = self.with(|c| c.clone());
        PipeReport {
            socket: socket.display().to_string(),
            now: c.now,
            pipes: c.pipes,
            bytes: c.bytes,
            lost: c.lost,
            refused: c
                .refused
                .into_iter()
                .map(|(why, count)| (why.to_owned(), count))
                .collect(),
            refusal: c.refusal,
        }
    }
}
