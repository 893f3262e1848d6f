// SPDX-License-Identifier: Apache-2.0
//! Who vouches for a VM.
//!
//! | file | what it has |
//! |---|---|
//! | `mod.rs` | [`Confirmation`], [`Sources`]: asks every source |
//! | [`registrations`] | the files by which a launcher registers a VM |
//! | `libvirt.rs` | libvirt's pid files, and the control groups that machined makes for it |
//! | `launcher.rs` | [`Launcher`]: a rule of the operator |
//!
//! Any user can run a program called `qemu-system-x86_64` with `-name guest=db01`. So a process that looks like a VM is only
//! shown until somebody confirms it whom an unprivileged process cannot imitate. Every source binds the process number; all but
//! the operator's rules bind the name, too.

mod launcher;
pub(crate) mod libvirt;
pub mod registrations;

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cgroup::Mounts;
use crate::libvirt::Domain;
use crate::thread::Tid;
use crate::vm::Vm;

pub use launcher::Launcher;

/// The source that confirms that a process is the VM whose name it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Confirmation {
    /// libvirt: its pid file, and while libvirt answers also the domain's name and UUID.
    Libvirt,
    /// systemd-machined: the scope that it made for a domain of libvirt.
    Machined,
    /// A program of root registered the process ([`registrations`]).
    Registered,
    /// A rule of the operator ([`Launcher`]).
    Launcher,
}

/// Whether a control group is the scope that machined made for a domain of libvirt: only root can make one, and it is for one
/// VM, with its helpers.
#[must_use]
pub fn is_machines_scope(group: &str) -> bool {
    libvirt::machine_of(group).is_some_and(|(scope, _)| scope == group)
}

/// Where confirmations come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sources {
    /// Folder of the registrations.
    pub registrations: PathBuf,
    /// Folder in which libvirt keeps a pid file for each running domain.
    pub libvirt: PathBuf,
    /// Rules of the operator.
    pub launchers: Vec<Launcher>,
    /// The user whose files count: root. Tests that are not root take their own.
    pub owner: u32,
}

impl Default for Sources {
    fn default() -> Self {
        Self {
            registrations: registrations::FOLDER.into(),
            libvirt: "/run/libvirt/qemu".into(),
            launchers: Vec::new(),
            owner: 0,
        }
    }
}

/// What the sources say at one moment. Each is read once, when the first process has to be confirmed.
pub(crate) struct Evidence<'a> {
    sources: &'a Sources,
    mounts: &'a Mounts,
    /// libvirt's running domains by UUID; `None` while libvirt does not answer.
    domains: Option<&'a BTreeMap<String, Domain>>,
    pid_files: Option<BTreeMap<Tid, String>>,
}

impl<'a> Evidence<'a> {
    pub(crate) fn new(
        sources: &'a Sources,
        mounts: &'a Mounts,
        domains: Option<&'a BTreeMap<String, Domain>>,
    ) -> Self {
        Self {
            sources,
            mounts,
            domains,
            pid_files: None,
        }
    }

    /// The source that confirms the VM; otherwise one clause that says what is wrong.
    pub(crate) fn confirm(&mut self, vm: &Vm) -> Result<Confirmation, String> {
        let sources = self.sources;
        let pid_files = self
            .pid_files
            .get_or_insert_with(|| libvirt::pid_files(&sources.libvirt, sources.owner));
        if let Some(name) = pid_files.get(&vm.pid) {
            libvirt::check_domain(vm, name, self.domains)?;
            return Ok(Confirmation::Libvirt);
        }
        let group = vm.cgroup.as_ref().map_or("/", |group| group.path.as_str());
        if let Some((scope, machine)) = libvirt::machine_of(group)
            && self.is_roots_group(vm.pid, scope)
        {
            return match libvirt::is_machine_of(&machine, &vm.name) {
                true => Ok(Confirmation::Machined),
                false => Err(format!("systemd-machined calls it {machine}")),
            };
        }
        match registrations::read(&sources.registrations, vm.pid, sources.owner) {
            Some(found) if found.start_time == vm.start_time => {
                return match found.name == vm.name {
                    true => Ok(Confirmation::Registered),
                    false => Err(format!("it is registered as {}", found.name)),
                };
            }
            _ => {}
        }
        let is_allowed = |launcher: &Launcher| {
            let group_matches = |pattern: &str| {
                launcher::prefix_of(pattern, group)
                    .is_some_and(|prefix| self.is_roots_group(vm.pid, prefix))
            };
            launcher.matches(vm.pid, sources.owner, group_matches)
        };
        match sources.launchers.iter().any(is_allowed) {
            true => Ok(Confirmation::Launcher),
            false => Err("nothing confirms that it is a VM".to_owned()),
        }
    }

    /// Whether only root can put a process into a group of this path: the group and all groups above belong to root.
    fn is_roots_group(&self, pid: Tid, group: &str) -> bool {
        let folders = self.mounts.folders_of(pid, group);
        !folders.is_empty()
            && folders
                .iter()
                .all(|folder| is_owned(folder, self.sources.owner))
    }
}

/// Whether a file or folder belongs to `owner` and nobody else may write it.
fn is_owned(path: &Path, owner: u32) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|meta| has_owner(&meta, owner))
}

/// As [`is_owned`]. Root's files count for every `owner`.
fn has_owner(meta: &Metadata, owner: u32) -> bool {
    const OTHERS_MAY_WRITE: u32 = 0o022;
    (meta.uid() == 0 || meta.uid() == owner) && meta.mode() & OTHERS_MAY_WRITE == 0
}

#[cfg(test)]
mod tests;
