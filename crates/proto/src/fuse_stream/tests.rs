// SPDX-License-Identifier: Apache-2.0
//! Complete, split, truncated and random streams.

use super::*;
use proptest::prelude::*;

/// Complete frames of an agent's stream that arrives in pieces of `cut` bytes.
fn frames_of(bytes: &[u8], cut: usize, handshake: bool) -> Vec<(FrameKind, u64, Vec<u8>)> {
    let mut frames = FrameReader::from_agent();
    let mut all = Vec::new();
    for mut piece in bytes.chunks(cut.max(1)) {
        while !piece.is_empty() {
            frames.fill(&mut piece).unwrap();
            loop {
                match frames.next(handshake) {
                    Ok(Some(f)) => all.push((f.kind, f.session, f.payload.to_vec())),
                    Ok(None) => break,
                    Err(_) => frames.skip(),
                }
            }
        }
    }
    all
}

#[test]
fn a_frame_reads_back_as_it_was_written() {
    let hello = Hello {
        version: 1,
        session: u64::MAX - 3,
        mount: 9,
    };
    assert_eq!(Hello::decode(&hello.encode()), Some(hello));
    let mut bytes = Vec::new();
    push_frame(&mut bytes, FrameKind::Hello, 5, &hello.encode());
    push_frame(&mut bytes, FrameKind::Request, 7, &[8; 100]);
    let all = frames_of(&bytes, 13, false);
    assert_eq!(all[0], (FrameKind::Hello, 5, hello.encode().to_vec()));
    assert_eq!(all[1], (FrameKind::Request, 7, vec![8; 100]));
    // during the handshake no other frame is valid
    assert_eq!(frames_of(&bytes, 1000, true).len(), 1);
    for kind in FrameKind::ALL {
        assert_eq!(FrameKind::of(kind.number()), Some(kind));
    }
}

#[test]
fn long_and_unexpected_frames_are_refused_at_the_header() {
    let mut frames = FrameReader::from_agent();
    let mut long = header(FrameKind::Request, 1, 0);
    long[8..12].copy_from_slice(&(MAX_REQUEST_BYTES as u32 + 1).to_le_bytes());
    frames.fill(&mut &long[..]).unwrap();
    assert_eq!(
        frames.next(false),
        Err(FrameError::TooLong(MAX_REQUEST_BYTES + 1))
    );
    frames.clear();
    frames
        .fill(&mut &header(FrameKind::Reply, 1, 5)[..])
        .unwrap();
    assert_eq!(
        frames.next(false),
        Err(FrameError::Unexpected(FrameKind::Reply))
    );
    frames.clear();
    frames.fill(&mut &b"Vf"[..]).unwrap();
    assert_eq!(frames.next(false), Ok(None));
    frames.fill(&mut &b"x"[..]).unwrap();
    assert_eq!(frames.next(false), Err(FrameError::BadHeader));
}

#[test]
fn a_truncated_reply_with_frames_of_another_writer_behind_it_is_never_complete() {
    let mut bytes = Vec::new();
    push_frame(&mut bytes, FrameKind::Reply, 77, &[1; 500]);
    for lost in 1..bytes.len() {
        let mut stream = bytes[..bytes.len() - lost].to_vec();
        for _ in 0..40 {
            push_frame(
                &mut stream,
                FrameKind::Challenge,
                1234,
                &VERSION.to_le_bytes(),
            );
        }
        let mut frames = FrameReader::from_worker();
        let mut left = &stream[..];
        let mut challenges = 0;
        while frames.fill(&mut left).unwrap() != Some(0) {
            loop {
                match frames.next(false) {
                    Ok(Some(f)) => {
                        assert_eq!(f.kind, FrameKind::Challenge, "{lost}");
                        challenges += 1;
                    }
                    Ok(None) => break,
                    Err(_) => frames.skip(),
                }
            }
        }
        assert!(challenges > 0, "{lost}");
    }
}

#[test]
fn requests_and_replies_are_matched_by_their_headers() {
    let mut request = vec![0; 48];
    request[..4].copy_from_slice(&48u32.to_le_bytes());
    request[4..8].copy_from_slice(&15u32.to_le_bytes());
    request[8..16].copy_from_slice(&4711u64.to_le_bytes());
    let header = RequestHeader::decode(&request).unwrap();
    assert_eq!((header.unique, header.opcode), (4711, 15));
    assert!(header.expects_reply());
    assert_eq!(reply_unique(&header.error_reply(5)), Some(4711));
    assert_eq!(header.error_reply(5)[4..8], (-5i32).to_le_bytes());
    assert_eq!(RequestHeader::decode(&request[..47]), None);
    assert_eq!(reply_unique(&header.error_reply(5)[..15]), None);
}

proptest! {
    #[test]
    fn a_frame_behind_random_bytes_is_found(
        junk in prop::collection::vec(any::<u8>(), 0..400),
        magic in any::<bool>(),
        cut in 1usize..300,
    ) {
        let mut bytes = junk;
        if magic {
            bytes.extend_from_slice(&MAGIC);
        }
        push_frame(&mut bytes, FrameKind::Hello, 3, &[0; Hello::BYTES]);
        // random bytes may begin a frame that takes the first of these with it
        push_frame(&mut bytes, FrameKind::Hello, 3, &[0; Hello::BYTES]);
        let all = frames_of(&bytes, cut, true);
        prop_assert!(all.iter().any(|(kind, session, _)| *kind == FrameKind::Hello && *session == 3));
    }

    #[test]
    fn frames_do_not_depend_on_the_size_of_reads(
        payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 1..20),
        cut in 1usize..700,
    ) {
        let mut bytes = Vec::new();
        for payload in &payloads {
            push_frame(&mut bytes, FrameKind::Request, 11, payload);
        }
        let all: Vec<Vec<u8>> = frames_of(&bytes, cut, false).into_iter().map(|f| f.2).collect();
        prop_assert_eq!(all, payloads);
    }
}
