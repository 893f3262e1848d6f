// SPDX-License-Identifier: Apache-2.0
//! Presentation of measured figures: statistics, tables, charts, one self-contained HTML page.

pub mod cdf;
pub mod html;
pub mod shares;
pub mod stats;
pub mod svg;
pub mod table;
pub mod timeline;
