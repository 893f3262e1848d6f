// SPDX-License-Identifier: Apache-2.0
//! What a file must contain to prove which disk it is on: bytes that the host chooses, new in each session.

use serde::{Deserialize, Serialize};

use super::message::{Bytes, FsId, PROOF_BYTES};

/// Size of a challenge, in bytes.
pub const CHALLENGE_BYTES: usize = 32;

/// Random bytes of the host, new in each session; hexadecimal digits on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Bytes", into = "Bytes")]
pub struct Challenge(pub [u8; CHALLENGE_BYTES]);

impl Challenge {
    /// Content of the proof file of a file system: [`PROOF_BYTES`] bytes.
    ///
    /// Chunk `i` of [`CHALLENGE_BYTES`] bytes is the challenge, with `i` XORed into its first four bytes and the number
    /// of the file system into the next four, both little endian. So the chunks of a file differ, and so do the files
    /// of two file systems: equal disks that hold their proofs at the same place are told apart.
    pub fn proof_content(&self, fs: FsId) -> Vec<u8> {
        let mut content = Vec::with_capacity(PROOF_BYTES);
        for index in 0..(PROOF_BYTES / CHALLENGE_BYTES) as u32 {
            let mix = index.to_le_bytes().into_iter().chain(fs.to_le_bytes());
            let mix = mix.chain(std::iter::repeat(0));
            content.extend(self.0.iter().zip(mix).map(|(byte, mix)| byte ^ mix));
        }
        content
    }
}

impl TryFrom<Bytes> for Challenge {
    type Error = &'static str;

    fn try_from(bytes: Bytes) -> Result<Self, Self::Error> {
        let bytes = bytes.0.try_into();
        bytes
            .map(Self)
            .map_err(|_| "a challenge of the wrong length")
    }
}

impl From<Challenge> for Bytes {
    fn from(challenge: Challenge) -> Self {
        Self(challenge.0.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::{Limits, SERIAL_LINE_BYTES, ToAgent, VERSION, encode};
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_content_is_as_documented() {
        let content = Challenge([0xa5; CHALLENGE_BYTES]).proof_content(0x0102);
        assert_eq!(content.len(), PROOF_BYTES);
        let mut chunk = [0xa5; CHALLENGE_BYTES];
        chunk[4] = 0xa7;
        chunk[5] = 0xa4;
        assert_eq!(content[..CHALLENGE_BYTES], chunk);
        chunk[0] = 0xa5 ^ 127;
        assert_eq!(content[PROOF_BYTES - CHALLENGE_BYTES..], chunk);
    }

    #[test]
    fn a_challenge_has_hexadecimal_digits_and_one_length() {
        let challenge = Challenge([0xab; CHALLENGE_BYTES]);
        let text = format!("\"{}\"", "ab".repeat(CHALLENGE_BYTES));
        assert_eq!(serde_json::to_string(&challenge).unwrap(), text);
        assert_eq!(serde_json::from_str::<Challenge>(&text).unwrap(), challenge);
        for length in [0, CHALLENGE_BYTES - 1, CHALLENGE_BYTES + 1] {
            let text = format!("\"{}\"", "ab".repeat(length));
            assert!(
                serde_json::from_str::<Challenge>(&text).is_err(),
                "{length}"
            );
        }
    }

    #[test]
    fn the_longest_welcome_takes_a_small_part_of_a_serial_line() {
        let welcome = ToAgent::Welcome {
            version: VERSION,
            session: u64::MAX,
            epoch: u64::MAX,
            limits: Limits {
                blocks: u32::MAX,
                extents: u32::MAX,
                names_per_s: u32::MAX,
            },
            challenge: Challenge([0xff; CHALLENGE_BYTES]),
        };
        let length = encode(&welcome).unwrap().len();
        assert!(length < SERIAL_LINE_BYTES as usize / 8, "{length}");
    }

    proptest! {
        #[test]
        fn no_two_chunks_of_a_session_are_equal(challenge: [u8; CHALLENGE_BYTES], one: u32, other: u32) {
            prop_assume!(one != other);
            let challenge = Challenge(challenge);
            let contents = [challenge.proof_content(one), challenge.proof_content(other)];
            let chunks: BTreeSet<_> = contents.iter().flat_map(|c| c.chunks(CHALLENGE_BYTES)).collect();
            prop_assert_eq!(chunks.len(), 2 * PROOF_BYTES / CHALLENGE_BYTES);
        }
    }
}
