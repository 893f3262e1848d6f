// SPDX-License-Identifier: Apache-2.0
//! Readers, other hosts, and the workers that they are introduced to.

pub mod pairs;
pub mod peers;
pub mod reader;
pub mod stream;
