// SPDX-License-Identifier: Apache-2.0
//! Sessions with good and bad hosts, without a kernel.

use super::session::{Session, State, Step};
use crate::clock::Millis;
use proptest::prelude::*;
use viola_proto::fuse_stream::{self, Frame, FrameKind, FrameReader, Hello, RequestHeader};

fn request(unique: u64, opcode: u32, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    bytes[..4].copy_from_slice(&(length as u32).to_le_bytes());
    bytes[4..8].copy_from_slice(&opcode.to_le_bytes());
    bytes[8..16].copy_from_slice(&unique.to_le_bytes());
    bytes
}

fn reply(unique: u64) -> Vec<u8> {
    RequestHeader { unique, opcode: 0 }.error_reply(5).to_vec()
}

fn frame(kind: FrameKind, session: u64, payload: &[u8]) -> Frame<'_> {
    Frame {
        kind,
        session,
        payload,
    }
}

/// Frames that the session has sent since the last call.
fn sent_frames(session: &mut Session) -> Vec<(FrameKind, u64, Vec<u8>)> {
    let mut frames = FrameReader::from_agent();
    let out = session.out().to_vec();
    session.sent(out.len());
    let mut out = &out[..];
    let mut all = Vec::new();
    while !out.is_empty() {
        frames.fill(&mut out).unwrap();
        while let Some(f) = frames.next(false).unwrap() {
            all.push((f.kind, f.session, f.payload.to_vec()));
        }
    }
    all
}

/// Opens a session and answers the kernel's FUSE_INIT.
fn open(session: &mut Session) {
    session.stream_opened();
    assert!(!session.tick(0, 1));
    assert_eq!(sent_frames(session)[0].0, FrameKind::Probe);
    session.handle(0, frame(FrameKind::Challenge, 70, &[1, 0, 0, 0]), 7);
    let (kind, nonce, payload) = sent_frames(session).remove(0);
    assert_eq!((kind, nonce), (FrameKind::Hello, 70));
    assert_eq!(Hello::decode(&payload).unwrap().session, 7);
    assert_eq!(
        session.handle(0, frame(FrameKind::Welcome, 7, &[0]), 0),
        Step::Begin
    );
    assert_eq!(
        session.ask(0, &request(1, fuse_stream::FUSE_INIT, 56)),
        None
    );
    let first = reply(1);
    assert_eq!(
        session.handle(0, frame(FrameKind::Reply, 7, &first), 0),
        Step::Reply(&first)
    );
    assert!(session.is_open() && session.has_init_reply());
    sent_frames(session);
}

#[test]
fn pending_requests_fail_when_the_session_ends() {
    let mut session = Session::new(9);
    assert!(session.ask(0, &request(5, 15, 80)).is_some());
    assert!(
        session
            .ask(0, &request(5, fuse_stream::FUSE_FORGET, 48))
            .is_none()
    );
    open(&mut session);
    assert_eq!(session.ask(0, &request(2, 15, 80)), None);
    assert_eq!(
        session.ask(0, &request(4, fuse_stream::FUSE_FORGET, 48)),
        None
    );
    assert_eq!(session.pending(), 1);
    assert_eq!(
        session.handle(0, frame(FrameKind::Challenge, 71, &[1, 0, 0, 0]), 0),
        Step::End
    );
    let refused = session.end();
    assert_eq!(refused.len(), 1);
    assert_eq!(refused[0].unique, 2);
    assert!(!session.is_open());
}

#[test]
fn a_new_worker_gets_the_old_init_and_must_give_the_same_reply() {
    for (same, then) in [(true, Step::Begin), (false, Step::Remount)] {
        let mut session = Session::new(9);
        open(&mut session);
        session.end();
        session.handle(0, frame(FrameKind::Challenge, 71, &[]), 8);
        let hello = Hello::decode(&sent_frames(&mut session)[0].2).unwrap();
        assert_eq!((hello.mount, hello.session), (9, 8));
        session.handle(0, frame(FrameKind::Welcome, 8, &[0]), 0);
        assert!(session.is_replaying());
        let again = sent_frames(&mut session).remove(0);
        assert_eq!(
            again,
            (
                FrameKind::Request,
                8,
                request(1, fuse_stream::FUSE_INIT, 56)
            )
        );
        let answer = reply(if same { 1 } else { 2 });
        assert_eq!(
            session.handle(0, frame(FrameKind::Reply, 8, &answer), 0),
            then
        );
    }
    // the same worker gets no FUSE_INIT
    let mut session = Session::new(9);
    open(&mut session);
    session.end();
    session.handle(0, frame(FrameKind::Challenge, 71, &[]), 8);
    assert_eq!(
        session.handle(0, frame(FrameKind::Welcome, 8, &[1]), 0),
        Step::Begin
    );
}

#[test]
fn a_silent_host_is_lost_while_requests_are_pending() {
    let mut session = Session::new(9);
    open(&mut session);
    assert!(!session.tick(100_000, 0), "nothing is waited for");
    assert_eq!(session.next_due(), Millis::MAX);
    session.ask(100_000, &request(2, 15, 80));
    let mut pings = 0;
    for now in (100_000..).step_by(500).take(10) {
        assert!(!session.tick(now, 0), "{now}");
        pings += sent_frames(&mut session)
            .iter()
            .filter(|s| s.0 == FrameKind::Ping)
            .count();
    }
    assert!((4..=5).contains(&pings), "{pings}");
    assert!(session.tick(105_000, 0));
    // a host that answers pings is alive
    session.handle(105_000, frame(FrameKind::Pong, 7, &[]), 0);
    session.bytes_received(105_000, false, true);
    assert!(!session.tick(109_000, 0));
    // a host that never completes a frame is lost
    session.bytes_received(109_000, true, false);
    session.bytes_received(113_000, true, false);
    assert!(!session.tick(113_900, 0));
    assert!(session.tick(114_000, 0));
}

#[test]
fn a_long_batch_forget_is_split_and_other_long_requests_fail() {
    let mut session = Session::new(9);
    open(&mut session);
    let count = 20_000u32;
    let mut list = request(3, fuse_stream::FUSE_BATCH_FORGET, 48 + 16 * count as usize);
    list[40..44].copy_from_slice(&count.to_le_bytes());
    for (i, entry) in list[48..].chunks_mut(16).enumerate() {
        entry[..8].copy_from_slice(&(i as u64).to_le_bytes());
    }
    assert_eq!(session.ask(0, &list), None);
    let mut next = 0u64;
    for (kind, _, part) in sent_frames(&mut session) {
        assert_eq!(kind, FrameKind::Request);
        assert!(part.len() <= fuse_stream::MAX_REQUEST_BYTES);
        assert_eq!(
            RequestHeader::decode(&part).unwrap().opcode,
            fuse_stream::FUSE_BATCH_FORGET
        );
        let entries = part[48..].chunks(16);
        assert_eq!(part[40..44], (entries.len() as u32).to_le_bytes());
        for entry in entries {
            assert_eq!(entry[..8], next.to_le_bytes());
            next += 1;
        }
    }
    assert_eq!(next, u64::from(count));
    let long = request(5, 21, fuse_stream::MAX_REQUEST_BYTES + 1);
    assert_eq!(session.ask(0, &long).unwrap().unique, 5);
    assert_eq!(session.pending(), 0);
}

#[test]
fn after_a_refusal_no_knock_is_sent_for_seconds() {
    let mut session = Session::new(9);
    session.stream_opened();
    session.tick(0, 1);
    session.handle(0, frame(FrameKind::Challenge, 70, &[]), 7);
    session.handle(0, frame(FrameKind::Refused, 70, b"too\nold"), 0);
    assert_eq!(session.refusal(), Some("tooold"));
    sent_frames(&mut session);
    session.tick(4000, 0);
    assert!(sent_frames(&mut session).is_empty());
    session.tick(5000, 0);
    assert_eq!(sent_frames(&mut session)[0].0, FrameKind::Probe);
}

fn kind() -> impl Strategy<Value = FrameKind> {
    prop_oneof![
        Just(FrameKind::Challenge),
        Just(FrameKind::Welcome),
        Just(FrameKind::Refused),
        Just(FrameKind::Reply),
        Just(FrameKind::Pong),
    ]
}

proptest! {
    #[test]
    fn every_request_is_answered_once_whatever_the_host_says(
        steps in prop::collection::vec((0u8..4, kind(), 0u64..12, 0u64..12, any::<bool>()), 1..80),
    ) {
        let mut session = Session::new(9);
        open(&mut session);
        let (mut asked, mut answered) = (0, 0);
        let mut unique = 2;
        for (now, (what, kind, number, payload, over)) in steps.into_iter().enumerate() {
            let now = now as Millis * 700;
            match what {
                0 | 1 => {
                    unique += 2;
                    asked += 1;
                    answered += usize::from(session.ask(now, &request(unique, 15, 80)).is_some());
                }
                2 => {
                    let bytes = reply(payload);
                    match session.handle(now, frame(kind, number, &bytes), number) {
                        Step::Reply(_) => answered += 1,
                        Step::End | Step::Remount => answered += session.end().len(),
                        Step::Begin | Step::Nothing => {}
                    }
                }
                _ if session.tick(now, number) || over => answered += session.end().len(),
                _ => {}
            }
            prop_assert_eq!(asked, answered + session.pending());
            prop_assert!(session.pending() == 0 || !matches!(session.state(), State::Disconnected));
        }
    }
}
