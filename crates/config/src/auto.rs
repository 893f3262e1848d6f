// SPDX-License-Identifier: Apache-2.0
//! `auto`: what viola does for VMs without a class, as a word or as a table.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, Visitor, value};

/// What viola does for VMs that have no class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Auto {
    /// Nothing.
    Off,
    /// It says which VM would gain.
    #[default]
    Advise,
    /// It tries class ls, and keeps it where it helps and harms no other VM.
    On,
}

/// A part of viola that `allow` names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// Class ls.
    Slices,
    /// A turbo vCPU, or advice to get one.
    Turbo,
    /// VFs for VMs whose `lane` is auto.
    Lanes,
    /// Advice to mount blocks.
    Vread,
    /// Advice to let the host send files.
    Vpipe,
}

/// `auto = "on"`, or `[auto]` with `mode = "on"` and `allow = ["slices"]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct AutoKey {
    pub(crate) mode: Auto,
    /// `None` for all.
    allow: Option<Vec<Accelerator>>,
}

impl AutoKey {
    /// Whether viola may choose or advise this.
    pub(crate) fn allows(&self, what: Accelerator) -> bool {
        (self.allow.as_ref()).is_none_or(|allow| allow.contains(&what))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    #[serde(default)]
    mode: Auto,
    #[serde(default, deserialize_with = "some_of_all")]
    allow: Option<Vec<Accelerator>>,
}

fn some_of_all<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Vec<Accelerator>>, D::Error> {
    let allow = Vec::deserialize(d)?;
    match allow.is_empty() {
        true => Err(de::Error::custom(
            "empty; leave the key out to allow all, or write mode = \"off\"",
        )),
        false => Ok(Some(allow)),
    }
}

impl<'de> Deserialize<'de> for AutoKey {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct WordOrTable;

        impl<'de> Visitor<'de> for WordOrTable {
            type Value = AutoKey;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("off, advise or on, or a table with mode and allow")
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<AutoKey, E> {
                let mode = Auto::deserialize(value::StrDeserializer::new(word))?;
                Ok(AutoKey { mode, allow: None })
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<AutoKey, A::Error> {
                let table = Table::deserialize(value::MapAccessDeserializer::new(map))?;
                Ok(AutoKey {
                    mode: table.mode,
                    allow: table.allow,
                })
            }
        }

        d.deserialize_any(WordOrTable)
    }
}
