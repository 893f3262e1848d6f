// SPDX-License-Identifier: Apache-2.0
//! Messages of vpipe: bytes that the host moves for a VM, from a file or a connection to another one.
//!
//! Between a program in the VM and its agent they are packets of a unix socket: [`library`]. Between the agent and its worker
//! on the host they travel as [`crate::agent::FromAgent::Pipe`] and [`crate::agent::ToAgent::Pipe`]. A pipe has a number that the
//! agent chooses and never uses twice in a session.
//!
//! | step | who | what | a connection's packets |
//! |---|---|---|---|
//! | 0 | agent | [`PipeRequest::Hold`] of a connection that bytes come from; host: [`PipeReply::Held`] | from the peer: kept; from the VM: pass |
//! | 1 | agent | takes the connections out of the VM's sockets, [`PipeRequest::Start`] | of one that was not held: what the peer sends is lost, and sent again |
//! | 2 | host | puts them into sockets of its own, moves bytes; [`PipeReply::Progress`] now and then | go to the host's socket, first what was kept |
//! | 3 | host | takes them out again, [`PipeReply::Unread`] where there is much, [`PipeReply::Finished`] | from the peer: kept; from the VM: pass |
//! | 4 | agent | puts them into the old descriptors, [`PipeRequest::Restored`] | the same |
//! | 5 | host | lets them go | what was kept goes to the VM, and all that follows |
//!
//! Nobody waits for step 5: the VM's socket said nothing before step 4, so whatever comes from it afterwards is of the connection.
//!
//! Step 0 is for a connection whose peer is sending all the time: nothing of that is lost, and the VM can empty its queue
//! meanwhile. From a file to a file there are only steps 1 to 3.
//!
//! [`PipeReply::Refused`] in place of step 2: nothing has happened, the VM's socket goes on. [`PipeRequest::Stop`] asks for an early
//! step 3; of what is only held, it lets it go. When the session ends the host resets all connections that it has: a peer must never take a cut file for a whole one.

pub mod library;
pub mod status;

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::agent::{Bytes, FileMap, FsId, MAX_EXTENTS, MAX_TEXT_BYTES};

/// Most bytes in each queue of a connection that is handed over, in one message.
pub const MAX_QUEUE_BYTES: usize = crate::agent::PROOF_BYTES;
/// Largest buffer of a socket that the host makes for a VM, in bytes.
pub const MAX_BUFFER_BYTES: u32 = 16 << 20;

/// Longest name of a congestion control, in bytes (`TCP_CA_NAME_MAX` of the kernel, without the zero behind it).
pub const MAX_CONGESTION_NAME_BYTES: usize = 15;

/// A pipe of a session.
pub type PipeId = u64;

/// A connection between two sockets. The fields are those of the kernel's `TCP_REPAIR` (`include/uapi/linux/tcp.h`); sequence numbers
/// are modulo 2^32.
///
/// On the wire it is a row without names, and what is seldom there is left out: a guest may read its line byte by byte.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Row", into = "Row")]
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
    pub window_scale: Option<(u8, u8)>,
    /// Own timestamp.
    pub timestamp: Option<u32>,
    /// Number after the last byte of `unread`, without a FIN.
    pub rcv_nxt: u32,
    /// Number after the last byte of `unacked` and `unsent`.
    pub write_seq: u32,
    /// `snd_wl1`, `snd_wnd`, `max_window`, `rcv_wnd`, `rcv_wup` of `struct tcp_repair_window`.
    pub window: [u32; 5],
    /// Send buffer and receive buffer in bytes, and which of them are locked (1 send, 2 receive).
    pub buffers: [u32; 3],
    /// Received, not read; at most [`MAX_QUEUE_BYTES`] bytes, as the other two.
    pub unread: Bytes,
    /// Sent, not acknowledged.
    pub unacked: Bytes,
    /// Written, not sent.
    pub unsent: Bytes,
    /// The peer will send no more.
    pub peer_finished: bool,
    /// Name of this end's congestion control, at most [`MAX_CONGESTION_NAME_BYTES`] bytes of `a-z0-9_`; empty where it is not told.
    pub congestion: String,
    /// Cap of this end's pacing in bytes a second (`SO_MAX_PACING_RATE`), if there is one.
    pub pacing: Option<u64>,
}

/// A [`Connection`] on the wire: both ends, what they have agreed on, numbers, and what else there is.
#[derive(Serialize, Deserialize)]
struct Row(SocketAddr, SocketAddr, Agreed, Numbers, More);

/// `mss`, `sack`, `scale`.
#[derive(Serialize, Deserialize)]
struct Agreed(u32, bool, Option<(u8, u8)>);

/// `timestamp`, `received`, `written`, `window`, `buffers`.
#[derive(Serialize, Deserialize)]
struct Numbers(Option<u32>, u32, u32, [u32; 5], [u32; 3]);

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct More {
    #[serde(default, skip_serializing_if = "Bytes::is_empty")]
    unread: Bytes,
    #[serde(default, skip_serializing_if = "Bytes::is_empty")]
    unacked: Bytes,
    #[serde(default, skip_serializing_if = "Bytes::is_empty")]
    unsent: Bytes,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    peer_finished: bool,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    congestion: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pacing: Option<u64>,
}

impl From<Row> for Connection {
    fn from(row: Row) -> Self {
        let Row(local, peer, Agreed(mss, sack, window_scale), numbers, more) = row;
        let Numbers(timestamp, rcv_nxt, write_seq, window, buffers) = numbers;
        Self {
            local,
            peer,
            mss,
            sack,
            window_scale,
            timestamp,
            rcv_nxt,
            write_seq,
            window,
            buffers,
            unread: more.unread,
            unacked: more.unacked,
            unsent: more.unsent,
            peer_finished: more.peer_finished,
            congestion: more.congestion,
            pacing: more.pacing,
        }
    }
}

impl From<Connection> for Row {
    fn from(c: Connection) -> Self {
        Self(
            c.local,
            c.peer,
            Agreed(c.mss, c.sack, c.window_scale),
            Numbers(c.timestamp, c.rcv_nxt, c.write_seq, c.window, c.buffers),
            More {
                unread: c.unread,
                unacked: c.unacked,
                unsent: c.unsent,
                peer_finished: c.peer_finished,
                congestion: c.congestion,
                pacing: c.pacing,
            },
        )
    }
}

impl Connection {
    fn check(&self) -> Result<(), &'static str> {
        if self.local.is_ipv4() != self.peer.is_ipv4() {
            return Err("ends of different families");
        }
        if self.window_scale.is_some_and(|(a, b)| a > 14 || b > 14) {
            return Err("a window scale above 14");
        }
        if !(48..=65_535).contains(&self.mss) {
            return Err("a segment size that is none");
        }
        if self.buffers[0] > MAX_BUFFER_BYTES
            || self.buffers[1] > MAX_BUFFER_BYTES
            || self.buffers[2] > 3
        {
            return Err("buffers beyond what a VM may have");
        }
        let is_part = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        if self.congestion.len() > MAX_CONGESTION_NAME_BYTES
            || !self.congestion.bytes().all(is_part)
        {
            return Err("a congestion control that has no such name");
        }
        Ok(())
    }
}

/// One end of a pipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Endpoint {
    /// A file, from a place on.
    File {
        /// Its file system, whose disk was proved before.
        fs: FsId,
        /// Where its bytes are: at least those that are to be moved; of one that is written to without any hole, or block that
        /// reads as zeros because nothing was written to it.
        map: FileMap,
        /// First byte.
        offset: u64,
    },
    /// A connection, taken out of its socket.
    Connection {
        /// The connection.
        connection: Box<Connection>,
        /// MAC address to which the VM sends its packets for the peer.
        next_hop: [u8; 6],
    },
}

impl Endpoint {
    fn check(&self) -> Result<(), &'static str> {
        match self {
            Self::File { map, .. } if map.extents.len() > MAX_EXTENTS => Err("too many extents"),
            Self::File { .. } => Ok(()),
            Self::Connection { connection, .. } => connection.check(),
        }
    }
}

/// What an agent says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PipeRequest {
    /// A connection will be given whose peer must lose nothing until then. Answered with [`PipeReply::Held`], or
    /// [`PipeReply::Refused`].
    Hold {
        /// A new number.
        pipe: PipeId,
        /// The VM's end.
        local: SocketAddr,
        /// The other end.
        peer: SocketAddr,
    },
    /// What is to be moved. Bytes that wait in the source's `unread` are the first of them.
    #[serde(rename = "give")]
    Start {
        /// A new number, or that of a [`PipeRequest::Hold`] of the source.
        pipe: PipeId,
        /// From here.
        source: Endpoint,
        /// To there.
        sink: Endpoint,
        /// How many bytes; fewer when the source ends before.
        length: u64,
    },
    /// Move no more, and give back what was given; let go what was only held.
    Stop {
        /// Held or given before.
        pipe: PipeId,
    },
    /// Its program has closed a connection of it: reset them all.
    Reset {
        /// Given before.
        pipe: PipeId,
    },
    /// The connections that came back are in the VM's sockets again.
    #[serde(rename = "taken")]
    Restored {
        /// Got back before.
        pipe: PipeId,
    },
}

/// What the host says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PipeReply {
    /// The connection's peer loses nothing from now on.
    Held {
        /// Which.
        pipe: PipeId,
    },
    /// Not this one: the VM goes on by itself. Of one that was stopped while it was held, too.
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
        /// Bytes that were moved so far.
        sent: u64,
    },
    /// Part of what the peer has said and nobody has read, where it is more than a message holds: each part, then the rest in
    /// [`PipeReply::Finished`].
    Unread {
        /// Which.
        pipe: PipeId,
        /// Of the source's connection; else of the sink's.
        source: bool,
        /// What follows the part before; at most [`MAX_QUEUE_BYTES`] bytes.
        bytes: Bytes,
    },
    /// It is over.
    #[serde(rename = "back")]
    Finished {
        /// Which.
        pipe: PipeId,
        /// The source's connection as it is now; nothing when it was reset, or is a file.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        source: Option<Box<Connection>>,
        /// The sink's, as the source's.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sink: Option<Box<Connection>>,
        /// Bytes that were moved: they are acknowledged, in the sink's queues, or in the file.
        sent: u64,
        /// Why it ended early, as an errno; 0 when it did not, when it was stopped, and when the source had no more.
        #[serde(default, skip_serializing_if = "is_zero")]
        errno: i32,
        /// For so long the host had the connections, in microseconds.
        #[serde(rename = "spent", default, skip_serializing_if = "is_no_time")]
        host_us: u64,
    },
}

fn is_no_time(micros: &u64) -> bool {
    *micros == 0
}

fn is_zero(errno: &i32) -> bool {
    *errno == 0
}

impl PipeRequest {
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        match self {
            Self::Hold { local, peer, .. } if local.is_ipv4() != peer.is_ipv4() => {
                Err("ends of different families")
            }
            Self::Start { source, sink, .. } => source.check().and_then(|()| sink.check()),
            Self::Hold { .. } => Ok(()),
            Self::Stop { .. } | Self::Reset { .. } | Self::Restored { .. } => Ok(()),
        }
    }
}

impl PipeReply {
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        match self {
            Self::Refused { why, .. } if why.len() > MAX_TEXT_BYTES => Err("a text is too long"),
            Self::Finished { source, sink, .. } => {
                let mut both = [source, sink].into_iter().flatten();
                both.try_for_each(|connection| connection.check())
            }
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
            window_scale: Some((7, 7)),
            timestamp: Some(1),
            rcv_nxt: 2,
            write_seq: 3,
            window: [1, 2, 3, 4, 5],
            buffers: [1 << 20, 1 << 20, 0],
            unread: Bytes(Vec::new()),
            unacked: Bytes(b"HTTP".to_vec()),
            unsent: Bytes(Vec::new()),
            peer_finished: false,
            congestion: "cubic".into(),
            pacing: Some(1_000_000),
        }
    }

    /// Agent and worker may be of different releases: names on the wire never change.
    #[test]
    fn messages_keep_their_names_on_the_wire() {
        let json = |message: &PipeReply| serde_json::to_string(message).unwrap();
        assert_eq!(
            serde_json::to_string(&PipeRequest::Restored { pipe: 1 }).unwrap(),
            r#"{"taken":{"pipe":1}}"#
        );
        let file = Endpoint::File {
            fs: 1,
            map: FileMap::default(),
            offset: 0,
        };
        let start = PipeRequest::Start {
            pipe: 1,
            source: file.clone(),
            sink: file,
            length: 2,
        };
        let text = serde_json::to_string(&start).unwrap();
        assert!(
            text.starts_with(r#"{"give":{"pipe":1,"source":{"file":"#),
            "{text}"
        );
        let finished = PipeReply::Finished {
            pipe: 1,
            source: None,
            sink: None,
            sent: 2,
            errno: 3,
            host_us: 4,
        };
        assert_eq!(
            json(&finished),
            r#"{"back":{"pipe":1,"sent":2,"errno":3,"spent":4}}"#
        );
        assert_eq!(json(&PipeReply::Held { pipe: 1 }), r#"{"held":{"pipe":1}}"#);
    }

    #[test]
    fn a_connection_that_cannot_be_is_refused() {
        let good = connection();
        assert_eq!(good.check(), Ok(()));
        let bad: [fn(&mut Connection); 8] = [
            |c| c.peer = "[fd00::1]:1".parse().unwrap(),
            |c| c.window_scale = Some((15, 0)),
            |c| c.mss = 47,
            |c| c.buffers[1] = MAX_BUFFER_BYTES + 1,
            |c| c.buffers[2] = 4,
            |c| c.congestion = "a_name_that_long".into(),
            |c| c.congestion = "a/b".into(),
            |c| c.congestion = "\0".into(),
        ];
        for change in bad {
            let mut c = good.clone();
            change(&mut c);
            assert!(c.check().is_err(), "{c:?}");
        }
    }

    #[test]
    fn one_of_an_agent_that_tells_nothing_of_its_pace_is_read() {
        let mut silent = connection();
        (silent.congestion, silent.pacing) = (String::new(), None);
        let text = serde_json::to_string(&silent).unwrap();
        assert!(
            !text.contains("congestion") && !text.contains("pacing"),
            "{text}"
        );
        assert_eq!(serde_json::from_str::<Connection>(&text).unwrap(), silent);
    }

    #[test]
    fn a_connection_is_read_back() {
        let back = PipeReply::Finished {
            pipe: 7,
            source: None,
            sink: Some(Box::new(Connection {
                // the VM's socket has kept its own
                congestion: String::new(),
                pacing: None,
                ..connection()
            })),
            sent: 9,
            errno: 0,
            host_us: 1,
        };
        let text = serde_json::to_string(&back).unwrap();
        assert_eq!(serde_json::from_str::<PipeReply>(&text).unwrap(), back);
    }

    #[test]
    fn what_comes_back_is_short() {
        let nothing = || Bytes(Vec::new());
        let numbers = u32::MAX - 1;
        let back = PipeReply::Finished {
            pipe: 12_345,
            source: None,
            sink: Some(Box::new(Connection {
                local: "10.200.100.211:8080".parse().unwrap(),
                peer: "10.200.100.109:44660".parse().unwrap(),
                timestamp: Some(numbers),
                rcv_nxt: numbers,
                write_seq: numbers,
                window: [numbers, 64_128, 64_128, 65_536, numbers],
                buffers: [4_194_304, 131_072, 0],
                unread: nothing(),
                unacked: nothing(),
                congestion: String::new(),
                pacing: None,
                ..connection()
            })),
            sent: 268_435_456,
            errno: 0,
            host_us: 1_000_000,
        };
        let text = serde_json::to_string(&back).unwrap();
        assert_eq!(serde_json::from_str::<PipeReply>(&text).unwrap(), back);
        // each byte is a system call of a User Mode Linux guest's host, of two thirds of a microsecond
        assert!(text.len() < 240, "{}: {text}", text.len());
    }
}
