// SPDX-License-Identifier: Apache-2.0
//! What the names of a DataNode's files and folders say.
//!
//! `<data>/current/<pool>/current/finalized/subdirA/subdirB/blk_N` with `blk_N_STAMP.meta` beside it is a
//! finished block. Everything else (`rbw`, `tmp`, `trash`, `previous`) is not.

use std::path::{Component, Path};

use viola_proto::agent::BlockKey;

/// What a file is, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Name {
    /// `blk_N`
    Data(i64),
    /// `blk_N_STAMP.meta`
    Meta(i64, u64),
    /// `blk_N.unlinked`, `blk_N_STAMP.meta.unlinked`: the copy that a DataNode makes of a linked file to
    /// change it. What it is renamed to is about to change.
    Copy(i64),
    /// `blk_N.defrag` and the like: e4defrag is about to move the file's extents.
    Defrag(i64),
    /// `.fsrPID`: xfs_fsr is about to move some file's extents.
    Reorganise,
    /// Anything else.
    Other,
}

impl Name {
    /// What a file of this name is.
    pub fn of(name: &str) -> Self {
        if let Some(of) = name.strip_suffix(".unlinked") {
            return match Self::of(of).block() {
                Some(id) => Self::Copy(id),
                None => Self::Other,
            };
        }
        if let Some(of) = name.strip_suffix(".defrag") {
            return match Self::of(of).block() {
                Some(id) => Self::Defrag(id),
                None => Self::Other,
            };
        }
        if name.starts_with(".fsr") {
            return Self::Reorganise;
        }
        let Some(rest) = name.strip_prefix("blk_") else {
            return Self::Other;
        };
        match rest.strip_suffix(".meta").map(|s| s.split_once('_')) {
            Some(Some((id, stamp))) => match (number(id), number(stamp)) {
                (Some(id), Some(stamp)) => Self::Meta(id, stamp),
                _ => Self::Other,
            },
            Some(None) => Self::Other,
            None => number(rest).map_or(Self::Other, Self::Data),
        }
    }

    /// The block that it belongs to.
    pub fn block(self) -> Option<i64> {
        match self {
            Self::Data(id) | Self::Meta(id, _) | Self::Copy(id) | Self::Defrag(id) => Some(id),
            Self::Reorganise | Self::Other => None,
        }
    }
}

/// A number in its only spelling.
fn number<N: std::str::FromStr + std::fmt::Display>(text: &str) -> Option<N> {
    let number: N = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

/// The block pool whose finished blocks are in `folder`, for a DataNode that keeps its data in `data`.
pub fn finalized_pool<'a>(data: &Path, folder: &'a Path) -> Option<&'a str> {
    let rest = folder.strip_prefix(data).ok()?;
    let mut parts = rest.components().map(|c| match c {
        Component::Normal(name) => name.to_str(),
        _ => None,
    });
    let mut next = || parts.next().flatten();
    if next()? != "current" {
        return None;
    }
    let pool = next().filter(|name| BlockKey::is_pool(name))?;
    if next()? != "current" || next()? != "finalized" {
        return None;
    }
    let mut depth = 0;
    while let Some(name) = next() {
        depth += 1;
        if depth > MAX_DEPTH || !name.starts_with("subdir") {
            return None;
        }
    }
    Some(pool)
}

/// Most folders between `finalized` and a block.
pub const MAX_DEPTH: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn files_are_told_apart_by_name() {
        for (name, is) in [
            ("blk_1073741825", Name::Data(1_073_741_825)),
            (
                "blk_-9223372036854775792",
                Name::Data(-9_223_372_036_854_775_792),
            ),
            ("blk_7_1001.meta", Name::Meta(7, 1001)),
            ("blk_7.unlinked", Name::Copy(7)),
            ("blk_7_1001.meta.unlinked", Name::Copy(7)),
            ("blk_7.defrag", Name::Defrag(7)),
            ("blk_7_1001.meta.defrag", Name::Defrag(7)),
            (".fsr1234", Name::Reorganise),
            ("blk_07", Name::Other),
            ("blk_7_1001", Name::Other),
            ("blk_7.meta", Name::Other),
            ("blk_7_x.meta", Name::Other),
            ("VERSION", Name::Other),
            ("x.unlinked", Name::Other),
            ("", Name::Other),
        ] {
            assert_eq!(Name::of(name), is, "{name}");
        }
    }

    #[test]
    fn only_finalized_folders_hold_finished_blocks() {
        let data = Path::new("/d/1");
        let pool = "BP-1-10.0.0.1-2";
        let of = |rest: &str| {
            finalized_pool(data, &data.join(rest.replace("POOL", pool))).map(str::to_owned)
        };
        for good in [
            "current/POOL/current/finalized",
            "current/POOL/current/finalized/subdir0/subdir31",
        ] {
            assert_eq!(of(good).as_deref(), Some(pool), "{good}");
        }
        for bad in [
            "current/POOL/current/rbw",
            "current/POOL/previous/finalized/subdir0/subdir1",
            "current/POOL/trash/finalized/subdir0/subdir1",
            "previous/POOL/current/finalized",
            "current/other/current/finalized",
            "current/POOL/current/finalized/x/y",
            "current/POOL/current/finalized/subdir0/subdir0/subdir0/subdir0",
            "",
        ] {
            assert_eq!(of(bad), None, "{bad}");
        }
        assert_eq!(finalized_pool(data, Path::new("/d/10/current")), None);
    }

    proptest! {
        #[test]
        fn any_name_is_something(name in ".{0,60}") {
            let _ = Name::of(&name);
        }

        #[test]
        fn names_of_blocks_are_read_back(id: i64, stamp: u64) {
            prop_assert_eq!(Name::of(&format!("blk_{id}")), Name::Data(id));
            prop_assert_eq!(Name::of(&format!("blk_{id}_{stamp}.meta")), Name::Meta(id, stamp));
        }
    }
}
