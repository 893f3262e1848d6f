// SPDX-License-Identifier: Apache-2.0
//! Finds all finished blocks of a data directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use viola_proto::agent::{BlockKey, FsId};

use crate::blocks::layout::{FileKind, MAX_SUBDIR_DEPTH, finalized_pool};
use crate::blocks::types::Location;

/// Blocks per batch of a scan.
const BATCH_BLOCKS: usize = 500;

/// Calls `found` with batches of all finished blocks below `data`, until it returns `false`.
pub fn scan(fs: FsId, data: &Path, found: &mut dyn FnMut(Vec<Location>) -> bool) {
    let mut batch = Vec::new();
    let pools = fs::read_dir(data.join("current"))
        .into_iter()
        .flatten()
        .flatten();
    for pool in pools {
        let top = pool.path().join("current/finalized");
        if finalized_pool(data, &top).is_some() {
            let mut folders = vec![(top, 0)];
            while let Some((folder, depth)) = folders.pop() {
                read(fs, data, folder, depth, &mut folders, &mut batch);
                if batch.len() >= BATCH_BLOCKS && !found(std::mem::take(&mut batch)) {
                    return;
                }
            }
        }
    }
    found(batch);
}

/// Reads one directory: its blocks, and its subdirectories.
fn read(
    fs: FsId,
    data: &Path,
    folder: PathBuf,
    depth: usize,
    folders: &mut Vec<(PathBuf, usize)>,
    blocks: &mut Vec<Location>,
) {
    let Some(pool) = finalized_pool(data, &folder) else {
        return;
    };
    let shared: Arc<Path> = Arc::from(folder.as_path());
    for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else {
            continue;
        };
        if let FileKind::Meta(id, stamp) = FileKind::of(name)
            && let Ok(key) = BlockKey::new(pool, id, stamp)
        {
            blocks.push(Location {
                fs,
                folder: Arc::clone(&shared),
                key,
            });
        } else if depth < MAX_SUBDIR_DEPTH
            && name.starts_with("subdir")
            && entry.file_type().is_ok_and(|t| t.is_dir())
        {
            folders.push((entry.path(), depth + 1));
        }
    }
}

/// Generation stamps of the checksum files beside block `id`: one, unless the DataNode is changing the block.
pub fn generation_stamps(folder: &Path, id: i64) -> Vec<u64> {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| match FileKind::of(entry.file_name().to_str()?) {
            FileKind::Meta(of, stamp) if of == id => Some(stamp),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finished_blocks_are_found_and_nothing_else() {
        let top = tempfile::tempdir().unwrap();
        let pool = top.path().join("current/BP-1-1-1");
        for (folder, name) in [
            ("current/finalized/subdir0/subdir1", "blk_7_1001.meta"),
            ("current/finalized/subdir0/subdir1", "blk_7"),
            ("current/finalized/subdir3/subdir2", "blk_8_1002.meta"),
            ("current/finalized", "blk_9_1003.meta"),
            ("current/rbw", "blk_10_1004.meta"),
            ("previous/finalized/subdir0/subdir1", "blk_7_1001.meta"),
            ("trash/finalized/subdir0/subdir1", "blk_11_1001.meta"),
            ("current/finalized/other/subdir1", "blk_12_1001.meta"),
        ] {
            let folder = pool.join(folder);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join(name), "").unwrap();
        }
        let mut all = Vec::new();
        scan(3, top.path(), &mut |batch| {
            all.extend(batch.into_iter().map(|p| (p.fs, p.key.id(), p.key.stamp())));
            true
        });
        all.sort_unstable();
        assert_eq!(all, [(3, 7, 1001), (3, 8, 1002), (3, 9, 1003)]);
        assert_eq!(
            generation_stamps(&pool.join("current/finalized/subdir0/subdir1"), 7),
            [1001]
        );
    }
}
