// SPDX-License-Identifier: Apache-2.0
//! Durations, caps and weights: parsed from operators' text, and formatted for tables.

use std::ops::RangeInclusive;

/// One microsecond in nanoseconds.
const US: u64 = 1_000;
/// One millisecond in nanoseconds.
const MS: u64 = 1_000_000;
/// One second in nanoseconds.
const S: u64 = 1_000_000_000;
/// One minute in nanoseconds.
const M: u64 = 60 * S;
/// One hour in nanoseconds.
const H: u64 = 60 * M;

/// Allowed microslices, ns. A shorter one costs the controller more time than the VM gains; the longest is the papers'
/// slice of all VMs.
pub const MICROSLICE: RangeInclusive<u64> = 50 * US..=30 * MS;
/// Allowed times for which a class may be set, ns.
pub const TEMPORARY: RangeInclusive<u64> = S..=H;
/// Allowed slices of batch VMs, ns.
pub const BATCH_SLICE: RangeInclusive<u64> = 100 * US..=100 * MS;
/// Allowed intervals of the control loop, ns.
pub const INTERVAL: RangeInclusive<u64> = 30 * MS..=S;
/// Allowed weights.
pub const WEIGHT: RangeInclusive<i64> = 1..=65_535;
/// Microslice of a VM whose configuration names none, ns.
pub const DEFAULT_MICROSLICE: u64 = 300 * US;

/// Why a text is not the quantity it should be: one sentence that says what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadQuantity(String);

fn bad<T>(sentence: String) -> Result<T, BadQuantity> {
    Err(BadQuantity(sentence))
}

/// An operator's text for an error message: at most 40 characters, quoted, control characters escaped.
pub fn quoted(text: &str) -> String {
    let mut short: String = text.chars().take(40).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    format!("{short:?}")
}

/// Splits a text into its number without the point, the count of decimals (at most nine), and the
/// unit: `1.5 ms` is 15, 1, `ms`.
fn split_number(text: &str) -> Option<(u128, u32, &str)> {
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (whole, decimals) = number.split_once('.').unwrap_or((number, ""));
    let dot = number.len() - whole.len();
    if whole.is_empty() || whole.len() > 18 || decimals.len() > 9 || dot == 1 && decimals.is_empty()
    {
        return None;
    }
    let value = format!("{whole}{decimals}").parse().ok()?;
    Some((value, decimals.len() as u32, unit.trim()))
}

/// Parses a duration with its unit, such as `300us`, `0.3ms`, `1 s` or `10m`; in nanoseconds.
///
/// # Errors
/// [`BadQuantity`] for a text without a number or without the unit us, ms, s, m or h, for a negative
/// duration, and for one of more than 2^64 ns (584 years).
pub fn duration(text: &str) -> Result<u64, BadQuantity> {
    let text = text.trim();
    let shown = quoted(text);
    if text.starts_with('-') {
        return bad(format!(
            "{shown} is negative; write a duration such as 300us, 4ms or 1s"
        ));
    }
    let Some((value, decimals, unit)) = split_number(text) else {
        return bad(format!(
            "{shown} is not a duration; write a number and its unit: 300us, 4ms or 1s"
        ));
    };
    let unit = match unit {
        "us" | "µs" => US,
        "ms" => MS,
        "s" => S,
        "m" => M,
        "h" => H,
        "" => {
            return bad(format!(
                "{shown} has no unit; the units are us, ms, s, m and h, for example {text}us"
            ));
        }
        _ => {
            return bad(format!(
                "{shown} has the wrong unit; the units are us, ms, s, m and h"
            ));
        }
    };
    let ns = value.saturating_mul(unit.into()) / 10u128.pow(decimals);
    u64::try_from(ns).or_else(|_| bad(format!("{shown} is out of range; it is over 500 years")))
}

/// Parses a duration that has to be in a range, ns.
///
/// # Errors
/// As [`duration`], and when it is out of range.
pub fn duration_in(text: &str, allowed: &RangeInclusive<u64>) -> Result<u64, BadQuantity> {
    let ns = duration(text)?;
    if allowed.contains(&ns) {
        return Ok(ns);
    }
    let (low, high) = (exact(*allowed.start()), exact(*allowed.end()));
    bad(format!(
        "{} is out of range; {low} to {high} is allowed",
        quoted(text.trim())
    ))
}

/// Checks that a weight is in [`WEIGHT`].
///
/// # Errors
/// [`BadQuantity`] when it is not.
pub fn weight(value: i64) -> Result<u32, BadQuantity> {
    match u32::try_from(value) {
        Ok(w) if WEIGHT.contains(&value) => Ok(w),
        _ => bad(format!(
            "{value} is not a weight; {} to {} is allowed",
            WEIGHT.start(),
            WEIGHT.end()
        )),
    }
}

/// Parses a cap such as `50%` or `12.5%` (100 % is one core), in thousandths of one core; `none` is no cap. The upper
/// bound depends on the VM: see [`cap_fits`].
///
/// # Errors
/// [`BadQuantity`] without a number or the percent sign, or below 1 %.
pub fn cap(text: &str) -> Result<Option<u32>, BadQuantity> {
    let text = text.trim();
    if text == "none" {
        return Ok(None);
    }
    let shown = quoted(text);
    if text.starts_with('-') {
        return bad(format!(
            "{shown} is negative; write a cap such as 50%, 100% being one core, or none"
        ));
    }
    let Some((value, decimals, unit)) = split_number(text) else {
        return bad(format!(
            "{shown} is not a cap; write percent of one core, for example 50%, or none"
        ));
    };
    match unit {
        "%" => {}
        "" => {
            return bad(format!(
                "{shown} has no unit; write {text}% (100% is one core), or none"
            ));
        }
        _ => {
            return bad(format!(
                "{shown} has the wrong unit; a cap is in percent of one core, for example 50%"
            ));
        }
    }
    let permille = value * 10 / 10u128.pow(decimals);
    match u32::try_from(permille) {
        Ok(p) if p >= 10 => Ok(Some(p)),
        Ok(_) => bad(format!("{shown} is out of range; a cap is at least 1%")),
        Err(_) => bad(format!(
            "{shown} is out of range; no host has as many cores"
        )),
    }
}

/// Checks that a cap (thousandths of one core) is not above the `cores` of a VM or host called `whose`.
///
/// # Errors
/// [`BadQuantity`] when it is.
pub fn cap_fits(permille: u32, cores: usize, whose: &str) -> Result<(), BadQuantity> {
    let most = cores.max(1) as u64 * 1000;
    if u64::from(permille) <= most {
        return Ok(());
    }
    let cores = if cores == 1 {
        "1 core".into()
    } else {
        format!("{cores} cores")
    };
    bad(format!(
        "cap {} is over the {cores} of {whose}; at most {}%",
        cap_text(Some(permille)),
        most / 10
    ))
}

/// Formats a cap so that [`cap`] parses it.
pub fn cap_text(permille: Option<u32>) -> String {
    match permille {
        None => "none".into(),
        Some(p) if p.is_multiple_of(10) => format!("{}%", p / 10),
        Some(p) => format!("{}.{}%", p / 10, p % 10),
    }
}

/// Formats a duration (ns) without rounding, so that [`duration`] parses it: `300us`, `1.5us`, `4ms`.
pub fn exact(ns: u64) -> String {
    let (unit, name) = match ns {
        0 => return "0us".into(),
        _ if ns.is_multiple_of(S) => (S, "s"),
        _ if ns.is_multiple_of(MS) => (MS, "ms"),
        _ => (US, "us"),
    };
    if ns.is_multiple_of(unit) {
        return format!("{}{name}", ns / unit);
    }
    let decimals = format!("{:03}", ns % unit);
    format!("{}.{}{name}", ns / unit, decimals.trim_end_matches('0'))
}

/// Formats a duration (ns) in two or three digits for tables: `0.3 ms`, `17 ms`, `1.2 s`.
pub fn rounded(ns: u64) -> String {
    let tenths = |unit: u64| (ns as f64 / unit as f64 * 10.0).round() / 10.0;
    if ns == 0 {
        "0 ms".into()
    } else if ns < 100 * US {
        format!("{:.0} us", ns as f64 / US as f64)
    } else if ns < 10 * MS {
        format!("{} ms", tenths(MS))
    } else if ns < S {
        format!("{:.0} ms", ns as f64 / MS as f64)
    } else {
        format!("{} s", tenths(S))
    }
}

/// Formats a rate (bytes per second) for tables: `12 MB/s`.
pub fn byte_rate(per_s: f64) -> String {
    let (value, unit) = match per_s {
        b if b >= 1e9 => (b / 1e9, "GB/s"),
        b if b >= 1e6 => (b / 1e6, "MB/s"),
        b if b >= 1e3 => (b / 1e3, "kB/s"),
        b => (b, "B/s"),
    };
    // 9.96 becomes 10, not 10.0.
    if (value * 10.0).round() < 100.0 && unit != "B/s" {
        format!("{value:.1} {unit}")
    } else {
        format!("{value:.0} {unit}")
    }
}

/// Formats a fraction of 1 as percent for tables: `8 %`.
pub fn percent(fraction: f64) -> String {
    format!("{:.0} %", fraction * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message<T: std::fmt::Debug>(r: Result<T, BadQuantity>) -> String {
        r.unwrap_err().to_string()
    }

    #[test]
    fn a_duration_is_a_number_and_a_unit() {
        assert_eq!(duration("300us"), Ok(300_000));
        assert_eq!(duration("0.3ms"), Ok(300_000));
        assert_eq!(duration(" 1 s "), Ok(1_000_000_000));
        assert_eq!(duration("5µs"), Ok(5_000));
        assert_eq!(duration("10m"), Ok(600_000_000_000));
        assert_eq!(duration("0.5h"), Ok(1_800_000_000_000));
    }

    #[test]
    fn a_wrong_unit_is_told_with_the_right_ones() {
        assert_eq!(
            message(duration("300")),
            r#""300" has no unit; the units are us, ms, s, m and h, for example 300us"#
        );
        assert_eq!(
            message(duration("300ns")),
            r#""300ns" has the wrong unit; the units are us, ms, s, m and h"#
        );
        assert!(message(duration("-1ms")).contains("negative"));
        for text in ["", "ms", "1..2ms", "1.ms", ".5ms", "1e3us", "0x10us"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_range_names_its_ends_as_they_are_written() {
        assert_eq!(duration_in("50us", &MICROSLICE), Ok(50_000));
        assert_eq!(
            message(duration_in("49us", &MICROSLICE)),
            r#""49us" is out of range; 50us to 30ms is allowed"#
        );
        assert_eq!(duration_in("30ms", &MICROSLICE), Ok(30_000_000));
        assert!(duration_in("31ms", &MICROSLICE).is_err());
    }

    #[test]
    fn a_weight_is_1_to_65535() {
        assert_eq!(weight(1), Ok(1));
        assert_eq!(weight(65_535), Ok(65_535));
        for w in [0, -5, 65_536, i64::MIN, i64::MAX] {
            assert_eq!(
                message(weight(w)),
                format!("{w} is not a weight; 1 to 65535 is allowed")
            );
        }
    }

    #[test]
    fn a_cap_is_percent_of_one_core_or_none() {
        assert_eq!(cap("50%"), Ok(Some(500)));
        assert_eq!(cap("12.5 %"), Ok(Some(125)));
        assert_eq!(cap("150%"), Ok(Some(1500)));
        assert_eq!(cap("none"), Ok(None));
        assert!(message(cap("50")).contains("50%"));
        assert!(message(cap("0.5%")).contains("at least 1%"));
        assert!(message(cap("-5%")).contains("negative"));
        assert!(message(cap("50ms")).contains("wrong unit"));
    }

    #[test]
    fn a_cap_over_the_cores_is_refused_with_the_most_that_is_possible() {
        assert_eq!(cap_fits(1000, 1, "db01"), Ok(()));
        assert_eq!(
            message(cap_fits(1001, 1, "db01")),
            "cap 100.1% is over the 1 core of db01; at most 100%"
        );
        assert_eq!(cap_fits(2000, 2, "db01"), Ok(()));
    }

    #[test]
    fn tables_show_two_or_three_digits() {
        for (ns, text) in [
            (0, "0 ms"),
            (42_000, "42 us"),
            (300_000, "0.3 ms"),
            (1_040_000, "1 ms"),
            (17_300_000, "17 ms"),
            (1_240_000_000, "1.2 s"),
        ] {
            assert_eq!(rounded(ns), text);
        }
        for (rate, text) in [
            (0.0, "0 B/s"),
            (3.04e6, "3.0 MB/s"),
            (9.96e6, "10 MB/s"),
            (96e6, "96 MB/s"),
            (2e9, "2.0 GB/s"),
        ] {
            assert_eq!(byte_rate(rate), text);
        }
        assert_eq!(percent(0.083), "8 %");
    }

    #[test]
    fn what_is_quoted_cannot_write_to_the_terminal() {
        assert_eq!(quoted("a\x1b[2J"), r#""a\u{1b}[2J""#);
        assert!(quoted(&"x".repeat(1000)).len() < 60);
    }

    proptest! {
        #[test]
        fn what_is_written_exactly_is_read_as_it_was(ns in 0u64..100_000_000_000_000) {
            prop_assert_eq!(duration(&exact(ns)), Ok(ns));
        }

        #[test]
        fn a_written_cap_is_read_as_it_was(permille in 10u32..1_000_000) {
            prop_assert_eq!(cap(&cap_text(Some(permille))), Ok(Some(permille)));
        }

        #[test]
        fn no_text_makes_a_parser_panic(text in "\\PC{0,40}") {
            let _ = (duration(&text), cap(&text));
        }

        #[test]
        fn digits_of_any_length_are_read_or_refused(digits in "[0-9]{0,40}(\\.[0-9]{0,20})?", unit in "us|ms|s|m|h|%|") {
            let _ = (duration(&format!("{digits}{unit}")), cap(&format!("{digits}{unit}")));
        }
    }
}
