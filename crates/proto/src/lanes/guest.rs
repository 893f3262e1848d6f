// SPDX-License-Identifier: Apache-2.0
//! Between the daemon and the agent in a guest that keeps a VF and its paravirtual NIC in one bond: frames of
//! [`crate::agent`] on a byte stream of their own. The daemon asks, the agent answers; each question has a number, so that an
//! answer to somebody who has gone is not taken for another.

use serde::{Deserialize, Serialize};

use crate::agent::Message;

/// Name of the virtio-serial port for it.
pub const PORT: &str = "org.viola.lane.0";
/// Most bytes of a sentence.
const MAX_TEXT_BYTES: usize = 1024;

/// An Ethernet address.
pub type Mac = [u8; 6];

/// What the daemon asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaneRequest {
    /// Its number.
    pub n: u64,
    /// Address of the NIC that it is about.
    pub mac: Mac,
    /// What is to be done.
    #[serde(rename = "wish")]
    pub action: VfAction,
}

/// What is to be done with a VF.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VfAction {
    /// It is about to go: send and receive by the paravirtual NIC, let the VF go and take it down.
    #[serde(rename = "leave")]
    Release,
    /// It stays: use it again.
    Use,
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaneReply {
    /// The question's number.
    pub n: u64,
    /// Done; else one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

impl Message for LaneRequest {
    fn check(&self) -> Result<(), &'static str> {
        Ok(())
    }
}

impl Message for LaneReply {
    fn check(&self) -> Result<(), &'static str> {
        match &self.failed {
            Some(text) if text.len() > MAX_TEXT_BYTES => Err("a sentence is too long"),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::{FrameReader, encode};

    #[test]
    fn questions_and_answers_go_there_and_back() {
        let asked = LaneRequest {
            n: 7,
            mac: [2, 0, 0, 0, 0, 1],
            action: VfAction::Release,
        };
        assert_eq!(
            serde_json::to_string(&asked).unwrap(),
            r#"{"n":7,"mac":[2,0,0,0,0,1],"wish":"leave"}"#
        );
        let mut reader = FrameReader::new();
        reader.push(&encode(&asked).unwrap());
        assert_eq!(reader.next::<LaneRequest>().unwrap().unwrap(), asked);
        let long = LaneReply {
            n: 7,
            failed: Some("x".repeat(MAX_TEXT_BYTES + 1)),
        };
        assert!(encode(&long).is_err());
        reader.push(&encode(&LaneReply { n: 7, failed: None }).unwrap());
        let answer = reader.next::<LaneReply>().unwrap().unwrap();
        assert_eq!((answer.n, answer.failed), (7, None));
    }
}
