// SPDX-License-Identifier: Apache-2.0
//! Serves HDFS blocks from a DataNode's disk image to reader VMs, on the same host and on others.
//!
//! The agent worker of a DataNode VM keeps the [`table`] of leases and answers [`lookup`]s. The reader worker of a
//! client VM publishes a lease's slot in its [`hazard`] cell while it reads the block. So the agent worker knows when
//! a withdrawn block is out of use, before the DataNode's file system reuses its space.

pub mod agent_worker;
pub mod control;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod hazard;
mod images;
pub mod journal;
mod lock;
pub mod lookup;
#[cfg(loom)]
#[cfg(test)]
mod loom_models;
pub mod pattern;
pub mod peer;
mod poll;
mod random;
pub mod reader;
pub mod sandbox;
#[cfg(not(loom))]
mod shared_words;
#[cfg(loom)]
#[path = "shared_words_loom.rs"]
mod shared_words;
pub mod table;
