// SPDX-License-Identifier: Apache-2.0
//! What libvirt and systemd-machined say of a process.
//!
//! libvirt's public interface gives no process number. Its QEMU driver writes `NAME.pid` into a folder of root's for each
//! running domain, before QEMU starts; with systemd it also has machined make a scope `machine-qemu\x2dID\x2dNAME.scope` below
//! `/machine.slice`, where only root can make groups.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::is_owned;
use crate::libvirt::Domain;
use crate::proc;
use crate::thread::Tid;
use crate::vm::{Vm, printable};

/// Domains of libvirt by process, from the pid files in a folder; empty when the folder is not `owner`'s alone.
pub(super) fn pid_files(folder: &Path, owner: u32) -> BTreeMap<Tid, String> {
    let mut found = BTreeMap::new();
    if !is_owned(folder, owner) {
        return found;
    }
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, file) = (entry.path(), entry.file_name());
        let Some(name) = file.to_str().and_then(|n| n.strip_suffix(".pid")) else {
            continue;
        };
        // A folder that libvirt itself made holds only its files, but a link could name any.
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        let text = proc::read_text(&path).ok().flatten();
        let pid = text.and_then(|t| pid_in(&t));
        if let Some(pid) = pid.filter(|_| is_file && is_owned(&path, owner)) {
            found.insert(pid, printable(name));
        }
    }
    found
}

/// The process that a pid file names.
pub(crate) fn pid_in(text: &str) -> Option<Tid> {
    text.trim().parse().ok()
}

/// Compares what a process says of itself with libvirt: `name` is the domain of its pid file, `domains` are those that run.
pub(super) fn check_domain(
    vm: &Vm,
    name: &str,
    domains: Option<&BTreeMap<String, Domain>>,
) -> Result<(), String> {
    if vm.name != name {
        return Err(format!("libvirt calls it {name}"));
    }
    let Some(domains) = domains else {
        return Ok(());
    };
    let Some(domain) = domains.values().find(|domain| domain.name == name) else {
        return Err(format!("libvirt has no running domain {name}"));
    };
    match &vm.uuid {
        Some(uuid) if !uuid.eq_ignore_ascii_case(&domain.uuid) => {
            Err(format!("libvirt's domain {name} has UUID {}", domain.uuid))
        }
        _ => Ok(()),
    }
}

/// The scope that machined made for a domain of libvirt, and the machine's name, from the path of a process's group.
pub(crate) fn machine_of(group: &str) -> Option<(&str, String)> {
    let inside = group.strip_prefix("/machine.slice/")?;
    let (scope, _) = inside.split_once('/').unwrap_or((inside, ""));
    let unit = scope.strip_prefix("machine-")?.strip_suffix(".scope")?;
    let machine = unescape(unit)?;
    machine.strip_prefix("qemu-")?;
    let end = group.len() - inside.len() + scope.len();
    Some((&group[..end], machine))
}

/// Decodes `\xNN` of systemd.unit(5); `None` when that is no text.
fn unescape(unit: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(unit.len());
    let mut rest = unit;
    while let Some(at) = rest.find("\\x") {
        bytes.extend(&rest.as_bytes()[..at]);
        bytes.push(u8::from_str_radix(rest.get(at + 2..at + 4)?, 16).ok()?);
        rest = &rest[at + 4..];
    }
    bytes.extend(rest.as_bytes());
    String::from_utf8(bytes).ok()
}

/// Whether libvirt gives a domain of this name the machine name `qemu-ID-NAME`. It leaves out most characters that are neither
/// letters nor digits, and cuts the whole at 64 characters (`virDomainGenerateMachineName`).
pub(crate) fn is_machine_of(machine: &str, name: &str) -> bool {
    const MAX_LENGTH: usize = 64;
    let plain =
        |text: &str| -> String { text.chars().filter(char::is_ascii_alphanumeric).collect() };
    let Some((id, rest)) = machine
        .strip_prefix("qemu-")
        .and_then(|m| m.split_once('-'))
    else {
        return false;
    };
    let is_number = !id.is_empty() && id.bytes().all(|b| b.is_ascii_digit());
    let (rest, name) = (plain(rest), plain(name));
    let is_cut = machine.len() >= MAX_LENGTH - 1;
    is_number && !rest.is_empty() && (rest == name || is_cut && name.starts_with(&rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::libvirt::DomainState;
    use crate::vm::tests::own_process;

    #[test]
    fn a_machine_is_found_by_its_scope() {
        let scope = r"/machine.slice/machine-qemu\x2d1\x2ddb01.scope";
        for inside in ["", "/libvirt/emulator"] {
            let group = format!("{scope}{inside}");
            assert_eq!(machine_of(&group), Some((scope, "qemu-1-db01".to_owned())));
        }
        for other in [
            r"/user.slice/user-1000.slice/user@1000.service/machine.slice/machine-qemu\x2d1\x2ddb01.scope",
            r"/machine.slice/libpod-3f.scope/machine-qemu\x2d1\x2ddb01.scope",
            r"/machine.slice/machine-lxc\x2d1\x2ddb01.scope",
            r"/machine.slice/machine-qemu\x2.scope",
            "/machine.slice",
            "/",
        ] {
            assert_eq!(machine_of(other), None, "{other}");
        }
    }

    #[test]
    fn a_machines_name_fits_only_its_domain() {
        assert!(is_machine_of("qemu-1-db01", "db01"));
        assert!(is_machine_of("qemu-12-web-front.a", "web_front.a"));
        for name in ["db0", "db012", "client1", ""] {
            assert!(!is_machine_of("qemu-1-db01", name), "{name}");
        }
        for machine in ["qemu-1-", "qemu--db01", "qemu-x-db01", "lxc-1-db01"] {
            assert!(!is_machine_of(machine, "db01"), "{machine}");
        }
        let long = "d".repeat(80);
        let cut = format!("qemu-1-{}", &long[..57]);
        assert!(is_machine_of(&cut, &long));
        assert!(!is_machine_of(&cut, &"e".repeat(80)));
    }

    #[test]
    fn a_pid_file_names_a_domain_unless_others_may_write_it() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let own = rustix::process::geteuid().as_raw();
        fs::write(dir.path().join("db01.pid"), "17\n").unwrap();
        fs::write(dir.path().join("db02.pid"), "no number").unwrap();
        fs::write(dir.path().join("db03.xml"), "18").unwrap();
        std::os::unix::fs::symlink("db01.pid", dir.path().join("link.pid")).unwrap();
        let loose = dir.path().join("loose.pid");
        fs::write(&loose, "19").unwrap();
        fs::set_permissions(&loose, fs::Permissions::from_mode(0o666)).unwrap();
        let found = pid_files(dir.path(), own);
        assert_eq!(found, BTreeMap::from([(17, "db01".to_owned())]));
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(pid_files(dir.path(), own).is_empty());
        assert!(pid_files(&dir.path().join("none"), own).is_empty());
    }

    #[test]
    fn a_process_has_to_be_what_libvirt_says() {
        let uuid = "6b5a8a52-0a5b-4b52-9d5c-111111111111";
        let domain = Domain {
            name: "me".into(),
            uuid: uuid.into(),
            state: DomainState::Running,
        };
        let running = BTreeMap::from([(uuid.to_owned(), domain)]);
        let vm = Vm {
            uuid: Some(uuid.to_uppercase()),
            ..own_process()
        };
        assert_eq!(check_domain(&vm, "me", None), Ok(()));
        assert_eq!(check_domain(&vm, "me", Some(&running)), Ok(()));
        let wrong = |vm: &Vm, name, domains: &BTreeMap<_, _>| {
            check_domain(vm, name, Some(domains)).unwrap_err()
        };
        assert_eq!(wrong(&vm, "db01", &running), "libvirt calls it db01");
        let none = BTreeMap::new();
        assert_eq!(wrong(&vm, "me", &none), "libvirt has no running domain me");
        let vm = Vm {
            uuid: Some("another".into()),
            ..vm
        };
        assert!(wrong(&vm, "me", &running).contains("has UUID 6b5a8a52"));
    }
}
