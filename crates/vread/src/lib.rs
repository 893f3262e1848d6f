// SPDX-License-Identifier: Apache-2.0
//! HDFS blocks out of a DataNode's disk image, for a reader VM on the same host.
//!
//! The agent worker of a DataNode VM keeps the [`table`] of leases and answers [`lookup`]s; the reader
//! worker of a client VM reads a block's bytes while its [`hazard`] cell names the lease, so that a
//! withdrawn block is known to be out of use before the DataNode's disk may give its space away.

pub mod agent_worker;
pub mod control;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod hazard;
pub mod journal;
pub mod lookup;
pub mod pattern;
pub mod peer;
pub mod reader;
pub mod sandbox;
mod shared_words;
pub mod table;
