// SPDX-License-Identifier: Apache-2.0
//! State of a reader worker's byte stream to its VM.

use serde::{Deserialize, Serialize};

/// State of the stream that [`super::Order::Stream`] gave.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StreamState {
    /// There is no stream, or it has ended.
    #[default]
    NoStream,
    /// There is a stream, but the VM's agent has not answered.
    Silent,
    /// The VM's agent forwards FUSE requests.
    Connected,
}
