// SPDX-License-Identifier: Apache-2.0
//! Values of keys that several tables have: CPU lists, caps, durations, names, paths. Each function refuses a wrong value
//! with what is allowed; the parser adds line and key.

use std::fmt;
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};
use viola_cli::quantities::{self, quoted};
use viola_host::CpuSet;

use crate::ReadSocket;

/// A list of CPUs such as `4-7`.
pub(crate) fn cores<'de, D: Deserializer<'de>>(d: D) -> Result<CpuSet, D::Error> {
    let wanted = "a CPU list in quotes, for example \"4-7\"";
    parsed(d, wanted, |t| {
        t.parse::<CpuSet>().map_err(|e| e.to_string())
    })
}

/// A cap in thousandths of one core, `None` for an explicit `none`.
pub(crate) fn cap<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Option<u32>>, D::Error> {
    let wanted = "a cap in quotes, for example \"50%\"";
    parsed(d, wanted, |t| {
        quantities::cap(t).map(Some).map_err(|e| e.to_string())
    })
}

pub(crate) fn absolute<'de, D: Deserializer<'de>>(d: D) -> Result<PathBuf, D::Error> {
    parsed(d, "a path in quotes", |t| {
        let path = PathBuf::from(t);
        match path.is_absolute() {
            true => Ok(path),
            false => Err(format!("{} is not an absolute path", quoted(t))),
        }
    })
}

/// An absolute path; `none` or an empty text for no socket.
pub(crate) fn read_socket<'de, D: Deserializer<'de>>(d: D) -> Result<ReadSocket, D::Error> {
    parsed(d, "a path in quotes, or \"none\"", |t| {
        let path = PathBuf::from(t);
        match t {
            "" | "none" => Ok(ReadSocket::Off),
            _ if path.is_absolute() => Ok(ReadSocket::At(path)),
            _ => Err(format!("{} is not an absolute path", quoted(t))),
        }
    })
}

pub(crate) fn some_absolute<'de, D: Deserializer<'de>>(d: D) -> Result<Option<PathBuf>, D::Error> {
    absolute(d).map(Some)
}

/// A duration of `LOW` to `HIGH` ns.
pub(crate) fn duration<'de, D: Deserializer<'de>, const LOW: u64, const HIGH: u64>(
    d: D,
) -> Result<u64, D::Error> {
    let wanted = "a duration with its unit in quotes, for example \"300us\"";
    parsed(d, wanted, |t| {
        quantities::duration_in(t, &(LOW..=HIGH)).map_err(|e| e.to_string())
    })
}

pub(crate) fn some_duration<'de, D: Deserializer<'de>, const LOW: u64, const HIGH: u64>(
    d: D,
) -> Result<Option<u64>, D::Error> {
    duration::<D, LOW, HIGH>(d).map(Some)
}

/// A whole number of 1 to `HIGH`.
pub(crate) fn number<'de, D: Deserializer<'de>, const HIGH: u32>(d: D) -> Result<u32, D::Error> {
    let number = i64::deserialize(d)?;
    let fits = u32::try_from(number)
        .ok()
        .filter(|n| (1..=HIGH).contains(n));
    let sentence = || format!("{number} is out of range; 1 to {HIGH} is allowed");
    fits.ok_or_else(|| de::Error::custom(sentence()))
}

/// A number of 0 to `HIGH`.
pub(crate) fn fraction<'de, D: Deserializer<'de>, const HIGH: u32>(d: D) -> Result<f64, D::Error> {
    let number = f64::deserialize(d)?;
    match (0.0..=f64::from(HIGH)).contains(&number) {
        true => Ok(number),
        false => Err(de::Error::custom(format!(
            "{number} is out of range; 0 to {HIGH} is allowed"
        ))),
    }
}

pub(crate) fn weight<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u32>, D::Error> {
    let value = i64::deserialize(d)?;
    quantities::weight(value)
        .map(Some)
        .map_err(de::Error::custom)
}

/// A name that is not empty, without blanks around it.
pub(crate) fn name<'de, D: Deserializer<'de>>(d: D) -> Result<String, D::Error> {
    parsed(d, "a name in quotes", |t| match t.trim() {
        "" => Err("empty; write a name".into()),
        name => Ok(name.to_owned()),
    })
}

pub(crate) fn some_name<'de, D: Deserializer<'de>>(d: D) -> Result<Option<String>, D::Error> {
    name(d).map(Some)
}

/// Deserializes a TOML string with a parser; `wanted` is what serde says it expects.
pub(crate) fn parsed<'de, T, D: Deserializer<'de>>(
    d: D,
    wanted: &'static str,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<T, D::Error> {
    d.deserialize_any(StringVisitor(wanted, parse))
}

struct StringVisitor<F>(&'static str, F);

impl<T, F: Fn(&str) -> Result<T, String>> Visitor<'_> for StringVisitor<F> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        (self.1)(text).map_err(de::Error::custom)
    }
}
