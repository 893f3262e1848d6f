// SPDX-License-Identifier: Apache-2.0
//! libvirt: which VMs are its domains, and what happens to them, told as it happens.
//!
//! Its library is loaded at run time, in a small process of its own ([`tell`]) that writes a line for each event; a host
//! without libvirt needs no library, and nothing that the library does (memory, threads, waiting for a daemon
//! that hangs) happens in viola's daemon. Whoever reads the lines needs [`Message`] only.

mod library;
mod stream;

use serde::{Deserialize, Serialize};

pub use stream::{StreamEnd, stream_events};

/// Which libvirt is asked: the one that runs the host's QEMU guests, with one daemon or several.
pub const URI: &str = "qemu:///system";

/// What libvirt says of a domain's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DomainState {
    /// It runs, or waits for something that it asked for.
    Running,
    /// An operator or libvirt has stopped it; its process is there.
    Paused,
    /// It is on its way down.
    Shutdown,
    /// Its guest has crashed and is kept.
    Crashed,
    /// Its guest has gone to sleep.
    Suspended,
    /// It does not run.
    Off,
}

impl DomainState {
    /// Of libvirt's number (`virDomainState`).
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

    /// In QMP's words, as far as it has some.
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

/// A VM as libvirt calls it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Domain {
    /// Its name; it may change while the VM does not run.
    pub name: String,
    /// Its UUID in 36 characters, which QEMU is told by `-uuid`.
    pub uuid: String,
    /// What it is doing.
    pub state: DomainState,
}

/// One line of [`tell`], as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "word", rename_all = "lowercase")]
pub enum Message {
    /// The connection stands, and these domains run; what changes from now on is told.
    #[serde(rename = "here")]
    Connected {
        /// Domains that run.
        domains: Vec<Domain>,
    },
    /// Something happened to a domain.
    Event {
        /// How it is now.
        domain: Domain,
        /// In one word: `started`, `tunable`...
        what: String,
    },
    /// The connection does not stand (any more); it is the last line.
    #[serde(rename = "gone")]
    Disconnected {
        /// Why, in one sentence.
        why: String,
        /// Whether there is no library on this host.
        no_library: bool,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_as_it_was_written() {
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
