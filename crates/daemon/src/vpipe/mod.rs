// SPDX-License-Identifier: Apache-2.0
//! Files sent past their VM.

pub mod apply;
pub mod observe;
