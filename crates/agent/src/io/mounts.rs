// SPDX-License-Identifier: Apache-2.0
//! Parses the mount table and finds the mount that holds a path.

use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// A line of `/proc/self/mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Mount id, which is new after every mount.
    pub id: u64,
    /// Major and minor number of its device.
    pub device: String,
    /// Mount point.
    pub point: PathBuf,
    /// File system type: `ext4`, `xfs`.
    pub kind: String,
    /// Options of the mount and of its file system.
    pub options: String,
}

/// Parses a mountinfo file and skips invalid lines.
pub fn parse(text: &str) -> Vec<Mount> {
    text.lines().filter_map(line).collect()
}

fn line(text: &str) -> Option<Mount> {
    let (mount, system) = text.split_once(" - ")?;
    let mut fields = mount.split(' ');
    let id = fields.next()?.parse().ok()?;
    let device = fields.nth(1)?.to_owned();
    let point = unescape(fields.nth(1)?);
    let options = fields.next()?;
    let mut fields = system.split(' ');
    let kind = fields.next()?.to_owned();
    let more = fields.nth(1).unwrap_or_default();
    Some(Mount {
        id,
        device,
        point,
        kind,
        options: format!("{options} {more}"),
    })
}

/// Decodes octal escapes: a space is written as `\040`.
fn unescape(text: &str) -> PathBuf {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let octal = bytes
            .get(at..at + 4)
            .filter(|b| b[0] == b'\\')
            .and_then(|b| std::str::from_utf8(&b[1..]).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match octal {
            Some(byte) => {
                out.push(byte);
                at += 4;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    std::ffi::OsString::from_vec(out).into()
}

/// The mount that holds a path: the deepest mount point above it, and of equal ones the last.
pub fn holding<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    mounts
        .iter()
        .filter(|m| path.starts_with(&m.point))
        .max_by_key(|m| m.point.components().count())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEXT: &str = "21 1 0:19 / / rw,relatime - hostfs none rw\n\
        30 21 98:0 / /data/1 rw,noatime shared:5 - ext4 /dev/ubda rw,data=ordered\n\
        31 21 98:16 /sub /data/with\\040space rw - xfs /dev/ubdb rw,attr2\n\
        nonsense\n\
        35 30 98:32 / /data/1 ro - xfs /dev/ubdc ro\n";

    #[test]
    fn the_last_and_deepest_mount_holds_a_path() {
        let mounts = parse(TEXT);
        assert_eq!(mounts.len(), 4);
        let of = |path: &str| holding(&mounts, Path::new(path)).unwrap().id;
        assert_eq!(of("/data/1/dfs"), 35);
        assert_eq!(of("/data/10"), 21);
        assert_eq!(of("/data/with space/x"), 31);
        assert_eq!(mounts[1].options, "rw,noatime rw,data=ordered");
        assert_eq!(mounts[1].kind, "ext4");
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in ".{0,200}") {
            let _ = parse(&text);
        }
    }
}
