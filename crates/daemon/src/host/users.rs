// SPDX-License-Identifier: Apache-2.0
//! Numbers of users and groups, from the system's name service (NSS).

use std::ffi::CString;

/// Largest entry; a group with many members is long.
const MAX_ENTRY_BYTES: usize = 16 << 20;

/// Number of a group; `None` when there is no such group.
pub fn group_id(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0u8; 16 << 10];
    loop {
        let mut found = std::ptr::null_mut();
        // SAFETY: all zeroes is a valid `group`: numbers and null pointers.
        let mut group: libc::group = unsafe { std::mem::zeroed() };
        // SAFETY: name ends with zero; group, buffer (with its length) and found are live and writable.
        let error = unsafe {
            libc::getgrnam_r(
                name.as_ptr(),
                &mut group,
                buffer.as_mut_ptr().cast(),
                buffer.len(),
                &mut found,
            )
        };
        match error {
            libc::ERANGE if buffer.len() < MAX_ENTRY_BYTES => buffer.resize(buffer.len() * 4, 0),
            0 if !found.is_null() => return Some(group.gr_gid),
            _ => return None,
        }
    }
}

/// Numbers of a user and of its primary group; `None` when there is no such user.
pub fn user_ids(name: &str) -> Option<(u32, u32)> {
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0u8; 16 << 10];
    loop {
        let mut found = std::ptr::null_mut();
        // SAFETY: all zeroes is a valid `passwd`: numbers and null pointers.
        let mut user: libc::passwd = unsafe { std::mem::zeroed() };
        // SAFETY: name ends with zero; user, buffer (with its length) and found are live and writable.
        let error = unsafe {
            libc::getpwnam_r(
                name.as_ptr(),
                &mut user,
                buffer.as_mut_ptr().cast(),
                buffer.len(),
                &mut found,
            )
        };
        match error {
            libc::ERANGE if buffer.len() < MAX_ENTRY_BYTES => buffer.resize(buffer.len() * 4, 0),
            0 if !found.is_null() => return Some((user.pw_uid, user.pw_gid)),
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
