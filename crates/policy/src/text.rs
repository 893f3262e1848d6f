// SPDX-License-Identifier: Apache-2.0
//! Numbers as an operator reads them, for the reasons that decisions give.

use std::fmt;

use crate::slices::Nanos;

/// A part, 0.0 ..= 1.0, as a percentage: one decimal below 10 %.
pub(crate) fn percent(part: f64) -> String {
    let p = part * 100.0;
    if p < 10.0 {
        format!("{p:.1} %")
    } else {
        format!("{p:.0} %")
    }
}

/// A duration in the unit that fits it: us, ms or s.
pub(crate) struct HumanTime(pub(crate) Nanos);

impl fmt::Display for HumanTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = self.0 as f64 / 1e3;
        match us {
            ..1_000.0 => write!(f, "{us:.0} us"),
            ..9_950.0 => write!(f, "{:.1} ms", us / 1e3),
            ..2_000_000.0 => write!(f, "{:.0} ms", us / 1e3),
            _ => write!(f, "{:.0} s", us / 1e6),
        }
    }
}
