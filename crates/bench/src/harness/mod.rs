// SPDX-License-Identifier: Apache-2.0
//! What the demo and the benchmarks share.
//!
//! | module | does |
//! |---|---|
//! | `side`, `guests`, `spawn`, `program` | the sides of a comparison: guests, and the daemon that is measured |
//! | `cell` | one measurement of one side |
//! | `row`, `result`, `progress` | figures with their goals, the file of results, the time left |
//! | `cpu`, `machine`, `trace` | CPU time, the host, context switches |
//! | `tool`, `folder` | programs and folders of a run |

pub mod cell;
pub mod cpu;
pub mod folder;
pub mod guests;
pub mod machine;
pub mod program;
pub mod progress;
pub mod result;
pub mod row;
pub mod side;
pub mod spawn;
pub mod tool;
pub mod trace;
