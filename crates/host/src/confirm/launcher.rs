// SPDX-License-Identifier: Apache-2.0
//! A rule of the operator: which processes are VMs though neither libvirt nor a registration says so.

use std::fs;
use std::path::{Path, PathBuf};

use super::has_owner;
use crate::disk_files::file_id;
use crate::proc;
use crate::thread::Tid;

/// A rule. A process fits when it meets every condition that is given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Launcher {
    /// The program, a file that only root may write.
    pub program: Option<PathBuf>,
    /// Number of the user that runs it.
    pub user: Option<u32>,
    /// Pattern of its control group, which root made: `*` stands for any characters of one part of the path. Groups below
    /// belong to it.
    pub cgroup: Option<String>,
}

impl Launcher {
    /// Whether a process fits; `group_matches` compares its control group with a pattern.
    pub(super) fn matches(
        &self,
        pid: Tid,
        owner: u32,
        group_matches: impl Fn(&str) -> bool,
    ) -> bool {
        let is_program = |program: &PathBuf| runs_program(pid, program, owner);
        self.program.as_ref().is_none_or(is_program)
            && self.user.is_none_or(|user| is_user(pid, user))
            && self.cgroup.as_deref().is_none_or(group_matches)
            && (self.cgroup.is_some() || self.user.is_some() && self.program.is_some())
    }
}

/// Whether the process runs this file of the host, or one that a package upgrade has since replaced at this path.
fn runs_program(pid: Tid, program: &Path, owner: u32) -> bool {
    let link = format!("/proc/{pid}/exe");
    let Ok(meta) = fs::metadata(&link) else {
        return false;
    };
    let is_same = fs::metadata(program).is_ok_and(|host| file_id(&host) == file_id(&meta));
    let is_replaced = || {
        let target = fs::read_link(&link).unwrap_or_default();
        let deleted = format!("{} (deleted)", program.display());
        // Another root folder has programs of its own at this path.
        let root = |pid: &str| fs::metadata(format!("/proc/{pid}/root")).map(|m| file_id(&m));
        let has_host_root =
            root(&pid.to_string()).is_ok_and(|its| root("self").is_ok_and(|own| own == its));
        target.as_os_str() == deleted.as_str() && has_host_root
    };
    has_owner(&meta, owner) && (is_same || is_replaced())
}

/// Whether all four user numbers of the process (real, effective, saved, file system) are `user`.
fn is_user(pid: Tid, user: u32) -> bool {
    proc::users(pid).is_ok_and(|users| !users.is_empty() && users.iter().all(|u| *u == user))
}

/// The part of `group` that `pattern` matches, a group or one above; `None` when none does.
pub(super) fn prefix_of<'a>(pattern: &str, group: &'a str) -> Option<&'a str> {
    let mut end = 0;
    for wanted in pattern.strip_prefix('/')?.split('/') {
        let rest = group.get(end..)?.strip_prefix('/')?;
        let part = rest.split('/').next()?;
        if part.is_empty() || !fits(wanted, part) {
            return None;
        }
        end += 1 + part.len();
    }
    group.get(..end)
}

/// Whether a text fits a pattern in which each `*` stands for any characters.
fn fits(pattern: &str, text: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else {
        return pattern == text;
    };
    let Some(mut left) = text.strip_prefix(first) else {
        return false;
    };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        match left.find(part) {
            Some(at) => left = &left[at + part.len()..],
            None => return false,
        }
    }
    left.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_group_or_one_above_it_fits_a_pattern() {
        let prefix = |pattern| prefix_of(pattern, "/qemu.slice/100.scope/vcpu0");
        assert_eq!(prefix("/qemu.slice/*.scope"), Some("/qemu.slice/100.scope"));
        assert_eq!(prefix("/qemu.slice"), Some("/qemu.slice"));
        assert_eq!(prefix("/*/1*0.sc*"), Some("/qemu.slice/100.scope"));
        for other in ["/", "", "qemu.slice", "/qemu", "/qemu.slice/2*", "/*/*/*/*"] {
            assert_eq!(prefix(other), None, "{other}");
        }
        assert_eq!(prefix_of("/a", "/"), None);
    }

    #[test]
    fn a_rule_without_user_or_group_fits_nothing() {
        let pid = std::process::id();
        let own = rustix::process::geteuid().as_raw();
        let program = fs::read_link("/proc/self/exe").unwrap();
        let rule = Launcher {
            program: Some(program.clone()),
            ..Launcher::default()
        };
        assert!(!rule.matches(pid, own, |_| true));
        assert!(!Launcher::default().matches(pid, own, |_| true));
        let user = Launcher {
            user: Some(own),
            ..Launcher::default()
        };
        assert!(!user.matches(pid, own, |_| true));
        let group = Launcher {
            cgroup: Some("/qemu.slice/*".into()),
            ..Launcher::default()
        };
        assert!(group.matches(pid, own, |_| true));
        assert!(!group.matches(pid, own, |_| false));
    }

    #[test]
    fn the_program_has_to_be_the_hosts_file_and_nobody_elses_to_write() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let own = rustix::process::geteuid().as_raw();
        let program = dir.path().canonicalize().unwrap().join("qemu-system-x");
        fs::copy("/bin/sleep", &program).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let mut child = std::process::Command::new(&program)
            .arg("600")
            .spawn()
            .unwrap();
        let rule = |program: &Path, user| Launcher {
            program: Some(program.to_owned()),
            user: Some(user),
            cgroup: None,
        };
        let fits = |rule: Launcher| rule.matches(child.id(), own, |_| true);
        assert!(fits(rule(&program, own)));
        assert!(!fits(rule(&program, own + 1)));
        assert!(!fits(rule(Path::new("/bin/sleep"), own)));
        fs::set_permissions(&program, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(!fits(rule(&program, own)));
        // Replaced by an upgrade.
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        fs::remove_file(&program).unwrap();
        fs::copy("/bin/sleep", &program).unwrap();
        assert!(fits(rule(&program, own)));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    proptest! {
        #[test]
        fn what_fits_is_a_prefix_that_ends_at_a_part(pattern in "(/[ab*]{0,3}){0,3}", group in "(/[ab]{0,3}){0,4}") {
            if let Some(prefix) = prefix_of(&pattern, &group) {
                let is_below = group.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('/'));
                prop_assert!(group == prefix || is_below);
                prop_assert_eq!(prefix.matches('/').count(), pattern.matches('/').count());
            }
        }

        #[test]
        fn a_pattern_of_stars_fits_what_was_cut_out_of_it(a in "[ab]{0,4}", b in "[ab]{0,4}", c in "[ab]{0,4}") {
            let fits_all = fits(&format!("{a}*{c}"), &format!("{a}{b}{c}"));
            prop_assert!(fits_all);
        }
    }
}
