// SPDX-License-Identifier: Apache-2.0
//! The file system that the VM sees: `/POOL/blk_ID_STAMP` and `/POOL/blk_ID_STAMP.meta`, read-only.
//!
//! Directories list only names that the VM has looked up and that still exist. A directory exists for every valid
//! pool name.

use std::ffi::CStr;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fuse_backend_rs::abi::fuse_abi::{
    CreateIn, FsOptions, OpenOptions, SetattrValid, stat64, statvfs64,
};
use fuse_backend_rs::api::filesystem::{
    Context, DirEntry, Entry, FileSystem, ZeroCopyReader, ZeroCopyWriter,
};
use viola_proto::agent::BlockKey;

use super::block::Block;
use super::guest_buffers::{must_not_wait, would_wait};
use super::nodes::{Kind, MAX_NODES, Node, Nodes, ROOT};
use super::service::{Service, count};

use crate::lock::lock;

/// Maximum length of a read, bytes.
pub(super) const MAX_READ_BYTES: u32 = 1 << 20;
/// Maximum directory entries in one answer.
const MAX_ENTRIES: usize = 256;
/// Cache time of what never changes: attributes and directories.
const ATTRIBUTE_TIMEOUT: Duration = Duration::from_secs(3600);
/// Cache time of a block's name. Every open asks the agent worker again, so only `stat` may show a withdrawn block
/// for this long.
const NAME_TIMEOUT: Duration = Duration::from_secs(1);

/// The file system of one connection to a [`Service`].
pub struct BlockFs {
    pub(super) service: Arc<Service>,
    nodes: Arc<Nodes>,
    /// ID of the user and the group that own all files.
    uid: u32,
    open: AtomicU64,
    /// Number of the connection at the service's gate; `None`: it needs no confirmation.
    connection: Option<u64>,
}

pub(super) fn error(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

impl BlockFs {
    /// Creates an empty file system. `uid` is the ID of the user and the group in the VM who own
    /// all files; only that user may read them.
    pub fn new(service: Arc<Service>, uid: u32) -> Self {
        Self::with(service, uid, Nodes::new(), None)
    }

    /// Creates an empty file system for the connection of a VMM with this number.
    pub(super) fn for_connection(service: Arc<Service>, uid: u32, connection: Option<u64>) -> Self {
        Self::with(service, uid, Nodes::new(), connection)
    }

    /// Creates an empty file system for a kernel that may know node numbers of another worker.
    pub(super) fn for_stream(service: Arc<Service>, uid: u32) -> Self {
        Self::with(service, uid, Nodes::from_random(), None)
    }

    fn with(service: Arc<Service>, uid: u32, nodes: Nodes, connection: Option<u64>) -> Self {
        Self {
            service,
            nodes: Arc::new(nodes),
            uid,
            open: AtomicU64::new(0),
            connection,
        }
    }

    /// Finds a block, if the connection is the VM's.
    pub(super) fn find(&self, key: &BlockKey) -> Option<Arc<Block>> {
        if let (Some(gate), Some(connection)) = (self.service.gate(), self.connection)
            && !gate.is_confirmed(connection)
        {
            if must_not_wait() {
                // This only marks the request: another thread serves it again.
                let _ = would_wait();
                return None;
            }
            if !gate.await_confirmation(connection) {
                count(&self.service.counts.not_confirmed);
                return None;
            }
        }
        self.service.find(key)
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn nodes(&self) -> Arc<Nodes> {
        self.nodes.clone()
    }

    fn clear(&self) {
        self.nodes.clear();
        let open = self.open.swap(0, Ordering::Relaxed);
        self.service.counts.open.fetch_sub(open, Ordering::Relaxed);
    }

    fn node(&self, id: u64) -> io::Result<Arc<Node>> {
        self.nodes.get(id).ok_or_else(|| error(libc::ESTALE))
    }

    fn attributes(&self, node: &Node) -> stat64 {
        // SAFETY: plain numbers, for which zero is a value.
        let mut stat: stat64 = unsafe { std::mem::zeroed() };
        stat.st_ino = node.id;
        stat.st_uid = self.uid;
        stat.st_gid = self.uid;
        stat.st_blksize = 4096;
        match &node.kind {
            Kind::File(file) => {
                stat.st_mode = libc::S_IFREG | 0o400;
                stat.st_nlink = 1;
                stat.st_size = file.size.cast_signed();
                stat.st_blocks = file.size.div_ceil(512).cast_signed();
            }
            _ => {
                stat.st_mode = libc::S_IFDIR | 0o500;
                stat.st_nlink = 2;
            }
        }
        stat
    }

    fn entry(&self, node: &Node) -> Entry {
        Entry {
            inode: node.id,
            generation: 0,
            attr: self.attributes(node),
            attr_flags: 0,
            attr_timeout: ATTRIBUTE_TIMEOUT,
            entry_timeout: match node.kind {
                Kind::File(_) => NAME_TIMEOUT,
                _ => ATTRIBUTE_TIMEOUT,
            },
        }
    }
}

impl Drop for BlockFs {
    fn drop(&mut self) {
        self.clear();
    }
}

impl FileSystem for BlockFs {
    type Inode = u64;
    type Handle = u64;

    fn init(&self, _capable: FsOptions) -> io::Result<FsOptions> {
        self.clear();
        Ok(FsOptions::ASYNC_READ
            | FsOptions::BIG_WRITES
            | FsOptions::MAX_PAGES
            | FsOptions::PARALLEL_DIROPS
            | FsOptions::ASYNC_DIO)
    }

    fn destroy(&self) {
        self.clear();
    }

    fn lookup(&self, _: &Context, parent: u64, name: &CStr) -> io::Result<Entry> {
        let absent = || error(libc::ENOENT);
        let parent = self.node(parent)?;
        let name = name.to_str().map_err(|_| absent())?;
        let node = match &parent.kind {
            Kind::Root if BlockKey::is_pool(name) => self.nodes.pool(name),
            Kind::Pool(pool) => {
                let (key, meta) = BlockKey::parse(pool, name).ok_or_else(absent)?;
                let block = self.find(&key).ok_or_else(absent)?;
                self.nodes.file(&block, meta)
            }
            Kind::Root => return Err(absent()),
            Kind::File(_) => return Err(error(libc::ENOTDIR)),
        };
        let Some(node) = node else {
            count(&self.service.counts.too_many);
            return Err(error(libc::ENFILE));
        };
        Ok(self.entry(&node))
    }

    fn forget(&self, _: &Context, inode: u64, times: u64) {
        self.nodes.forget(inode, times);
    }

    fn getattr(&self, _: &Context, inode: u64, _: Option<u64>) -> io::Result<(stat64, Duration)> {
        Ok((self.attributes(&*self.node(inode)?), ATTRIBUTE_TIMEOUT))
    }

    fn open(
        &self,
        _: &Context,
        inode: u64,
        flags: u32,
        _: u32,
    ) -> io::Result<(Option<u64>, OpenOptions, Option<u32>)> {
        let node = self.node(inode)?;
        let Kind::File(file) = &node.kind else {
            return Err(error(libc::EISDIR));
        };
        if flags.cast_signed() & (libc::O_ACCMODE | libc::O_TRUNC) != libc::O_RDONLY {
            return Err(error(libc::EROFS));
        }
        self.block(file)?;
        file.opens.fetch_add(1, Ordering::Relaxed);
        self.open.fetch_add(1, Ordering::Relaxed);
        count(&self.service.counts.open);
        Ok((None, OpenOptions::empty(), None))
    }

    fn read(
        &self,
        _: &Context,
        inode: u64,
        _: u64,
        writer: &mut dyn ZeroCopyWriter,
        size: u32,
        offset: u64,
        _: Option<u64>,
        _: u32,
    ) -> io::Result<usize> {
        let node = self.node(inode)?;
        let Kind::File(file) = &node.kind else {
            return Err(error(libc::EISDIR));
        };
        let left = file.size.saturating_sub(offset);
        let length = usize::try_from(left.min(size.min(MAX_READ_BYTES).into())).unwrap_or(0);
        let length = length.min(writer.available_bytes());
        if length == 0 {
            return Ok(0);
        }
        self.read_file(file, writer, offset, length)
    }

    fn release(
        &self,
        _: &Context,
        inode: u64,
        _: u32,
        _: u64,
        _: bool,
        _: bool,
        _: Option<u64>,
    ) -> io::Result<()> {
        if let Ok(node) = self.node(inode)
            && let Kind::File(file) = &node.kind
        {
            let less = |opens: u64| opens.checked_sub(1);
            let opens = &file.opens;
            if opens
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less)
                .is_ok()
            {
                self.open.fetch_sub(1, Ordering::Relaxed);
                self.service.counts.open.fetch_sub(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn opendir(&self, _: &Context, inode: u64, _: u32) -> io::Result<(Option<u64>, OpenOptions)> {
        match self.node(inode)?.kind {
            Kind::File(_) => Err(error(libc::ENOTDIR)),
            _ => Ok((None, OpenOptions::empty())),
        }
    }

    fn releasedir(&self, _: &Context, _: u64, _: u32, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn readdir(
        &self,
        _: &Context,
        inode: u64,
        _: u64,
        _: u32,
        offset: u64,
        add: &mut dyn FnMut(DirEntry<'_>) -> io::Result<usize>,
    ) -> io::Result<()> {
        let folder = self.node(inode)?;
        // The directory offset is a node number; the root's stands for "." and "..".
        let children = self.nodes.children(&folder, offset.max(ROOT), MAX_ENTRIES);
        let dots = [(0, "."), (ROOT, "..")];
        for (before, name) in dots
            .iter()
            .filter(|(before, _)| offset == 0 || *before > offset)
        {
            let entry = DirEntry {
                ino: folder.id,
                offset: before + 1,
                type_: libc::DT_DIR.into(),
                name: name.as_bytes(),
            };
            if add(entry)? == 0 {
                return Ok(());
            }
        }
        for child in children {
            let (type_, name) = match &child.kind {
                Kind::Root => continue,
                Kind::Pool(pool) => (libc::DT_DIR, pool.clone()),
                Kind::File(file) => {
                    let kept = lock(&file.block);
                    if !kept.upgrade().is_some_and(|block| block.holds()) {
                        continue;
                    }
                    let name = match file.meta {
                        true => file.key.meta_name(),
                        false => file.key.data_name(),
                    };
                    (libc::DT_REG, name)
                }
            };
            let entry = DirEntry {
                ino: child.id,
                offset: child.id,
                type_: type_.into(),
                name: name.as_bytes(),
            };
            if add(entry)? == 0 {
                return Ok(());
            }
        }
        Ok(())
    }

    fn statfs(&self, _: &Context, _: u64) -> io::Result<statvfs64> {
        // SAFETY: plain numbers, for which zero is a value.
        let mut stat: statvfs64 = unsafe { std::mem::zeroed() };
        stat.f_bsize = 4096;
        stat.f_frsize = 4096;
        stat.f_files = MAX_NODES as u64;
        stat.f_namemax = 255;
        stat.f_flag = libc::ST_RDONLY;
        Ok(stat)
    }

    // All modifying operations fail with EROFS. The others that are absent return ENOSYS, which the VM's kernel
    // remembers.

    fn setattr(
        &self,
        _: &Context,
        _: u64,
        _: stat64,
        _: Option<u64>,
        _: SetattrValid,
    ) -> io::Result<(stat64, Duration)> {
        Err(error(libc::EROFS))
    }

    fn symlink(&self, _: &Context, _: &CStr, _: u64, _: &CStr) -> io::Result<Entry> {
        Err(error(libc::EROFS))
    }

    fn mknod(&self, _: &Context, _: u64, _: &CStr, _: u32, _: u32, _: u32) -> io::Result<Entry> {
        Err(error(libc::EROFS))
    }

    fn mkdir(&self, _: &Context, _: u64, _: &CStr, _: u32, _: u32) -> io::Result<Entry> {
        Err(error(libc::EROFS))
    }

    fn unlink(&self, _: &Context, _: u64, _: &CStr) -> io::Result<()> {
        Err(error(libc::EROFS))
    }

    fn rmdir(&self, _: &Context, _: u64, _: &CStr) -> io::Result<()> {
        Err(error(libc::EROFS))
    }

    fn rename(&self, _: &Context, _: u64, _: &CStr, _: u64, _: &CStr, _: u32) -> io::Result<()> {
        Err(error(libc::EROFS))
    }

    fn link(&self, _: &Context, _: u64, _: u64, _: &CStr) -> io::Result<Entry> {
        Err(error(libc::EROFS))
    }

    fn create(
        &self,
        _: &Context,
        _: u64,
        _: &CStr,
        _: CreateIn,
    ) -> io::Result<(Entry, Option<u64>, OpenOptions, Option<u32>)> {
        Err(error(libc::EROFS))
    }

    fn write(
        &self,
        _: &Context,
        _: u64,
        _: u64,
        _: &mut dyn ZeroCopyReader,
        _: u32,
        _: u64,
        _: Option<u64>,
        _: bool,
        _: u32,
        _: u32,
    ) -> io::Result<usize> {
        Err(error(libc::EROFS))
    }

    fn fallocate(&self, _: &Context, _: u64, _: u64, _: u32, _: u64, _: u64) -> io::Result<()> {
        Err(error(libc::EROFS))
    }

    fn setxattr(&self, _: &Context, _: u64, _: &CStr, _: &[u8], _: u32) -> io::Result<()> {
        Err(error(libc::EROFS))
    }

    fn removexattr(&self, _: &Context, _: u64, _: &CStr) -> io::Result<()> {
        Err(error(libc::EROFS))
    }
}
