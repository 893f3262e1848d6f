// SPDX-License-Identifier: Apache-2.0
//! HDFS blocks: which of this VM's blocks the host may read.
//!
//! The first six modules decide, without a clock, a file or a channel; the others touch the system.
//!
//! | module | contents |
//! |---|---|
//! | [`block`] | the life of one block, a state machine |
//! | [`ledger`] | all blocks: which are linked and named, within the bounds |
//! | [`rate`] | how many links and names a second |
//! | [`access`] | whether the DataNode serves blocks without a token |
//! | [`layout`] | the names of a DataNode's files and directories |
//! | [`types`] | where a block lies, what its files were, what to do with it |
//! | [`links`] | hard links, and the file that proves the disk |
//! | [`scan`] | all finished blocks of a data directory |
//! | [`watch`] | fanotify |
//! | [`datanode`] | a read from the DataNode without a token |
//! | [`worker`] | threads that wait for disks |

pub mod access;
pub mod block;
pub mod datanode;
pub mod layout;
pub mod ledger;
pub mod links;
pub mod rate;
pub mod scan;
pub mod types;
pub mod watch;
pub mod worker;
