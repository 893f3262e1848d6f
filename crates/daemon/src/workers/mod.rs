// SPDX-License-Identifier: Apache-2.0
//! Worker processes.

pub mod entry;
pub mod process;
pub mod run_dir;
