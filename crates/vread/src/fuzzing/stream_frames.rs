// SPDX-License-Identifier: Apache-2.0
//! Fuzzes the byte stream by which the agent of a hostile VM forwards FUSE requests, and the agent's own parser.
//!
//! Input: a byte that selects the parser, and the stream. 0: the stream is sent to a server as it is. 1: it is a sequence of
//! frames in a session that the server has opened; each begins with its kind, a byte that is odd when the frame is of another
//! session, and the length of its payload, a byte each. 2: the agent parses the stream as the worker's.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use viola_proto::fuse_stream::{
    self, FUSE_IN_HEADER_BYTES, FrameKind, FrameReader, Hello, reply_unique,
};

use super::fuse_requests::{SECRET, bed};
use crate::reader::StreamServer;

const SESSION: u64 = 11;
/// Time for the threads of a stream to end.
const THREADS_TIMEOUT: Duration = Duration::from_millis(100);
/// Kinds of frames that a hostile agent sends.
const KINDS: [FrameKind; 5] = [
    FrameKind::Request,
    FrameKind::Probe,
    FrameKind::Hello,
    FrameKind::Ping,
    FrameKind::Reply,
];

/// Runs one input; panics when an invariant is violated.
pub fn stream_frames(input: &[u8]) {
    let Some((how, stream)) = input.split_first() else {
        return;
    };
    if how % 3 == 2 {
        for cut in [1, 1 + usize::from(*how), stream.len().max(1)] {
            let mut frames = FrameReader::from_worker();
            for mut piece in stream.chunks(cut) {
                while !piece.is_empty() {
                    assert_ne!(frames.fill(&mut piece).expect("bytes"), Some(0));
                    take_all(&mut frames, &mut |_, _, _| {});
                }
            }
        }
        return;
    }
    let threads_before = thread_count();
    let (mut client, server) = UnixStream::pair().expect("sockets");
    let streams = StreamServer::new(bed().service.clone(), 0);
    streams.replace(server.into()).expect("threads");
    let mut frames = FrameReader::from_worker();
    let mut sent = stream.to_vec();
    if how % 3 == 1 {
        let mut nonce = None;
        while nonce.is_none() {
            assert_ne!(frames.fill(&mut client).expect("bytes"), Some(0));
            take_all(&mut frames, &mut |kind, session, _| {
                nonce = (kind == FrameKind::Challenge).then_some(session).or(nonce);
            });
        }
        let hello = Hello {
            version: fuse_stream::VERSION,
            session: SESSION,
            mount: 1,
        };
        sent = in_session(stream, nonce.unwrap_or_default(), &hello);
    }
    // All of it fits into the socket's buffer.
    client.write_all(&sent).expect("room in the socket");
    client.shutdown(std::net::Shutdown::Write).expect("an end");
    let mut received = Vec::new();
    client.read_to_end(&mut received).expect("the end");
    let mut received = &received[..];
    while !received.is_empty() {
        assert_ne!(frames.fill(&mut received).expect("bytes"), Some(0));
        take_all(&mut frames, &mut |kind, session, payload| {
            assert!(!matches!(kind, FrameKind::Request | FrameKind::Hello));
            if kind != FrameKind::Reply {
                return;
            }
            assert_eq!(session, SESSION);
            assert!(reply_unique(payload).is_some(), "{payload:?}");
            // These bytes come from the disk unless a request contained them.
            let secret = payload.windows(16).any(|bytes| bytes == [SECRET; 16]);
            assert!(!secret || sent.windows(8).any(|bytes| bytes == [SECRET; 8]));
        });
    }
    assert!(!frames.is_partial(), "a reply without its end");
    // The leak checker reports what a thread that is just ending has. Beside other tests the count may stay higher.
    let end = Instant::now() + THREADS_TIMEOUT;
    while thread_count() > threads_before && Instant::now() < end {
        std::thread::sleep(Duration::from_micros(50));
    }
}

fn thread_count() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count)
}

/// Takes the frames that have arrived.
fn take_all(frames: &mut FrameReader, each: &mut dyn FnMut(FrameKind, u64, &[u8])) {
    loop {
        match frames.next(false) {
            Ok(Some(frame)) => {
                assert!(frame.payload.len() <= frame.kind.max_payload_bytes());
                each(frame.kind, frame.session, frame.payload);
            }
            Ok(None) => return,
            Err(_) => frames.skip(),
        }
    }
}

/// The stream of an agent that opens a session and sends frames.
fn in_session(mut rest: &[u8], nonce: u64, hello: &Hello) -> Vec<u8> {
    let mut out = Vec::new();
    fuse_stream::push_frame(&mut out, FrameKind::Hello, nonce, &hello.encode());
    while let Some(([kind, other, length], after)) = rest.split_first_chunk::<3>() {
        let kind = KINDS[usize::from(*kind) % KINDS.len()];
        let max_length = usize::from(*length).min(kind.max_payload_bytes());
        let (body, after) = after.split_at(after.len().min(max_length));
        rest = after;
        let session = SESSION + u64::from(other & 1);
        let payload = match (kind, body) {
            (FrameKind::Request, [operation, node, body @ ..]) => {
                let mut bytes = Vec::with_capacity(FUSE_IN_HEADER_BYTES + body.len());
                bytes.extend(((FUSE_IN_HEADER_BYTES + body.len()) as u32).to_le_bytes());
                bytes.extend(u32::from(*operation).to_le_bytes());
                bytes.extend([9; 8]);
                bytes.extend(u64::from(*node).to_le_bytes());
                bytes.extend([0; 16]);
                bytes.extend(body);
                bytes
            }
            _ => body.to_vec(),
        };
        fuse_stream::push_frame(&mut out, kind, session, &payload);
    }
    out
}
