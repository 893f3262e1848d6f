// SPDX-License-Identifier: Apache-2.0
//! libvirt: the host's domains and their events, as they happen.
//!
//! A small process of its own ([`stream_events`]) loads libvirt's library at run time and writes one line for each event. So
//! a host without libvirt needs no library, and the library's memory, threads and waits stay out of the daemon. The daemon
//! reads the lines as [`Message`]s.

mod library;
mod stream;

use serde::{Deserialize, Serialize};

pub use stream::{StreamEnd, stream_events};

/// The libvirt connection for the host's QEMU VMs, with one libvirt daemon or several.
pub const URI: &str = "qemu:///system";

/// The state of a domain (`virDomainState`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DomainState {
    /// It runs, or waits for I/O.
    Running,
    /// An operator or libvirt has paused it; its process exists.
    Paused,
    /// It is shutting down.
    Shutdown,
    /// Its guest has crashed; libvirt keeps the process.
    Crashed,
    /// Its guest is suspended.
    Suspended,
    /// It does not run.
    Off,
}

impl DomainState {
    /// Converts libvirt's number. Numbers of later versions count as running.
    fn of(number: i32) -> Self {
        match number {
            3 => Self::Paused,
            4 => Self::Shutdown,
            5 => Self::Off,
            6 => Self::Crashed,
            7 => Self::Suspended,
            _ => Self::Running,
        }
    }

    /// The state in QMP's terms, where QMP has one.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Shutdown => "shutdown",
            Self::Crashed => "guest-panicked",
            Self::Suspended => "suspended",
            Self::Off => "off",
        }
    }
}

/// A VM as libvirt describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Domain {
    /// Name; it may change while the VM does not run.
    pub name: String,
    /// UUID in 36 characters, the same as QEMU's `-uuid`.
    pub uuid: String,
    /// Present state.
    pub state: DomainState,
}

/// One line of [`stream_events`], as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "word", rename_all = "lowercase")]
pub enum Message {
    /// The connection is established; from now on libvirt reports every change.
    Connected {
        /// Domains that run.
        domains: Vec<Domain>,
    },
    /// Something happened to a domain.
    Event {
        /// The domain after the event.
        domain: Domain,
        /// The event: `started`, `tunable`...
        what: String,
    },
    /// The connection could not be made, or has ended. The last line.
    Disconnected {
        /// The cause, in one sentence.
        why: String,
        /// Whether this host has no libvirt library.
        no_library: bool,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_survives_json_in_one_line() {
        let domain = Domain {
            name: "a b\n".into(),
            uuid: "6b5a8a52-0a5b-4b52-9d5c-111111111111".into(),
            state: DomainState::of(3),
        };
        let word = Message::Event {
            domain,
            what: "suspended".into(),
        };
        let line = serde_json::to_string(&word).unwrap();
        assert!(!line.contains('\n'), "{line}");
        assert!(line.contains(r#""word":"event""#), "{line}");
        assert_eq!(serde_json::from_str::<Message>(&line).unwrap(), word);
    }

    #[test]
    fn states_are_libvirts_numbers() {
        assert_eq!(DomainState::of(1), DomainState::Running);
        assert_eq!(DomainState::of(5), DomainState::Off);
        assert_eq!(
            DomainState::of(99),
            DomainState::Running,
            "of a later version"
        );
        assert_eq!(DomainState::Paused.text(), "paused");
    }
}
