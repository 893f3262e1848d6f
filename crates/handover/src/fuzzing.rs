// SPDX-License-Identifier: Apache-2.0
//! Fuzz target: the state of TCP connections that guest and host hand each other. `scripts/fuzz.sh` runs it, and a test replays
//! the corpus.

use viola_proto::agent::{FrameReader, FromAgent, MAX_PAYLOAD_BYTES, ToAgent, frame_of};
use viola_proto::pipe::{Connection, Endpoint, MAX_QUEUE_BYTES, PipeReply, PipeRequest};

use crate::{from_wire, to_wire};

/// Runs one input; panics when a property does not hold.
///
/// Input: a byte, 0 when the host receives from an agent and 1 when the agent receives from a host; then messages, one a line,
/// each of which gets a valid frame.
pub fn connections(input: &[u8]) {
    let Some((to, rest)) = input.split_first() else {
        return;
    };
    let mut reader = FrameReader::new();
    for line in rest.split(|b| *b == b'\n') {
        reader.push(&frame_of(&line[..line.len().min(MAX_PAYLOAD_BYTES)]));
        if to % 2 == 0 {
            while let Some(message) = reader.next::<FromAgent>() {
                if let Ok(FromAgent::Pipe(PipeRequest::Start { source, sink, .. })) = message {
                    check_end(source);
                    check_end(sink);
                }
            }
        } else {
            while let Some(message) = reader.next::<ToAgent>() {
                if let Ok(ToAgent::Pipe(PipeReply::Finished { source, sink, .. })) = message {
                    source.into_iter().chain(sink).for_each(|c| check(*c));
                }
            }
        }
    }
}

fn check_end(end: Endpoint) {
    if let Endpoint::Connection { connection, .. } = end {
        check(*connection);
    }
}

fn check(connection: Connection) {
    for queue in [&connection.unread, &connection.unacked, &connection.unsent] {
        assert!(queue.0.len() <= MAX_QUEUE_BYTES);
    }
    let state = from_wire(connection.clone());
    assert_eq!(state.local.is_ipv4(), state.peer.is_ipv4());
    assert!((48..=65_535).contains(&state.mss));
    assert!(
        state
            .window_scale
            .is_none_or(|s| s.peer <= 14 && s.own <= 14)
    );
    assert!(!state.congestion.contains('\0'));
    assert!(state.queued() <= 2 * MAX_QUEUE_BYTES);
    assert_eq!(to_wire(state), Ok(connection));
}

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpus_breaks_no_property() {
        super::replay::replay("connections", super::connections);
    }
}
