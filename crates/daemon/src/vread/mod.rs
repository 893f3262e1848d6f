// SPDX-License-Identifier: Apache-2.0
//! Blocks past their DataNode VM.

pub(crate) mod apply;
pub mod check;
pub(crate) mod decide;
pub mod keys;
pub mod metrics;
pub(crate) mod observe;
