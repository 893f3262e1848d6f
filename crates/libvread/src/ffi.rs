// SPDX-License-Identifier: Apache-2.0
//! The C interface, see `vread.h` and `vread(3)`.
//!
//! Each function returns -1 and sets errno when it fails.

use std::collections::HashMap;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::io::SeekFrom;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use libc::{off_t, size_t, ssize_t};

use crate::{Block, Library};

/// Maximum number of open blocks.
const MAX_OPEN: usize = 65_536;

#[derive(Default)]
struct Descriptors {
    open: HashMap<c_int, Arc<Block>>,
    last: c_int,
}

static LIBRARY: LazyLock<Library> = LazyLock::new(Library::from_env);
static DESCRIPTORS: LazyLock<RwLock<Descriptors>> = LazyLock::new(RwLock::default);

/// Runs `call` and stores a failure in errno. A panic becomes `EIO`, because it must not unwind into C.
fn guarded<T>(failed: T, call: impl FnOnce() -> Result<T, c_int>) -> T {
    let result = catch_unwind(AssertUnwindSafe(call)).unwrap_or(Err(libc::EIO));
    result.unwrap_or_else(|errno| {
        // SAFETY: the address of this thread's errno is always good.
        unsafe { *libc::__errno_location() = errno };
        failed
    })
}

/// # Safety
/// `text` is null or a null-terminated string.
unsafe fn text<'a>(text: *const c_char) -> Result<Option<&'a str>, c_int> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: not null; the caller guarantees the rest.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| libc::EINVAL)
}

fn block(vd: c_int) -> Result<Arc<Block>, c_int> {
    let descriptors = DESCRIPTORS.read().unwrap_or_else(PoisonError::into_inner);
    descriptors.open.get(&vd).cloned().ok_or(libc::EBADF)
}

/// Sets the mount for the blocks of one DataNode, or the default mount if `datanode` is null. Returns 0, or -1.
///
/// # Safety
/// Both arguments are null or null-terminated strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vread_mount(path: *const c_char, datanode: *const c_char) -> c_int {
    guarded(-1, || {
        if path.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: not null; the caller guarantees the rest.
        let path = unsafe { CStr::from_ptr(path) };
        // SAFETY: the caller guarantees it.
        let datanode = unsafe { text(datanode) }?;
        LIBRARY.set_mount(Path::new(OsStr::from_bytes(path.to_bytes())), datanode);
        Ok(0)
    })
}

/// Opens a block by its name. Returns a descriptor above 0, or -1.
///
/// # Safety
/// Both arguments are null or null-terminated strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vread_open(name: *const c_char, datanode: *const c_char) -> c_int {
    guarded(-1, || {
        // SAFETY: the caller guarantees it.
        let (name, datanode) = unsafe { (text(name)?.ok_or(libc::EINVAL)?, text(datanode)?) };
        let block = LIBRARY.open(name, datanode).map_err(|e| e.errno())?;
        let mut descriptors = DESCRIPTORS.write().unwrap_or_else(PoisonError::into_inner);
        if descriptors.open.len() >= MAX_OPEN {
            return Err(libc::EMFILE);
        }
        // Numbers are reused late, so that a call with a closed descriptor fails with EBADF.
        let mut number = descriptors.last;
        loop {
            number = number.checked_add(1).unwrap_or(1);
            if !descriptors.open.contains_key(&number) {
                break;
            }
        }
        descriptors.last = number;
        descriptors.open.insert(number, Arc::new(block));
        Ok(number)
    })
}

/// # Safety
/// `bytes` points to `count` writable bytes.
unsafe fn buffer<'a>(bytes: *mut c_void, count: size_t) -> Result<&'a mut [u8], c_int> {
    if count == 0 {
        return Ok(&mut []);
    }
    if bytes.is_null() {
        return Err(libc::EFAULT);
    }
    let count = count.min(isize::MAX as usize);
    // SAFETY: the caller guarantees `count` writable bytes. They may be uninitialised: pread(2) only writes them.
    Ok(unsafe { std::slice::from_raw_parts_mut(bytes.cast(), count) })
}

/// Reads from the descriptor's position and advances it. Returns the number of bytes, or -1.
///
/// # Safety
/// `bytes` points to `count` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vread_read(vd: c_int, bytes: *mut c_void, count: size_t) -> ssize_t {
    guarded(-1, || {
        let block = block(vd)?;
        // SAFETY: the caller guarantees it.
        let bytes = unsafe { buffer(bytes, count) }?;
        block
            .read(bytes)
            .map(|n| n as ssize_t)
            .map_err(|e| e.errno())
    })
}

/// Reads from `offset`. Returns the number of bytes, or -1.
///
/// # Safety
/// `bytes` points to `count` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vread_pread(
    vd: c_int,
    bytes: *mut c_void,
    count: size_t,
    offset: off_t,
) -> ssize_t {
    guarded(-1, || {
        let block = block(vd)?;
        let offset = u64::try_from(offset).map_err(|_| libc::EINVAL)?;
        // SAFETY: the caller guarantees it.
        let bytes = unsafe { buffer(bytes, count) }?;
        let read = block.pread(bytes, offset);
        read.map(|n| n as ssize_t).map_err(|e| e.errno())
    })
}

/// Moves the position as `lseek(2)` does. Returns the new position, or -1.
#[unsafe(no_mangle)]
pub extern "C" fn vread_seek(vd: c_int, offset: off_t, whence: c_int) -> off_t {
    guarded(-1, || {
        let to = match whence {
            libc::SEEK_SET => SeekFrom::Start(u64::try_from(offset).map_err(|_| libc::EINVAL)?),
            libc::SEEK_CUR => SeekFrom::Current(offset),
            libc::SEEK_END => SeekFrom::End(offset),
            _ => return Err(libc::EINVAL),
        };
        let position = block(vd)?.seek(to).map_err(|e| e.errno())?;
        off_t::try_from(position).map_err(|_| libc::EOVERFLOW)
    })
}

/// Returns the length of the block in bytes, or -1.
#[unsafe(no_mangle)]
pub extern "C" fn vread_size(vd: c_int) -> off_t {
    guarded(-1, || {
        off_t::try_from(block(vd)?.size()).map_err(|_| libc::EOVERFLOW)
    })
}

/// Opens the block of a descriptor again. Returns 0, or -1.
#[unsafe(no_mangle)]
pub extern "C" fn vread_update(vd: c_int) -> c_int {
    guarded(-1, || {
        block(vd)?.reopen().map(|()| 0).map_err(|e| e.errno())
    })
}

/// Closes a descriptor. Returns 0, or -1. Reads in progress on other threads complete.
#[unsafe(no_mangle)]
pub extern "C" fn vread_close(vd: c_int) -> c_int {
    guarded(-1, || {
        let mut descriptors = DESCRIPTORS.write().unwrap_or_else(PoisonError::into_inner);
        descriptors.open.remove(&vd).map(|_| 0).ok_or(libc::EBADF)
    })
}
