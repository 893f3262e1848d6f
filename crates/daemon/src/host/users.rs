// SPDX-License-Identifier: Apache-2.0
//! Numbers of users and groups, from the system's name service (NSS).

use std::ffi::CString;
use std::mem::MaybeUninit;

use libc::{c_char, c_int};

/// Largest entry; a group with many members is long.
const MAX_ENTRY_BYTES: usize = 16 << 20;

/// Number of a group; `None` when there is no such group.
pub fn group_id(name: &str) -> Option<u32> {
    look_up(name, libc::getgrnam_r, |group: &libc::group| group.gr_gid)
}

/// Numbers of a user and of its primary group; `None` when there is no such user.
pub fn user_ids(name: &str) -> Option<(u32, u32)> {
    look_up(name, libc::getpwnam_r, |user: &libc::passwd| {
        (user.pw_uid, user.pw_gid)
    })
}

/// `getgrnam_r` or `getpwnam_r`: name, entry, buffer for its texts and the buffer's length, and where a pointer to the entry goes.
type LookUp<E> =
    unsafe extern "C" fn(*const c_char, *mut E, *mut c_char, usize, *mut *mut E) -> c_int;

/// Looks an entry up, with a buffer that grows until the entry fits.
fn look_up<E, T>(name: &str, function: LookUp<E>, take: fn(&E) -> T) -> Option<T> {
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0u8; 16 << 10];
    loop {
        let mut found = std::ptr::null_mut();
        let mut entry = MaybeUninit::<E>::zeroed();
        let (texts, length) = (buffer.as_mut_ptr().cast(), buffer.len());
        // SAFETY: name ends with zero; entry, buffer (with its length) and found are live and writable.
        let error =
            unsafe { function(name.as_ptr(), entry.as_mut_ptr(), texts, length, &mut found) };
        match error {
            libc::ERANGE if buffer.len() < MAX_ENTRY_BYTES => buffer.resize(buffer.len() * 4, 0),
            // SAFETY: found is null, or points to entry, which the function has filled.
            0 => return unsafe { found.as_ref() }.map(take),
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_groups_are_found_by_name() {
        assert_eq!(group_id("root"), Some(0));
        assert_eq!(user_ids("root"), Some((0, 0)));
        assert!(user_ids("nobody").is_some_and(|(uid, gid)| uid > 0 && gid > 0));
        for none in ["no-such-name-here", "a\0b"] {
            assert_eq!((group_id(none), user_ids(none)), (None, None));
        }
    }
}
