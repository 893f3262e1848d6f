// SPDX-License-Identifier: Apache-2.0
//! What a guest does to look as if its packets could not wait.

use std::net::Ipv4Addr;

use viola_lab::Guest;

use crate::harness::guests::shell;
use viola_cli::error::Outcome;

/// A trick.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trick {
    /// Beside its work it asks the host's kernel, which answers at once: each answer is a packet for it that it has caused itself.
    OwnPackets,
    /// The same with eight such programs at a time, and large packets.
    Flood,
    /// For one second it asks and computes nothing, for one second it computes.
    Alternates,
}

impl Trick {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::OwnPackets, Self::Flood, Self::Alternates];

    /// Name in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::OwnPackets => "packets to itself",
            Self::Flood => "flood",
            Self::Alternates => "alternates each second",
        }
    }

    /// Script in the guest. `HOST` is the address of the lab's bridge.
    fn script(self) -> &'static str {
        match self {
            Self::OwnPackets => "compute & while :; do ping -A -c 1000000 HOST; done",
            Self::Flood => {
                "compute & for i in 1 2 3 4 5 6 7; do ping -A -s 1400 -c 100000000 HOST & done; \
                 ping -A -s 1400 -c 100000000 HOST"
            }
            Self::Alternates => {
                "while :; do timeout 1 ping -A -c 1000000 HOST; timeout 1 sh -c 'while :; do :; done'; done"
            }
        }
    }

    /// Starts it in a guest. `host` is the address of the lab's bridge.
    ///
    /// # Errors
    /// The guest does not answer.
    pub fn start(self, guest: &Guest, host: Ipv4Addr) -> Outcome<Running<'_>> {
        let script = format!(
            "cat >/run/trick <<END\ncompute() {{ while :; do :; done; }}\n{}\nEND\n\
             setsid sh /run/trick </dev/null >/dev/null 2>&1 & echo $!",
            self.script().replace("HOST", &host.to_string())
        );
        let pid = shell(guest, &script)?.stdout.trim().to_owned();
        Ok(Running { guest, pid })
    }
}

/// A running trick.
pub struct Running<'a> {
    guest: &'a Guest,
    pid: String,
}

impl Running<'_> {
    /// Ends it.
    ///
    /// # Errors
    /// The guest does not answer, or the trick has ended by itself.
    pub fn stop(self) -> Outcome {
        shell(self.guest, &format!("kill -9 -{}", self.pid)).map(drop)
    }
}
