// SPDX-License-Identifier: Apache-2.0
//! The C interface, see `vread.h` and `vread(3)`.

use std::collections::HashMap;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use libc::{off_t, size_t, ssize_t};

use crate::{Block, Library, Whence};

/// Most blocks open at a time.
const MAX_OPEN: usize = 65_536;

#[derive(Default)]
struct Descriptors {
    open: HashMap<c_int, Arc<Block>>,
    last: c_int,
}

static LIBRARY: LazyLock<Library> = LazyLock::new(Library::from_env);
static DESCRIPTORS: LazyLock<RwLock<Descriptors>> = LazyLock::new(RwLock::default);

/// Runs `call`; a failure goes to errno, and a panic does not go to a caller who has never heard of it.
fn guarded<T>(failed: T, call: impl FnOnce() -> Result<T, c_int>) -> T {
    let result = catch_unwind(AssertUnwindSafe(call)).unwrap_or(Err(libc::EIO));
    result.unwrap_or_else(|errno| {
        // SAFETY: the address of this thread's errno is always good.
        unsafe { *libc::__errno_location() = errno };
        failed
    })
}

/// # Safety
/// `text` is null or a string that ends with a zero byte.
unsafe fn text<'a>(text: *const c_char) -> Result<Option<&'a str>, c_int> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, the rest is the caller's word.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| libc::EINVAL)
}

fn block(vd: c_int) -> Result<Arc<Block>, c_int> {
    let descriptors = DESCRIPTORS.read().unwrap_or_else(PoisonError::into_inner);
    descriptors.open.get(&vd).cloned().ok_or(libc::EBADF)
}

/// Sets the mount of one DataNode's blocks, or with a null `datanode` that of all others.
///
/// # Safety
/// Both are null or strings that end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vread_mount(path: *const c_char, datanode: *const c_char) -> c_int {
    guarded(-1, || {
        if path.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: not null, the rest is the caller's word.
        let path = unsafe { CStr::from_ptr(path) };
        // SAFETY: the caller's word.
        let datanode = unsafe { text(datanode) }?;
        LIBRARY.set_mount(Path::new(OsStr::from_bytes(path.to_bytes())), datanode);
        Ok(0)
    })
}

/// Opens a block by its name; a descriptor, or -1.
///
/// # Safety
/// Both are null or strings that end with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vread_open(name: *const c_char, datanode: *const c_char) -> c_int {
    guarded(-1, || {
        // SAFETY: the caller's word.
        let (name, datanode) = unsafe { (text(name)?.ok_or(libc::EINVAL)?, text(datanode)?) };
        let block = LIBRARY.open(name, datanode).map_err(|e| e.errno())?;
        let mut descriptors = DESCRIPTORS.write().unwrap_or_else(PoisonError::into_inner);
        if descriptors.open.len() >= MAX_OPEN {
            return Err(libc::EMFILE);
        }
        // A number is not used again soon, so that a stale one is noticed.
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
/// `bytes` is good for writing `count` bytes.
unsafe fn buffer<'a>(bytes: *mut c_void, count: size_t) -> Result<&'a mut [u8], c_int> {
    if count == 0 {
        return Ok(&mut []);
    }
    if bytes.is_null() {
        return Err(libc::EFAULT);
    }
    let count = count.min(isize::MAX as usize);
    // SAFETY: the caller's word. That the bytes may have no value yet does no harm: they are only handed
    // to pread(2), which writes them.
    Ok(unsafe { std::slice::from_raw_parts_mut(bytes.cast(), count) })
}

/// Reads from the descriptor's position on, and moves it; the number of bytes, or -1.
///
/// # Safety
/// `bytes` is good for writing `count` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vread_read(vd: c_int, bytes: *mut c_void, count: size_t) -> ssize_t {
    guarded(-1, || {
        let block = block(vd)?;
        // SAFETY: the caller's word.
        let bytes = unsafe { buffer(bytes, count) }?;
        block
            .read(bytes)
            .map(|n| n as ssize_t)
            .map_err(|e| e.errno())
    })
}

/// Reads from `offset` on; the number of bytes, or -1.
///
/// # Safety
/// `bytes` is good for writing `count` bytes.
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
        // SAFETY: the caller's word.
        let bytes = unsafe { buffer(bytes, count) }?;
        let read = block.pread(bytes, offset);
        read.map(|n| n as ssize_t).map_err(|e| e.errno())
    })
}

/// Moves the position as `lseek(2)` does; the new one, or -1.
#[unsafe(no_mangle)]
pub extern "C" fn vread_seek(vd: c_int, offset: off_t, whence: c_int) -> off_t {
    guarded(-1, || {
        let whence = match whence {
            libc::SEEK_SET => Whence::Start,
            libc::SEEK_CUR => Whence::Current,
            libc::SEEK_END => Whence::End,
            _ => return Err(libc::EINVAL),
        };
        let position = block(vd)?.seek(offset, whence).map_err(|e| e.errno())?;
        off_t::try_from(position).map_err(|_| libc::EOVERFLOW)
    })
}

/// Length of the block, or -1.
#[unsafe(no_mangle)]
pub extern "C" fn vread_size(vd: c_int) -> off_t {
    guarded(-1, || {
        off_t::try_from(block(vd)?.size()).map_err(|_| libc::EOVERFLOW)
    })
}

/// Opens the block of a descriptor anew; 0, or -1.
#[unsafe(no_mangle)]
pub extern "C" fn vread_update(vd: c_int) -> c_int {
    guarded(-1, || {
        block(vd)?.update().map(|()| 0).map_err(|e| e.errno())
    })
}

/// Closes a descriptor; 0, or -1. Reads of it that are under way end as if it were open.
#[unsafe(no_mangle)]
pub extern "C" fn vread_close(vd: c_int) -> c_int {
    guarded(-1, || {
        let mut descriptors = DESCRIPTORS.write().unwrap_or_else(PoisonError::into_inner);
        descriptors.open.remove(&vd).map(|_| 0).ok_or(libc::EBADF)
    })
}
