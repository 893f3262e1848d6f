// SPDX-License-Identifier: Apache-2.0
//! Where the mounts are.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};

use viola_proto::agent::BlockKey;

use crate::block::Block;
use crate::{Error, Result};

/// Where the mount is unless somebody says otherwise.
pub const DEFAULT_MOUNT: &str = "/run/viola/vread";

/// Mounts by DataNode. One mount has the blocks of all DataNodes that this VM may read, so most have
/// the one they began with and no other.
#[derive(Debug)]
pub struct Library {
    default: RwLock<PathBuf>,
    mounts: RwLock<HashMap<String, PathBuf>>,
}

impl Library {
    /// A library whose blocks are in this mount.
    pub fn new(mount: impl Into<PathBuf>) -> Self {
        Self {
            default: RwLock::new(mount.into()),
            mounts: RwLock::default(),
        }
    }

    /// The mount that the variable `VREAD_MOUNT` names, else [`DEFAULT_MOUNT`].
    pub fn from_env() -> Self {
        let named = std::env::var_os("VREAD_MOUNT").filter(|path| !path.is_empty());
        Self::new(named.unwrap_or_else(|| DEFAULT_MOUNT.into()))
    }

    /// Sets the mount of one DataNode's blocks, or that of all others.
    pub fn set_mount(&self, path: &Path, datanode: Option<&str>) {
        match datanode {
            None => *self.default.write().unwrap_or_else(PoisonError::into_inner) = path.into(),
            Some(name) => {
                let mut mounts = self.mounts.write().unwrap_or_else(PoisonError::into_inner);
                mounts.insert(name.into(), path.into());
            }
        }
    }

    /// Opens a block, `POOL/blk_ID_STAMP`, or its checksums, `POOL/blk_ID_STAMP.meta`. `datanode` says
    /// in which mount to look when there are several.
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::Absent`] or [`Error::Io`].
    pub fn open(&self, name: &str, datanode: Option<&str>) -> Result<Block> {
        let known = name
            .split_once('/')
            .is_some_and(|(pool, file)| BlockKey::parse(pool, file).is_some());
        if !known {
            return Err(Error::Name(name.chars().take(200).collect()));
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
