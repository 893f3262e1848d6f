// SPDX-License-Identifier: Apache-2.0
//! `[[launcher]]`: which processes are VMs though neither libvirt nor a registration says so.

use std::path::PathBuf;

use serde::Deserialize;

use crate::Conflict;
use crate::value::{parsed, some_absolute, some_name};

/// An entry of `[[launcher]]`. A process has to meet all conditions that are given.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Launcher {
    /// Control group, where `*` stands for any characters of one part of the path; VMs may be in groups below it.
    #[serde(deserialize_with = "pattern")]
    pub cgroup: Option<String>,
    /// Program, a file that only root may write.
    #[serde(deserialize_with = "some_absolute")]
    pub program: Option<PathBuf>,
    /// Name or number of the user that runs it.
    #[serde(deserialize_with = "some_name")]
    pub user: Option<String>,
}

impl Launcher {
    /// What is wrong with entry number `i`, if anything.
    pub(super) fn check(&self, i: usize) -> Result<(), Conflict> {
        let only = match (&self.cgroup, &self.program, &self.user) {
            (Some(_), ..) | (None, Some(_), Some(_)) => return Ok(()),
            (None, Some(_), None) => "program",
            (None, None, Some(_)) => "user",
            (None, None, None) => "",
        };
        let (path, what) = match only {
            "" => (
                format!("launcher.{i}"),
                "a [[launcher]] needs cgroup, or program and user".to_owned(),
            ),
            key => (
                format!("launcher.{i}.{key}"),
                format!("{key}: too little to know a VM by; add cgroup, or both program and user"),
            ),
        };
        Err(Conflict { path, what })
    }
}

/// Parses a path of control groups that names at least one part.
fn pattern<'de, D: serde::de::Deserializer<'de>>(d: D) -> Result<Option<String>, D::Error> {
    parsed(d, "a path in quotes, for example \"/qemu.slice/*\"", |t| {
        let parts: Vec<&str> = match t.strip_prefix('/') {
            Some(inside) => inside.split('/').collect(),
            None => return Err("a path of control groups begins with /".to_owned()),
        };
        if parts.iter().any(|p| matches!(*p, "" | "." | "..")) {
            return Err("empty parts, . and .. are not allowed".to_owned());
        }
        match parts[0].contains('*') {
            true => Err("the first part must be a name without *".to_owned()),
            false => Ok(Some(t.to_owned())),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::{Config, ConfigError};

    fn parse(text: &str) -> Result<Config, ConfigError> {
        Config::parse(Path::new("v.toml"), text)
    }

    #[test]
    fn a_launcher_is_known_by_its_group_or_by_program_and_user() {
        let config = parse(
            "[[launcher]]\ncgroup = \"/qemu.slice/*.scope\"\n[[launcher]]\nprogram = \"/usr/bin/qemu-system-x86_64\"\nuser = \"vmm\"\n",
        )
        .unwrap();
        assert_eq!(
            config.launchers[0].cgroup.as_deref(),
            Some("/qemu.slice/*.scope")
        );
        assert_eq!(config.launchers[1].user.as_deref(), Some("vmm"));
        assert!(parse("").unwrap().launchers.is_empty());
    }

    #[test]
    fn a_launcher_that_would_let_anybody_in_is_refused() {
        let said = |text: &str| {
            parse(&format!("[[launcher]]\n{text}\n"))
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            said("user = \"vmm\""),
            "v.toml:2: user: too little to know a VM by; add cgroup, or both program and user"
        );
        assert!(said("program = \"/usr/bin/kvm\"").starts_with("v.toml:2: program: too little"));
        assert!(said("").contains("needs cgroup, or program and user"));
        assert!(said("program = \"kvm\"\nuser = \"a\"").contains("not an absolute path"));
        for (cgroup, why) in [
            ("qemu.slice", "begins with /"),
            ("/", "empty parts"),
            ("/a/../b", "empty parts"),
            ("/*", "without *"),
        ] {
            let text = said(&format!("cgroup = \"{cgroup}\""));
            assert!(text.contains(why), "{text}");
        }
    }
}
