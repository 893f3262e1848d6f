// SPDX-License-Identifier: Apache-2.0
//! The names of a DataNode's files and directories.
//!
//! `<data>/current/<pool>/current/finalized/subdirA/subdirB/blk_N` with `blk_N_STAMP.meta` beside it is a finished
//! block. Blocks in `rbw`, `tmp`, `trash` and `previous` are not.

use std::path::{Component, Path};

use viola_proto::agent::BlockKey;

/// The kind of a file, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// `blk_N`
    Data(i64),
    /// `blk_N_STAMP.meta`
    Meta(i64, u64),
    /// `blk_N.unlinked`, `blk_N_STAMP.meta.unlinked`: the DataNode's copy of a linked file, made before it
    /// changes the file. The DataNode renames the copy over the original next.
    Copy(i64),
    /// `blk_N.defrag` or `blk_N_STAMP.meta.defrag`: e4defrag is about to move the file's extents.
    Defrag(i64),
    /// `.fsrPID`: xfs_fsr is about to move the extents of a file in this directory.
    XfsFsr,
    /// Anything else.
    Other,
}

impl FileKind {
    /// Classifies a file name.
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
            return Self::XfsFsr;
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

    /// The block id in the name.
    pub fn block(self) -> Option<i64> {
        match self {
            Self::Data(id) | Self::Meta(id, _) | Self::Copy(id) | Self::Defrag(id) => Some(id),
            Self::XfsFsr | Self::Other => None,
        }
    }
}

/// Parses a number; refuses other spellings such as leading zeros.
fn number<N: std::str::FromStr + std::fmt::Display>(text: &str) -> Option<N> {
    let number: N = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

/// The pool whose finished blocks lie in `folder`, for a DataNode with the data directory `data`.
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
        if depth > MAX_SUBDIR_DEPTH || !name.starts_with("subdir") {
            return None;
        }
    }
    Some(pool)
}

/// Maximum directory depth below `finalized`.
pub const MAX_SUBDIR_DEPTH: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn files_are_classified_by_name() {
        for (name, is) in [
            ("blk_1073741825", FileKind::Data(1_073_741_825)),
            (
                "blk_-9223372036854775792",
                FileKind::Data(-9_223_372_036_854_775_792),
            ),
            ("blk_7_1001.meta", FileKind::Meta(7, 1001)),
            ("blk_7.unlinked", FileKind::Copy(7)),
            ("blk_7_1001.meta.unlinked", FileKind::Copy(7)),
            ("blk_7.defrag", FileKind::Defrag(7)),
            ("blk_7_1001.meta.defrag", FileKind::Defrag(7)),
            (".fsr1234", FileKind::XfsFsr),
            ("blk_07", FileKind::Other),
            ("blk_7_1001", FileKind::Other),
            ("blk_7.meta", FileKind::Other),
            ("blk_7_x.meta", FileKind::Other),
            ("VERSION", FileKind::Other),
            ("x.unlinked", FileKind::Other),
            ("", FileKind::Other),
        ] {
            assert_eq!(FileKind::of(name), is, "{name}");
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
        fn no_name_makes_the_parser_panic(name in ".{0,60}") {
            let _ = FileKind::of(&name);
        }

        #[test]
        fn names_of_blocks_are_read_back(id: i64, stamp: u64) {
            prop_assert_eq!(FileKind::of(&format!("blk_{id}")), FileKind::Data(id));
            prop_assert_eq!(FileKind::of(&format!("blk_{id}_{stamp}.meta")), FileKind::Meta(id, stamp));
        }
    }
}
