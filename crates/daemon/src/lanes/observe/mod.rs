// SPDX-License-Identifier: Apache-2.0
//! What lanes read of the host.

pub mod guests;
