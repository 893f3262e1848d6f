// SPDX-License-Identifier: Apache-2.0
//! Carries a plan out.

pub mod engine;
pub mod pins;
