// SPDX-License-Identifier: Apache-2.0
//! Finds the mount of a block.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};

use viola_proto::agent::BlockKey;

use crate::block::Block;
use crate::{Error, Result};

/// Default path of the mount.
pub const DEFAULT_MOUNT: &str = "/run/viola/vread";

/// The mounts of a process. One mount contains the blocks of all DataNodes that the VM may read; set others by
/// DataNode only where a VM has several.
#[derive(Debug)]
pub struct Library {
    default: RwLock<PathBuf>,
    mounts: RwLock<HashMap<String, PathBuf>>,
}

impl Library {
    /// Uses this default mount.
    pub fn new(mount: impl Into<PathBuf>) -> Self {
        Self {
            default: RwLock::new(mount.into()),
            mounts: RwLock::default(),
        }
    }

    /// Uses the mount in the environment variable `VREAD_MOUNT`, else [`DEFAULT_MOUNT`].
    pub fn from_env() -> Self {
        let named = std::env::var_os("VREAD_MOUNT").filter(|path| !path.is_empty());
        Self::new(named.unwrap_or_else(|| DEFAULT_MOUNT.into()))
    }

    /// Sets the mount for the blocks of one DataNode, or the default mount.
    pub fn set_mount(&self, path: &Path, datanode: Option<&str>) {
        match datanode {
            None => *self.default.write().unwrap_or_else(PoisonError::into_inner) = path.into(),
            Some(name) => {
                let mut mounts = self.mounts.write().unwrap_or_else(PoisonError::into_inner);
                mounts.insert(name.into(), path.into());
            }
        }
    }

    /// Opens a block, `POOL/blk_ID_STAMP`, or its checksums, `POOL/blk_ID_STAMP.meta`. `datanode` selects
    /// the mount where there are several.
    ///
    /// # Errors
    /// [`Error::InvalidName`], [`Error::NotFound`] or [`Error::Io`].
    pub fn open(&self, name: &str, datanode: Option<&str>) -> Result<Block> {
        let known = name
            .split_once('/')
            .is_some_and(|(pool, file)| BlockKey::parse(pool, file).is_some());
        if !known {
            return Err(Error::InvalidName(name.chars().take(200).collect()));
        }
        Block::open(self.mount(datanode).join(name), name)
    }

    fn mount(&self, datanode: Option<&str>) -> PathBuf {
        let mounts = self.mounts.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(path) = datanode.and_then(|name| mounts.get(name)) {
            return path.clone();
        }
        let default = self.default.read().unwrap_or_else(PoisonError::into_inner);
        default.clone()
    }
}
