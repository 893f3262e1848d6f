// SPDX-License-Identifier: Apache-2.0
//! Code that the demo and the benchmarks share.
//!
//! | module | does |
//! |---|---|
//! | `side`, `groups`, `guests`, `spawn`, `program` | sides of a comparison: guests, and the measured daemon |
//! | `cell`, `load` | one measurement of one side: pings and round trips; HTTP in an open or a closed loop |
//! | `vmm` | what runs the guests: KVM, User Mode Linux or emulation |
//! | `calendar` | a web application with its database, in a guest |
//! | `awake` | keeps the load's cores from halting meanwhile |
//! | `row`, `result`, `progress` | figures with their goals, the result file, the remaining time |
//! | `cpu`, `machine`, `trace` | CPU time, the host, context switches |
//! | `tool`, `folder` | programs and folders of a run |

pub mod awake;
pub mod calendar;
pub mod cell;
pub mod cpu;
pub mod folder;
pub mod groups;
pub mod guests;
pub mod load;
pub mod machine;
pub mod program;
pub mod progress;
pub mod result;
pub mod row;
pub mod side;
pub mod spawn;
pub mod tool;
pub mod trace;
pub mod vmm;
