// SPDX-License-Identifier: Apache-2.0
//! Presentation of measured figures: statistics, tables, drawings (SVG), and one self-contained
//! HTML page.

pub mod html;
pub mod stats;
pub mod svg;
pub mod table;
