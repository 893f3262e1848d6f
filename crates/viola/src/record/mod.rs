// SPDX-License-Identifier: Apache-2.0
//! Recordings: what a daemon showed, a line of JSON each time, for `viola top --replay`.
//!
//! | line | says |
//! |---|---|
//! | `{"begin":{"format":1,"viola":"0.1.0","host":"h","at_ms":0}}` | a recording begins, or goes on after a break |
//! | `{"moment":{"at_ms":0,"stage":"running","why":"...","mechanism":"slots","vms":{...}}}` | what `GET /v1/vms` said, without the histograms of vCPUs |
//! | `{"event":{"number":1,"at_ms":0,"kind":"change","vm":"qemu:a","what":"..."}}` | a line of the daemon's journal, as in `GET /v1/events` |
//! | `{"gap":{"at_ms":0,"why":"..."}}` | from here on the daemon did not answer |
//!
//! Times are milliseconds since 1970. A line of another kind is passed over, and so is one that was cut short.

mod read;
mod write;

pub use read::{Recording, ReplayError};
pub use write::Writer;

use serde::{Deserialize, Serialize};
use viola_proto::{Event, EventKind, Events, Stage, Status, VmList};

use viola_cli::client::{Client, ClientError};
use viola_cli::log;

/// Changes when a line changes in a way that an older viola would not understand.
pub const FORMAT: u32 = 1;
/// Longest line that is read, bytes.
const LONGEST: u64 = 64 << 20;

/// One line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Line {
    Begin(Begin),
    Moment(Moment),
    Event(Event),
    Gap { at_ms: u64, why: String },
}

/// The first line, and that after each break.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Begin {
    format: u32,
    viola: String,
    host: String,
    at_ms: u64,
}

/// What there was at one time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Moment {
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// What the daemon was doing...
    pub stage: Stage,
    /// ...and why.
    pub why: String,
    /// `slots`, `sched_ext` or `eevdf`, when one was chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mechanism: Option<String>,
    /// The VMs.
    pub vms: VmList,
}

/// Asks a daemon for what there is now, and for its events.
pub fn ask(client: &Client) -> Result<(Moment, Events), ClientError> {
    let status: Status = client.get("/status")?;
    let mut vms: VmList = client.get("/vms")?;
    let events = match client.get("/events") {
        Ok(events) => events,
        // One of an earlier version.
        Err(ClientError::Refused { .. }) => Events::default(),
        Err(e) => return Err(e),
    };
    for spent in vms.vms.iter_mut().flat_map(|vm| &mut vm.by_vcpu) {
        spent.waits = Vec::new();
    }
    let moment = Moment {
        at_ms: log::now_ms(),
        stage: status.stage,
        why: status.why,
        mechanism: status.mechanism,
        vms,
    };
    Ok((moment, events))
}

/// Which events of a daemon are new, from one question to the next.
#[derive(Debug, Default)]
pub struct News {
    pid: u32,
    last: u64,
}

impl News {
    /// Those that were not there when it was asked before.
    pub fn of(&mut self, events: Events) -> Vec<Event> {
        if events.pid != self.pid {
            *self = Self {
                pid: events.pid,
                last: 0,
            };
        }
        let new: Vec<Event> = events
            .events
            .into_iter()
            .filter(|e| e.number > self.last)
            .collect();
        self.last = new.last().map_or(self.last, |e| e.number);
        new
    }
}

/// A gap as a line among the events.
fn gap(at_ms: u64, why: &str) -> Event {
    Event {
        number: 0,
        at_ms,
        kind: EventKind::Warning,
        vm: None,
        what: format!("not recorded: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn news_are_told_once_and_a_new_daemon_begins_anew() {
        let event = |number| Event {
            number,
            ..gap(0, "x")
        };
        let events = |pid, numbers: std::ops::Range<u64>| Events {
            pid,
            events: numbers.map(event).collect(),
        };
        let mut news = News::default();
        assert_eq!(news.of(events(7, 1..4)).len(), 3);
        assert_eq!(news.of(events(7, 1..4)).len(), 0);
        assert_eq!(news.of(events(7, 2..6)).len(), 2);
        assert_eq!(news.of(events(8, 1..2)).len(), 1);
    }
}
