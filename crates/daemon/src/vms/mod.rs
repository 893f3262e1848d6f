// SPDX-License-Identifier: Apache-2.0
//! What is known of each VM.

pub mod find;
pub mod metrics;
pub mod recent;
pub mod report;
pub mod settings;
pub mod totals;
