// SPDX-License-Identifier: Apache-2.0
//! Values of keys that several tables have: CPU lists, caps, durations, paths.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};
use viola_cli::quantities::{self, BadQuantity};
use viola_host::CpuSet;

/// A list of CPUs such as `4-7`.
pub(crate) struct Cores(pub(crate) CpuSet);

impl<'de> Deserialize<'de> for Cores {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(StringVisitor(
            "a CPU list in quotes, for example \"4-7\"",
            |t: &str| {
                t.parse()
                    .map(Self)
                    .map_err(|e: viola_host::cpuset::ParseCpuSetError| e.to_string())
            },
        ))
    }
}

/// A cap in thousandths of one core.
pub(crate) struct Cap(pub(crate) Option<u32>);

impl<'de> Deserialize<'de> for Cap {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(StringVisitor(
            "a cap in quotes, for example \"50%\"",
            |t: &str| quantities::cap(t).map(Self).map_err(|e| e.to_string()),
        ))
    }
}

pub(crate) fn absolute<'de, D: Deserializer<'de>>(d: D) -> Result<PathBuf, D::Error> {
    d.deserialize_any(StringVisitor("a path in quotes", |t: &str| {
        let path = PathBuf::from(t);
        if path.is_absolute() {
            Ok(path)
        } else {
            Err(format!("{} is not an absolute path", quantities::quoted(t)))
        }
    }))
}

pub(crate) fn interval<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    duration(d, &quantities::INTERVAL)
}

pub(crate) fn batch_slice<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
    duration(d, &quantities::BATCH_SLICE).map(Some)
}

pub(crate) fn microslice<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
    duration(d, &quantities::MICROSLICE).map(Some)
}

pub(crate) fn duration<'de, D: Deserializer<'de>>(
    d: D,
    allowed: &RangeInclusive<u64>,
) -> Result<u64, D::Error> {
    d.deserialize_any(StringVisitor(
        "a duration with its unit in quotes, for example \"300us\"",
        |t: &str| quantities::duration_in(t, allowed).map_err(|e| e.to_string()),
    ))
}

pub(crate) fn weight<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u32>, D::Error> {
    let value = i64::deserialize(d)?;
    quantities::weight(value)
        .map(Some)
        .map_err(|e: BadQuantity| de::Error::custom(e))
}

/// Deserializes a TOML string with a parser; the text is what serde says it expects.
pub(crate) struct StringVisitor<F>(pub(crate) &'static str, pub(crate) F);

impl<T, F: FnOnce(&str) -> Result<T, String>> Visitor<'_> for StringVisitor<F> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        (self.1)(text).map_err(de::Error::custom)
    }
}
