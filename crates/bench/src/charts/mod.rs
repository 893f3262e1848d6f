// SPDX-License-Identifier: Apache-2.0
//! Charts of the demo's page.

pub mod cdf;
pub mod shares;
pub mod timeline;
