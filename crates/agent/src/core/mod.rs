// SPDX-License-Identifier: Apache-2.0
//! What is decided, without a clock, a file or a channel: names of files, the life of a block, all
//! blocks together, the conversation with the host.

pub mod block;
pub mod budget;
pub mod door;
pub mod layout;
pub mod ledger;
pub mod pipe;
pub mod place;
pub mod session;
