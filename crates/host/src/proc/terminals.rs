// SPDX-License-Identifier: Apache-2.0
//! The terminals that a process has made.

use std::path::Path;

use super::read::{numbers, read_link, read_text, status_field};
use crate::error::HostError;
use crate::thread::Tid;

/// Numbers N of the terminals `/dev/pts/N` whose other end the process has open (pty(7); Linux 4.18 and later show them).
///
/// # Errors
/// As [`super::read`].
pub fn terminals(pid: Tid) -> Result<Vec<u32>, HostError> {
    let mut found = Vec::new();
    for fd in numbers(Path::new(&format!("/proc/{pid}/fd")))? {
        let target = read_link(format!("/proc/{pid}/fd/{fd}"))?;
        if target.is_some_and(|t| t.ends_with("ptmx")) {
            let info = read_text(format!("/proc/{pid}/fdinfo/{fd}"))?.unwrap_or_default();
            found.extend(status_field(&info, "tty-index").and_then(|n| n.parse::<u32>().ok()));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pty::{OpenptFlags, openpt, ptsname};

    #[test]
    fn a_terminal_belongs_to_the_process_that_made_it() {
        let own = std::process::id();
        let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        let name = ptsname(&terminal, Vec::new()).unwrap();
        let number = name.to_str().unwrap().strip_prefix("/dev/pts/").unwrap();
        let number: u32 = number.parse().unwrap();
        assert!(terminals(own).unwrap().contains(&number));
        drop(terminal);
        assert!(!terminals(own).unwrap().contains(&number));
    }
}
