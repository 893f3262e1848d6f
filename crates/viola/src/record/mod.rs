// SPDX-License-Identifier: Apache-2.0
//! Recordings for `viola top --replay`: a line of JSON for each moment.
//!
//! | line | meaning |
//! |---|---|
//! | `{"begin":{"format":1,"viola":"0.1.0","host":"h","at_ms":0}}` | a recording begins, or continues after a break |
//! | `{"moment":{"at_ms":0,"stage":"running","why":"...","mechanism":"slots","vms":{...}}}` | reply to `GET /v1/vms`, without histograms |
//! | `{"event":{"number":1,"at_ms":0,"kind":"change","vm":"qemu:a","what":"..."}}` | an event of the daemon, as in `GET /v1/events` |
//! | `{"gap":{"at_ms":0,"why":"..."}}` | from here on the daemon does not answer |
//!
//! Times are milliseconds since 1970. A reader skips lines of another kind and truncated lines.

mod read;
mod write;

pub use read::{Recording, ReplayError};
pub use write::Writer;

use serde::{Deserialize, Serialize};
use viola_proto::{Event, EventKind, Events, Stage, Status, VmList};

use viola_cli::client::{Client, ClientError};
use viola_cli::log;

/// Version of the format. A change that an older viola cannot read gets the next number.
pub const FORMAT: u32 = 1;
/// Longest line that the reader accepts.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// A line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Line {
    Begin(Begin),
    Moment(Moment),
    Event(Event),
    Gap { at_ms: u64, why: String },
}

/// The first line of a recording and of each continuation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Begin {
    format: u32,
    viola: String,
    host: String,
    at_ms: u64,
}

/// Status and VMs at one time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Moment {
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// Stage of the daemon.
    pub stage: Stage,
    /// Reason of the stage.
    pub why: String,
    /// Mechanism in use: `slots`, `sched_ext` or `eevdf`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mechanism: Option<String>,
    /// The VMs.
    pub vms: VmList,
}

/// Requests the present moment and the last events from a daemon.
///
/// # Errors
/// As [`Client::get`].
pub fn request(client: &Client) -> Result<(Moment, Events), ClientError> {
    let status: Status = client.get("/status")?;
    let mut vms: VmList = client.get("/vms")?;
    let events = match client.get("/events") {
        Ok(events) => events,
        // A daemon of an earlier version has no events.
        Err(ClientError::Refused { .. }) => Events::default(),
        Err(e) => return Err(e),
    };
    for vm in &mut vms.vms {
        vm.by_vcpu.iter_mut().for_each(|vcpu| vcpu.waits.clear());
        let delays = [&mut vm.packet_delay, &mut vm.wake_delay];
        for delay in delays.into_iter().flatten() {
            delay.buckets.clear();
        }
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

/// Keeps of each reply only the events that no earlier reply had.
#[derive(Debug, Default)]
pub struct UnseenEvents {
    pid: u32,
    last: u64,
}

impl UnseenEvents {
    /// The events since the last call; all of them after a restart of the daemon.
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

/// A gap as an event.
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
    fn each_event_is_returned_once_and_all_after_a_restart() {
        let event = |number| Event {
            number,
            ..gap(0, "x")
        };
        let events = |pid, numbers: std::ops::Range<u64>| Events {
            pid,
            events: numbers.map(event).collect(),
        };
        let mut unseen = UnseenEvents::default();
        assert_eq!(unseen.of(events(7, 1..4)).len(), 3);
        assert_eq!(unseen.of(events(7, 1..4)).len(), 0);
        assert_eq!(unseen.of(events(7, 2..6)).len(), 2);
        assert_eq!(unseen.of(events(8, 1..2)).len(), 1);
    }
}
