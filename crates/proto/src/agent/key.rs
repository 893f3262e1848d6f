// SPDX-License-Identifier: Apache-2.0
//! Names of HDFS blocks.

use serde::{Deserialize, Serialize};

/// Longest name of a block pool, in bytes.
pub const MAX_POOL_NAME_BYTES: usize = 128;

/// A finalized HDFS block with its generation stamp. The same block with another stamp is another key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "Wire", into = "Wire")]
pub struct BlockKey {
    pool: String,
    id: i64,
    stamp: u64,
}

/// An invalid block pool name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no block pool name: it must begin with \"BP-\" and have at most {MAX_POOL_NAME_BYTES} letters, digits, dots and hyphens"
)]
pub struct BadKey(String);

#[derive(Clone, Serialize, Deserialize)]
struct Wire {
    pool: String,
    id: i64,
    stamp: u64,
}

impl BlockKey {
    /// Makes a key.
    ///
    /// # Errors
    /// [`BadKey`] unless `pool` [is a valid name](Self::is_pool).
    pub fn new(pool: &str, id: i64, stamp: u64) -> Result<Self, BadKey> {
        if !Self::is_pool(pool) {
            return Err(BadKey(pool.chars().take(MAX_POOL_NAME_BYTES).collect()));
        }
        Ok(Self {
            pool: pool.into(),
            id,
            stamp,
        })
    }

    /// Whether `name` is a valid block pool name. Both sides use it as the name of a directory.
    pub fn is_pool(name: &str) -> bool {
        name.len() <= MAX_POOL_NAME_BYTES
            && name.len() > 3
            && name.starts_with("BP-")
            && name
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'.' || b == b'-')
    }

    /// Block pool, for example `BP-1204-10.0.0.1-1763718000000`.
    pub fn pool(&self) -> &str {
        &self.pool
    }

    /// Block number; negative for striped blocks.
    pub fn id(&self) -> i64 {
        self.id
    }

    /// Generation stamp. It changes when the block is appended to, truncated or recovered.
    pub fn stamp(&self) -> u64 {
        self.stamp
    }

    /// Name of the data file in the reader's mount, for example `blk_7_1001`.
    pub fn data_name(&self) -> String {
        format!("blk_{}_{}", self.id, self.stamp)
    }

    /// Name of the checksum file in the reader's mount, for example `blk_7_1001.meta`.
    pub fn meta_name(&self) -> String {
        format!("blk_{}_{}.meta", self.id, self.stamp)
    }

    /// Parses a [`BlockKey::data_name`] (`false`) or a [`BlockKey::meta_name`] (`true`). Each block has exactly one
    /// name: other spellings of a number are invalid.
    pub fn parse(pool: &str, name: &str) -> Option<(Self, bool)> {
        let (stem, meta) = match name.strip_suffix(".meta") {
            Some(stem) => (stem, true),
            None => (name, false),
        };
        let (id, stamp) = stem.strip_prefix("blk_")?.split_once('_')?;
        let key = Self::new(pool, id.parse().ok()?, stamp.parse().ok()?).ok()?;
        let spelled = if meta {
            key.meta_name()
        } else {
            key.data_name()
        };
        (spelled == name).then_some((key, meta))
    }
}

impl std::fmt::Display for BlockKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.pool, self.data_name())
    }
}

impl TryFrom<Wire> for BlockKey {
    type Error = BadKey;

    fn try_from(wire: Wire) -> Result<Self, BadKey> {
        Self::new(&wire.pool, wire.id, wire.stamp)
    }
}

impl From<BlockKey> for Wire {
    fn from(key: BlockKey) -> Self {
        Self {
            pool: key.pool,
            id: key.id,
            stamp: key.stamp,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_pool_name_cannot_leave_its_directory() {
        for bad in ["", "BP-", "..", "BP-a/b", "BP-a b", "x", "BP-\u{e9}"] {
            assert!(BlockKey::new(bad, 1, 1).is_err(), "{bad}");
        }
        assert!(BlockKey::new(&format!("BP-{}", "x".repeat(126)), 1, 1).is_err());
        assert!(BlockKey::new("BP-1-10.0.0.1-2", 1, 1).is_ok());
        assert!(serde_json::from_str::<BlockKey>(r#"{"pool":"../etc","id":1,"stamp":1}"#).is_err());
    }

    #[test]
    fn other_spellings_of_a_number_are_invalid() {
        for bad in [
            "blk_01_5",
            "blk_+1_5",
            "blk_1_5.meta.meta",
            "blk_1",
            "blk_1_-5",
            "blk_1_5 ",
            "blk_-0_5",
        ] {
            assert_eq!(BlockKey::parse("BP-1", bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn names_are_read_back(id: i64, stamp: u64) {
            let key = BlockKey::new("BP-1", id, stamp).unwrap();
            prop_assert_eq!(BlockKey::parse("BP-1", &key.data_name()), Some((key.clone(), false)));
            prop_assert_eq!(BlockKey::parse("BP-1", &key.meta_name()), Some((key.clone(), true)));
            let text = serde_json::to_string(&key).unwrap();
            prop_assert_eq!(serde_json::from_str::<BlockKey>(&text).unwrap(), key);
        }

        #[test]
        fn any_name_is_parsed_or_refused(name in ".{0,40}") {
            let _ = BlockKey::parse("BP-1", &name);
        }
    }
}
