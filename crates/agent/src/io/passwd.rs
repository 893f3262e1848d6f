// SPDX-License-Identifier: Apache-2.0
//! The users of this VM, as `/etc/passwd` has them (passwd(5)).

use std::path::Path;

/// Name and number of each user; none if the file cannot be read.
pub fn users(passwd: &Path) -> Vec<(String, u32)> {
    let text = std::fs::read(passwd).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let user = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        Some((name.to_owned(), fields.nth(1)?.parse().ok()?))
    };
    text.lines().filter_map(user).collect()
}
