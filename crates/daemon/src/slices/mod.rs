// SPDX-License-Identifier: Apache-2.0
//! Slices.

pub(crate) mod apply;
pub mod check;
pub(crate) mod decide;
pub mod restore;
