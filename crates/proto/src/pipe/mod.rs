// SPDX-License-Identifier: Apache-2.0
//! Messages of vpipe: the host moves bytes for a VM, between files and TCP connections.
//!
//! A program in the VM talks to its agent over a unix socket: [`library`]. The agent and its worker on the host
//! exchange [`PipeRequest`] and [`PipeReply`] in [`crate::agent::FromAgent::Pipe`] and
//! [`crate::agent::ToAgent::Pipe`]. The agent numbers the pipes and never uses a number twice in a session.
//!
//! For example, the agent sends a file: it extracts the connection from the VM's socket and sends
//! [`PipeRequest::Start`]. The host restores the connection in a socket of its own, sends the file, extracts the
//! connection again and returns it in [`PipeReply::Finished`]. The agent restores it in the VM's socket and sends
//! [`PipeRequest::Restored`].
//!
//! | step | side | action | packets of the connection |
//! |---|---|---|---|
//! | 0 | agent, host | [`PipeRequest::Hold`] of a source connection; [`PipeReply::Held`] | from the peer: held; from the VM: pass |
//! | 1 | agent | extracts the connections, [`PipeRequest::Start`] | from the peer of a connection without step 0: dropped, and retransmitted |
//! | 2 | host | restores them in its sockets, moves bytes; [`PipeReply::Progress`] from time to time | redirected to the host's socket, held ones first |
//! | 3 | host | extracts them again; [`PipeReply::Unread`] for long queues, [`PipeReply::Finished`] | from the peer: held; from the VM: pass |
//! | 4 | agent | restores them in the VM's sockets, [`PipeRequest::Restored`] | as in step 3 |
//! | 5 | host | releases them | the held ones go to the VM, and all that follow |
//!
//! The VM does not wait for step 5. Its socket is silent before step 4, so every packet that it sends in steps 3 and
//! 4 belongs to the restored connection.
//!
//! Step 0 is for a source whose peer sends all the time: no packet is lost, and the VM can empty its receive queue
//! before step 1. A copy from file to file has steps 1 to 3 only.
//!
//! [`PipeReply::Refused`] instead of step 2 means that the host did nothing and the VM's sockets go on.
//! [`PipeRequest::Stop`] asks for an early step 3, or releases a held connection. When the session ends, the host
//! resets all connections that it has: a peer must never take a truncated file for a complete one.

mod connection;
pub mod library;
pub mod status;

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

pub use connection::Connection;

use crate::agent::{Bytes, FileMap, FsId, MAX_EXTENTS, MAX_TEXT_BYTES};

/// Most bytes of one queue of a connection in one message.
pub const MAX_QUEUE_BYTES: usize = crate::agent::PROOF_BYTES;
/// Largest socket buffer that the host gives to a VM's connection.
pub const MAX_BUFFER_BYTES: u32 = 16 << 20;

/// Longest name of a congestion control (`TCP_CA_NAME_MAX` of the kernel without the terminating zero).
pub const MAX_CONGESTION_NAME_BYTES: usize = 15;

/// Number of a pipe in a session.
pub type PipeId = u64;

/// One end of a pipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Endpoint {
    /// A part of a file.
    File {
        /// File system of the file. The agent has proved its disk.
        fs: FsId,
        /// Extents of the bytes to be moved. The extents of a sink have neither holes nor unwritten blocks.
        map: FileMap,
        /// Offset of the first byte in the file.
        offset: u64,
    },
    /// A connection that the agent extracted from its socket.
    Connection {
        /// The connection.
        connection: Box<Connection>,
        /// MAC address to which the VM sends packets for the peer.
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

/// A request of the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PipeRequest {
    /// Holds packets of the peer of a connection that will be the source of a pipe. The host answers
    /// [`PipeReply::Held`] or [`PipeReply::Refused`].
    Hold {
        /// A new number.
        pipe: PipeId,
        /// The VM's end.
        local: SocketAddr,
        /// The other end.
        peer: SocketAddr,
    },
    /// Starts to move bytes. The bytes in the source's `unread` come first.
    Start {
        /// A new number, or that of a [`PipeRequest::Hold`] of the source.
        pipe: PipeId,
        /// Where the bytes come from.
        source: Endpoint,
        /// Where they go.
        sink: Endpoint,
        /// Number of bytes; fewer are moved when the source ends before.
        length: u64,
    },
    /// Stops a pipe and returns its connections, or releases a held connection.
    Stop {
        /// A held or started pipe.
        pipe: PipeId,
    },
    /// Resets all connections of a pipe: its program has closed one of them.
    Reset {
        /// A started pipe.
        pipe: PipeId,
    },
    /// The agent has restored the returned connections in the VM's sockets.
    Restored {
        /// A finished pipe.
        pipe: PipeId,
    },
}

/// A reply of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PipeReply {
    /// The host holds the packets of the connection's peer from now on.
    Held {
        /// Number of the pipe.
        pipe: PipeId,
    },
    /// The host did nothing: the VM goes on with its sockets. Also the answer to a stop of a held connection.
    Refused {
        /// Number of the pipe.
        pipe: PipeId,
        /// One sentence.
        why: String,
    },
    /// The pipe moves bytes.
    Progress {
        /// Number of the pipe.
        pipe: PipeId,
        /// Bytes moved so far.
        sent: u64,
    },
    /// A part of a receive queue that is longer than one message holds. These parts come in order; the last part is
    /// in [`PipeReply::Finished`].
    Unread {
        /// Number of the pipe.
        pipe: PipeId,
        /// Whether the bytes are of the source's connection, or of the sink's.
        source: bool,
        /// The next bytes; at most [`MAX_QUEUE_BYTES`].
        bytes: Bytes,
    },
    /// The pipe has ended.
    Finished {
        /// Number of the pipe.
        pipe: PipeId,
        /// The source's connection; absent when it was reset, or is a file.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        source: Option<Box<Connection>>,
        /// The sink's connection; absent when it was reset, or is a file.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sink: Option<Box<Connection>>,
        /// Bytes moved: acknowledged by the sink's peer, in the sink's queues, or written to the file.
        sent: u64,
        /// Errno of an early end; 0 after a stop, and when the source had no more bytes.
        #[serde(default, skip_serializing_if = "is_zero_errno")]
        errno: i32,
        /// How long the host had the connections, in microseconds; 0 when unknown.
        #[serde(default, skip_serializing_if = "is_zero_micros")]
        host_us: u64,
    },
}

fn is_zero_micros(micros: &u64) -> bool {
    *micros == 0
}

fn is_zero_errno(errno: &i32) -> bool {
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
            r#"{"restored":{"pipe":1}}"#
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
            text.starts_with(r#"{"start":{"pipe":1,"source":{"file":"#),
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
            r#"{"finished":{"pipe":1,"sent":2,"errno":3,"host_us":4}}"#
        );
        assert_eq!(json(&PipeReply::Held { pipe: 1 }), r#"{"held":{"pipe":1}}"#);
    }

    #[test]
    fn an_invalid_connection_is_refused() {
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
    fn a_connection_without_congestion_control_and_pacing_is_read() {
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
                // the VM's socket keeps its own
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
    fn a_finished_message_is_short() {
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
        // a UML guest reads its serial line byte by byte: each costs the host a system call of about 0.7 us
        assert!(text.len() < 240, "{}: {text}", text.len());
    }
}
