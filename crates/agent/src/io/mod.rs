// SPDX-License-Identifier: Apache-2.0
//! What touches the system: the channel, mounts, fanotify, links, workers, the status socket.

pub mod channel;
pub mod datanode;
pub mod links;
pub mod mounts;
pub mod scan;
pub mod status;
pub mod watch;
pub mod worker;
