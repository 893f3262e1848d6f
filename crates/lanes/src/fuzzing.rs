// SPDX-License-Identifier: Apache-2.0
//! Fuzz target: what viola-agent in a hostile guest replies about VFs, and the journal of VFs. `scripts/fuzz.sh` runs it, and
//! a test replays the corpus.

use viola_proto::agent::{FrameReader, MAX_PAYLOAD_BYTES, frame_of};

use crate::{agent, journal};

/// The number of the request to which a reply is awaited.
const REQUEST: u64 = 7;

/// Runs one input; panics when a property does not hold.
///
/// The first byte chooses the target: 0 the agent's byte stream; 1 replies, one a line, each of which gets a valid frame; 2 a
/// journal.
pub fn lanes(input: &[u8]) {
    let Some((target, rest)) = input.split_first() else {
        return;
    };
    let mut reader = FrameReader::new();
    match target % 3 {
        0 => {
            for piece in rest.chunks(1 + usize::from(*target)) {
                reader.push(piece);
                check(&mut reader);
            }
        }
        1 => {
            for line in rest.split(|b| *b == b'\n') {
                reader.push(&frame_of(&line[..line.len().min(MAX_PAYLOAD_BYTES)]));
                check(&mut reader);
            }
        }
        _ => match journal::parse(rest) {
            Ok(entries) => {
                let written = serde_json::to_vec(&entries).expect("JSON");
                assert_eq!(journal::parse(&written), Ok(entries));
            }
            Err(why) => assert!(!why.contains(char::is_control), "{why:?}"),
        },
    }
}

fn check(reader: &mut FrameReader) {
    if let Some(Err(why)) = agent::reply_to(REQUEST, reader) {
        assert!(!why.contains(char::is_control) && why.chars().count() <= 200);
    }
}

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpus_breaks_no_property() {
        super::replay::replay("lanes", super::lanes);
    }
}
