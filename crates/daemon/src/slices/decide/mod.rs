// SPDX-License-Identifier: Apache-2.0
//! Draws up a plan.

pub mod classes;
pub mod placement;
pub mod plan;
