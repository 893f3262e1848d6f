// SPDX-License-Identifier: Apache-2.0
//! Times of day in UTC, as RFC 3339 writes them.

use std::time::SystemTime;

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Now, in whole seconds: `2026-11-21T06:08:11Z`.
pub fn now() -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    utc(now.map_or(0, |d| d.as_secs()))
}

/// Seconds since 1970 as a date; empty after the year 9999.
pub fn utc(seconds: u64) -> String {
    i64::try_from(seconds)
        .ok()
        .and_then(|s| OffsetDateTime::from_unix_timestamp(s).ok())
        .and_then(|date| date.format(&Rfc3339).ok())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_become_a_date_of_rfc_3339() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_795_241_291), "2026-11-21T06:08:11Z");
        assert_eq!(utc(u64::MAX), "");
        assert!(now().ends_with('Z'));
    }
}
