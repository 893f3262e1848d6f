// SPDX-License-Identifier: Apache-2.0
//! Messages between the daemon and the agent in a VM whose guest keeps a VF and its paravirtual NIC in one bond.
//!
//! They are frames of [`crate::agent`] on a byte stream of their own. The daemon sends a [`LaneRequest`], the agent
//! answers with a [`LaneReply`] of the same number. So a daemon that restarts does not mistake an old answer for its
//! own.

use serde::{Deserialize, Serialize};

use crate::agent::Message;

/// Name of the virtio-serial port of this stream.
pub const PORT: &str = "org.viola.lane.0";
/// Longest `failed` text, in bytes.
const MAX_REASON_BYTES: usize = 1024;

/// An Ethernet address, in network order.
pub type Mac = [u8; 6];

/// A request of the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaneRequest {
    /// Number of the request.
    pub n: u64,
    /// MAC address of the NIC.
    pub mac: Mac,
    /// What the guest does with the VF.
    pub action: VfAction,
}

/// What the guest does with a VF.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VfAction {
    /// The host is about to unplug the VF: the guest activates the paravirtual NIC, takes the VF down and releases
    /// it.
    Release,
    /// The VF stays: the guest uses it again.
    Use,
}

/// A reply of the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaneReply {
    /// Number of the request.
    pub n: u64,
    /// Absent when the agent carried out the request; else the error in one sentence.
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
            Some(text) if text.len() > MAX_REASON_BYTES => Err("`failed` is too long"),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::{FrameReader, encode};

    #[test]
    fn requests_and_replies_are_read_back() {
        let asked = LaneRequest {
            n: 7,
            mac: [2, 0, 0, 0, 0, 1],
            action: VfAction::Release,
        };
        assert_eq!(
            serde_json::to_string(&asked).unwrap(),
            r#"{"n":7,"mac":[2,0,0,0,0,1],"action":"release"}"#
        );
        let mut reader = FrameReader::new();
        reader.push(&encode(&asked).unwrap());
        assert_eq!(reader.next::<LaneRequest>().unwrap().unwrap(), asked);
        let long = LaneReply {
            n: 7,
            failed: Some("x".repeat(MAX_REASON_BYTES + 1)),
        };
        assert!(encode(&long).is_err());
        reader.push(&encode(&LaneReply { n: 7, failed: None }).unwrap());
        let answer = reader.next::<LaneReply>().unwrap().unwrap();
        assert_eq!((answer.n, answer.failed), (7, None));
    }
}
