// SPDX-License-Identifier: Apache-2.0
//! `[pipe]` in the configuration: what the host may move, and which users may ask.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::io::passwd;

/// Maximum path length of a unix socket, in bytes.
const MAX_SOCKET_PATH_BYTES: usize = 107;
/// Upper bound of `max_pipes`: each pipe takes up to four descriptors.
const MAX_PIPES: u32 = 4096;

/// `[pipe]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Directories on whose file systems pipes may read.
    pub files: Vec<PathBuf>,
    /// Directories on whose file systems pipes may write.
    pub into: Vec<PathBuf>,
    /// Whether pipes may connect two connections.
    pub relay: bool,
    /// Users whose programs may ask.
    pub users: Vec<User>,
    /// Socket at which programs ask.
    pub socket: PathBuf,
    /// Maximum number of pipes at a time, 1 to 4096.
    #[serde(alias = "most")]
    pub max_pipes: u32,
}

/// A user of this VM.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum User {
    /// By number.
    Uid(u32),
    /// By name, as in `/etc/passwd`.
    Name(String),
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            files: Vec::new(),
            into: Vec::new(),
            relay: false,
            users: vec![User::Name("root".into())],
            socket: viola_proto::pipe::library::SOCKET.into(),
            max_pipes: 256,
        }
    }
}

impl Settings {
    /// Checks that the values are usable.
    ///
    /// # Errors
    /// One sentence that names the key.
    pub fn check(&self) -> Result<(), String> {
        for (key, paths) in [("files", &self.files), ("into", &self.into)] {
            if let Some(path) = paths.iter().find(|p| !p.is_absolute()) {
                return Err(format!(
                    "`{key}` in [pipe]: `{}` must be an absolute path",
                    path.display()
                ));
            }
        }
        if !self.socket.is_absolute() || self.socket.as_os_str().len() > MAX_SOCKET_PATH_BYTES {
            return Err(format!(
                "`socket` in [pipe] must be an absolute path of at most {MAX_SOCKET_PATH_BYTES} bytes"
            ));
        }
        if !(1..=MAX_PIPES).contains(&self.max_pipes) {
            return Err(format!(
                "`max_pipes` in [pipe] is {}; it must be 1 to {MAX_PIPES}",
                self.max_pipes
            ));
        }
        if self.users.contains(&User::Name(String::new())) {
            return Err("`users` in [pipe]: a name is empty".into());
        }
        Ok(())
    }

    /// Whether any kind of pipe is allowed.
    pub fn is_used(&self) -> bool {
        !self.files.is_empty() || !self.into.is_empty() || self.relay
    }

    /// The numeric ids of the users, by `passwd` (normally `/etc/passwd`).
    ///
    /// # Errors
    /// One sentence: there is no such user.
    pub fn uids(&self, passwd: &Path) -> Result<BTreeSet<u32>, String> {
        let known = passwd::users(passwd);
        let find = |user: &User| match user {
            User::Uid(uid) => Ok(*uid),
            // exists without an entry
            User::Name(name) if name == "root" => Ok(0),
            User::Name(name) => {
                let entry = known.iter().find(|(known, _)| known == name);
                entry.map(|(_, uid)| *uid).ok_or_else(|| {
                    format!(
                        "`users` in [pipe]: {} has no user `{name}`",
                        passwd.display()
                    )
                })
            }
        };
        self.users.iter().map(find).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_name_and_number() {
        let folder = tempfile::tempdir().unwrap();
        let passwd = folder.path().join("passwd");
        std::fs::write(&passwd, "www-data:x:33:33::/var/www:\nodd:x:many\n").unwrap();
        let uids = |users: &[&str]| {
            let user = |user: &&str| match user.parse() {
                Ok(uid) => User::Uid(uid),
                Err(_) => User::Name((*user).into()),
            };
            let users = users.iter().map(user).collect();
            let settings = Settings {
                users,
                ..Settings::default()
            };
            settings.uids(&passwd)
        };
        assert_eq!(
            uids(&["www-data", "root", "7"]),
            Ok(BTreeSet::from([0, 7, 33]))
        );
        for missing in ["nobody", "odd", "www"] {
            let says = uids(&[missing]).unwrap_err();
            assert!(says.contains(&format!("has no user `{missing}`")), "{says}");
        }
    }
}
