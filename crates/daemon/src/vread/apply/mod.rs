// SPDX-License-Identifier: Apache-2.0
//! Runs the workers of vread: one for each reader (`reader`, with its byte `stream`), one for other hosts (`peers`), and which
//! agents' workers they know (`pairs`).

pub mod pairs;
pub mod peers;
pub mod reader;
pub mod stream;
