// SPDX-License-Identifier: Apache-2.0
//! Turbo cores.

pub mod check;
pub(crate) mod decide;
