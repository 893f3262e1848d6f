// SPDX-License-Identifier: Apache-2.0
//! Counts, for people.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use super::reason::Reason;
use crate::io::status::PipeReport;

/// See the module.
#[derive(Debug, Default)]
pub struct Tally(Mutex<Counts>);

#[derive(Debug, Default, Clone)]
struct Counts {
    now: u64,
    reading: u64,
    pipes: u64,
    bytes: u64,
    lost: u64,
    refused: BTreeMap<&'static str, u64>,
    refusal: Option<String>,
}

impl Tally {
    fn with<T>(&self, work: impl FnOnce(&mut Counts) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// So many are waited for, and so many are read.
    pub fn are(&self, now: usize, reading: usize) {
        self.with(|c| (c.now, c.reading) = (now as u64, reading as u64));
    }

    /// One is over.
    pub fn over(&self, sent: u64, errno: i32) {
        self.with(|c| {
            c.pipes += 1;
            c.bytes = c.bytes.saturating_add(sent);
            c.lost += u64::from(errno == libc::ECONNRESET);
        });
    }

    /// One was refused.
    pub fn refuse(&self, reason: Reason) {
        self.with(|c| *c.refused.entry(reason.text()).or_default() += 1);
    }

    /// Why the host has refused one, or why one could not be mapped.
    pub fn say(&self, why: String) {
        self.with(|c| c.refusal = Some(why));
    }

    /// Pipes whose files the host may read.
    pub fn reading(&self) -> u64 {
        self.with(|c| c.reading)
    }

    /// Pipes that are not over.
    pub fn busy(&self) -> u64 {
        self.with(|c| c.now.max(c.reading))
    }

    /// For people.
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
