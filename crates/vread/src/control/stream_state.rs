// SPDX-License-Identifier: Apache-2.0
//! How a reader worker's byte stream to its VM is.

use serde::{Deserialize, Serialize};

/// State of the stream that [`super::Order::Stream`] gave.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StreamState {
    /// There is none, or it has ended.
    #[default]
    NoStream,
    /// There is one, and no agent in the VM has answered.
    Silent,
    /// The agent in the VM hands requests over.
    Connected,
}
