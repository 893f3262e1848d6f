// SPDX-License-Identifier: Apache-2.0
//! Messages of vpipe: files that the host sends down a VM's connections.
//!
//! Between a program in the VM and its agent they are packets of a unix socket: [`library`]. Between the agent and its worker
//! on the host they travel as [`crate::agent::FromAgent::Pipe`] and [`crate::agent::ToAgent::Pipe`]. A pipe has a number that the
//! agent chooses and never uses twice in a session.
//!
//! | step | who | what | the connection's packets |
//! |---|---|---|---|
//! | 1 | agent | takes the connection out of the VM's socket, [`FromGuest::Give`] | what the peer sends is lost, and sent again |
//! | 2 | host | puts it into a socket of its own, sends; [`ToGuest::Progress`] now and then | go to the host's socket |
//! | 3 | host | takes it out again, [`ToGuest::Back`] | from the peer: kept; from the VM: pass |
//! | 4 | agent | puts it into the old descriptor, [`FromGuest::Taken`] | the same |
//! | 5 | host | lets it go | what was kept goes to the VM, and all that follows |
//!
//! Nobody waits for step 5: the VM's socket said nothing before step 4, so whatever comes from it afterwards is of the connection.
//!
//! [`ToGuest::Refused`] in place of step 2: nothing has happened, the VM's socket goes on. [`FromGuest::Stop`] asks for an early
//! step 3. When the session ends the host resets all connections that it has: a peer must never take a cut file for a whole one.

pub mod library;
pub mod shown;

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::agent::{Bytes, FileMap, FsId, MAX_EXTENTS, MAX_TEXT};

/// Most bytes in each queue of a connection that is handed over.
pub const MAX_QUEUE: usize = crate::agent::PROOF_BYTES;
/// Largest buffer of a socket that the host makes for a VM, in bytes.
pub const MAX_BUFFER: u32 = 16 << 20;

/// A pipe of a session.
pub type PipeId = u64;

/// A connection between two sockets. The fields are those of the kernel's `TCP_REPAIR` (`include/uapi/linux/tcp.h`); sequence numbers
/// are modulo 2^32.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// The VM's end.
    pub local: SocketAddr,
    /// The other end, of the same family.
    pub peer: SocketAddr,
    /// Largest segment that the peer takes, in bytes.
    pub mss: u32,
    /// Selective acknowledgements.
    pub sack: bool,
    /// Window scales of the peer and of this end, 0 to 14.
    pub scale: Option<(u8, u8)>,
    /// Own timestamp.
    pub timestamp: Option<u32>,
    /// Number after the last byte of `unread`, without a FIN.
    pub received: u32,
    /// Number after the last byte of `unacked` and `unsent`.
    pub written: u32,
    /// `snd_wl1`, `snd_wnd`, `max_window`, `rcv_wnd`, `rcv_wup` of `struct tcp_repair_window`.
    pub window: [u32; 5],
    /// Send buffer and receive buffer in bytes, and which of them are locked (1 send, 2 receive).
    pub buffers: [u32; 3],
    /// Received, not read; at most [`MAX_QUEUE`] bytes, as the other two.
    pub unread: Bytes,
    /// Sent, not acknowledged.
    pub unacked: Bytes,
    /// Written, not sent.
    pub unsent: Bytes,
    /// The peer will send no more.
    pub peer_finished: bool,
}

impl Connection {
    fn check(&self) -> Result<(), &'static str> {
        if self.local.is_ipv4() != self.peer.is_ipv4() {
            return Err("ends of different families");
        }
        if self.scale.is_some_and(|(a, b)| a > 14 || b > 14) {
            return Err("a window scale above 14");
        }
        if !(48..=65_535).contains(&self.mss) {
            return Err("a segment size that is none");
        }
        if self.buffers[0] > MAX_BUFFER || self.buffers[1] > MAX_BUFFER || self.buffers[2] > 3 {
            return Err("buffers beyond what a VM may have");
        }
        Ok(())
    }
}

/// What an agent says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromGuest {
    /// A connection, taken out of its socket, and what is to be sent down it.
    Give {
        /// A new number.
        pipe: PipeId,
        /// The connection.
        connection: Box<Connection>,
        /// MAC address to which the VM sends its packets for the peer.
        next_hop: [u8; 6],
        /// File system of the file, whose disk was proved before.
        fs: FsId,
        /// Where the file's bytes are: at least those that are to be sent.
        map: FileMap,
        /// First byte to send.
        offset: u64,
        /// How many.
        length: u64,
    },
    /// Send no more than what is sent already, and give it back.
    Stop {
        /// Given before.
        pipe: PipeId,
    },
    /// Its program has closed the connection: reset it.
    Reset {
        /// Given before.
        pipe: PipeId,
    },
    /// The connection is in the VM's socket again.
    Taken {
        /// Got back before.
        pipe: PipeId,
    },
}

/// What the host says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToGuest {
    /// Not this one: the VM's socket goes on by itself.
    Refused {
        /// Which.
        pipe: PipeId,
        /// One sentence.
        why: String,
    },
    /// It goes on.
    Progress {
        /// Which.
        pipe: PipeId,
        /// Bytes of the file that the peer has, or that are on their way to it.
        sent: u64,
    },
    /// It is over.
    Back {
        /// Which.
        pipe: PipeId,
        /// The connection as it is now; nothing when it was reset.
        connection: Option<Box<Connection>>,
        /// Bytes of the file that are acknowledged, or in the connection's queues.
        sent: u64,
        /// Why it ended early, as an errno; 0 when it did not.
        errno: i32,
    },
}

impl FromGuest {
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        match self {
            Self::Give {
                connection, map, ..
            } => {
                if map.extents.len() > MAX_EXTENTS {
                    return Err("too many extents");
                }
                connection.check()
            }
            Self::Stop { .. } | Self::Reset { .. } | Self::Taken { .. } => Ok(()),
        }
    }
}

impl ToGuest {
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        match self {
            Self::Refused { why, .. } if why.len() > MAX_TEXT => Err("a text is too long"),
            Self::Back {
                connection: Some(connection),
                ..
            } => connection.check(),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection() -> Connection {
        Connection {
            local: "10.0.0.2:80".parse().unwrap(),
            peer: "10.0.0.9:4660".parse().unwrap(),
            mss: 1448,
            sack: true,
            scale: Some((7, 7)),
            timestamp: Some(1),
            received: 2,
            written: 3,
            window: [1, 2, 3, 4, 5],
            buffers: [1 << 20, 1 << 20, 0],
            unread: Bytes(Vec::new()),
            unacked: Bytes(b"HTTP".to_vec()),
            unsent: Bytes(Vec::new()),
            peer_finished: false,
        }
    }

    #[test]
    fn a_connection_that_cannot_be_is_refused() {
        let good = connection();
        assert_eq!(good.check(), Ok(()));
        let bad: [fn(&mut Connection); 5] = [
            |c| c.peer = "[fd00::1]:1".parse().unwrap(),
            |c| c.scale = Some((15, 0)),
            |c| c.mss = 47,
            |c| c.buffers[1] = MAX_BUFFER + 1,
            |c| c.buffers[2] = 4,
        ];
        for change in bad {
            let mut c = good.clone();
            change(&mut c);
            assert!(c.check().is_err(), "{c:?}");
        }
    }

    #[test]
    fn a_connection_is_read_back() {
        let back = ToGuest::Back {
            pipe: 7,
            connection: Some(Box::new(connection())),
            sent: 9,
            errno: 0,
        };
        let text = serde_json::to_string(&back).unwrap();
        assert_eq!(serde_json::from_str::<ToGuest>(&text).unwrap(), back);
        // beside a request that is not read yet a serial line has room for it
        assert!(text.len() < 512, "{}", text.len());
    }
}
