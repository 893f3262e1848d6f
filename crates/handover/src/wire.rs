// SPDX-License-Identifier: Apache-2.0
//! Converts a connection to and from the message between a VM's agent and the host.

use viola_proto::agent::Bytes;
use viola_proto::pipe::{Connection, MAX_BUFFER_BYTES, MAX_QUEUE_BYTES};

use crate::state::{RepairWindow, SocketBuffers, TcpState, WindowScale};

/// A queue is longer than a message allows: its length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("one queue of the connection has {0} bytes, and a message holds at most {MAX_QUEUE_BYTES}")]
pub struct QueueTooLong(pub usize);

/// Converts the state for a message.
///
/// # Errors
/// [`QueueTooLong`] if a queue has more than [`MAX_QUEUE_BYTES`] bytes.
pub fn to_wire(state: TcpState) -> Result<Connection, QueueTooLong> {
    for queue in [&state.unread, &state.unacked, &state.unsent] {
        if queue.len() > MAX_QUEUE_BYTES {
            return Err(QueueTooLong(queue.len()));
        }
    }
    let w = state.window;
    Ok(Connection {
        local: state.local,
        peer: state.peer,
        mss: state.mss,
        sack: state.sack,
        window_scale: state.window_scale.map(|scale| (scale.peer, scale.own)),
        timestamp: state.timestamp,
        rcv_nxt: state.rcv_nxt,
        write_seq: state.write_seq,
        window: [w.snd_wl1, w.snd_wnd, w.max_window, w.rcv_wnd, w.rcv_wup],
        // the kernel lets a receive buffer grow beyond this (net.ipv4.tcp_rmem), and will do so again
        buffers: [
            state.buffers.send.min(MAX_BUFFER_BYTES),
            state.buffers.receive.min(MAX_BUFFER_BYTES),
            state.buffers.locked,
        ],
        unread: Bytes(state.unread),
        unacked: Bytes(state.unacked),
        unsent: Bytes(state.unsent),
        peer_finished: state.peer_finished,
        congestion: state.congestion,
        pacing: state.pacing,
    })
}

/// Converts from a message, which the receiver has checked.
pub fn from_wire(connection: Connection) -> TcpState {
    let [snd_wl1, snd_wnd, max_window, rcv_wnd, rcv_wup] = connection.window;
    let [send, receive, locked] = connection.buffers;
    TcpState {
        local: connection.local,
        peer: connection.peer,
        mss: connection.mss,
        sack: connection.sack,
        window_scale: connection
            .window_scale
            .map(|(peer, own)| WindowScale { peer, own }),
        timestamp: connection.timestamp,
        rcv_nxt: connection.rcv_nxt,
        write_seq: connection.write_seq,
        window: RepairWindow {
            snd_wl1,
            snd_wnd,
            max_window,
            rcv_wnd,
            rcv_wup,
        },
        unread: connection.unread.0,
        unacked: connection.unacked.0,
        unsent: connection.unsent.0,
        buffers: SocketBuffers {
            send,
            receive,
            locked,
        },
        peer_finished: connection.peer_finished,
        congestion: connection.congestion,
        pacing: connection.pacing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> TcpState {
        TcpState {
            local: "10.0.0.2:80".parse().unwrap(),
            peer: "10.0.0.9:4660".parse().unwrap(),
            mss: 1448,
            sack: true,
            window_scale: Some(WindowScale { peer: 7, own: 8 }),
            timestamp: Some(1),
            rcv_nxt: 2,
            write_seq: 3,
            window: RepairWindow {
                snd_wl1: 4,
                snd_wnd: 5,
                max_window: 6,
                rcv_wnd: 7,
                rcv_wup: 8,
            },
            unread: b"GET".to_vec(),
            unacked: b"HT".to_vec(),
            unsent: b"TP".to_vec(),
            buffers: SocketBuffers {
                send: 9,
                receive: 10,
                locked: 3,
            },
            peer_finished: true,
            congestion: "reno".into(),
            pacing: Some(11),
        }
    }

    #[test]
    fn a_state_is_read_back() {
        assert_eq!(from_wire(to_wire(state()).unwrap()), state());
    }

    #[test]
    fn buffers_are_cut_to_the_limit_of_a_message() {
        let mut grown = state();
        grown.buffers.receive = 33_554_432;
        assert_eq!(to_wire(grown).unwrap().buffers, [9, MAX_BUFFER_BYTES, 3]);
    }

    #[test]
    fn a_queue_above_the_limit_is_refused() {
        let mut long = state();
        long.unacked = vec![0; MAX_QUEUE_BYTES + 1];
        assert_eq!(to_wire(long), Err(QueueTooLong(MAX_QUEUE_BYTES + 1)));
    }
}
