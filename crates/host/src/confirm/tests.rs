// SPDX-License-Identifier: Apache-2.0
//! Who is confirmed, on processes of this host.

use std::process::{Child, Command};
use std::time::Instant;

use super::*;
use crate::inventory::Inventory;
use crate::vm::tests::own_process;

/// A program that any user can start, called and named like a VM of QEMU.
struct Forged {
    child: Child,
    _dir: tempfile::TempDir,
}

impl Forged {
    fn start(name: &str) -> Self {
        Self::start_with(name, &[])
    }

    /// In a user, mount and control group namespace of its own, as root of a container.
    fn start_in_container(name: &str) -> Self {
        let container = "unshare --user --map-root-user --mount --cgroup";
        Self::start_by(container, name, &[])
    }

    fn start_with(name: &str, more: &[&str]) -> Self {
        Self::start_by("env", name, more)
    }

    /// `launcher` is a program with its options, which starts what follows in its place.
    fn start_by(launcher: &str, name: &str, more: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("qemu-system-x86_64");
        std::fs::copy("/bin/sh", &program).unwrap();
        let script = "read word"; // waits
        let mut words = launcher.split(' ');
        let mut command = Command::new(words.next().unwrap());
        command
            .args(words)
            .arg(&program)
            .args(["-c", script, "-name", &format!("guest={name}")])
            .args(more)
            .stdin(std::process::Stdio::piped());
        let child = command.spawn().unwrap();
        let begin = Instant::now();
        while crate::proc::exe(child.id()).unwrap() != program.canonicalize().ok() {
            assert!(begin.elapsed().as_secs() < 20);
            std::thread::yield_now();
        }
        Self { child, _dir: dir }
    }

    fn pid(&self) -> Tid {
        self.child.id()
    }
}

impl Drop for Forged {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn sources(dir: &Path) -> Sources {
    Sources {
        registrations: dir.join("vms"),
        libvirt: dir.join("libvirt"),
        launchers: Vec::new(),
        owner: rustix::process::geteuid().as_raw(),
    }
}

fn confirm(sources: &Sources, vm: &Vm) -> Result<Confirmation, String> {
    let mounts = Mounts::read().unwrap();
    Evidence::new(sources, &mounts, None).confirm(vm)
}

#[test]
fn each_source_confirms_only_the_name_that_it_knows() {
    let dir = tempfile::tempdir().unwrap();
    let sources = sources(dir.path());
    let vm = own_process();
    let db01 = Vm {
        name: "db01".into(),
        ..vm.clone()
    };
    let doubt = confirm(&sources, &vm).unwrap_err();
    assert_eq!(doubt, "nothing confirms that it is a VM");
    registrations::write(&sources.registrations, vm.pid, &vm.name).unwrap();
    assert_eq!(confirm(&sources, &vm), Ok(Confirmation::Registered));
    let doubt = confirm(&sources, &db01).unwrap_err();
    assert_eq!(doubt, "it is registered as me");
    // An earlier process of this number was registered.
    let later = Vm {
        start_time: vm.start_time + 1,
        ..vm.clone()
    };
    assert!(confirm(&sources, &later).is_err());
    std::fs::create_dir(&sources.libvirt).unwrap();
    std::fs::write(sources.libvirt.join("db01.pid"), vm.pid.to_string()).unwrap();
    assert_eq!(confirm(&sources, &db01), Ok(Confirmation::Libvirt));
    assert_eq!(confirm(&sources, &vm).unwrap_err(), "libvirt calls it db01");
}

#[test]
fn a_forged_vm_gets_neither_trust_nor_the_name_of_a_real_one() {
    let dir = tempfile::tempdir().unwrap();
    let sources = sources(dir.path());
    let name = format!("client{}", std::process::id());
    let (forged, real) = (Forged::start(&name), Forged::start(&name));
    let mut inventory = Inventory::new().unwrap();
    inventory.set_sources(sources.clone());
    let plain = format!("qemu:{name}");
    let trusted = |inventory: &Inventory| -> Vec<(String, Tid)> {
        let named = inventory.trusted().filter(|vm| vm.name == name);
        named.map(|vm| (vm.id.to_string(), vm.pid)).collect()
    };
    // Both are shown, and nobody confirms them.
    let shown = inventory.refresh().unwrap();
    assert_eq!(shown.iter().filter(|vm| vm.name == name).count(), 2);
    assert_eq!(trusted(&inventory), []);
    // The real one is confirmed a moment later, and its name is its own.
    registrations::write(&sources.registrations, real.pid(), &name).unwrap();
    inventory.refresh().unwrap();
    assert_eq!(trusted(&inventory), [(plain.clone(), real.pid())]);
    let other = inventory.vms().iter().find(|vm| vm.pid == forged.pid());
    assert_eq!(
        other.unwrap().id.to_string(),
        format!("{plain}@{}", forged.pid())
    );
    assert_eq!(inventory.find(&plain).unwrap().pid, real.pid());
    // Two confirmed VMs of one name: neither may have what is granted by name.
    registrations::write(&sources.registrations, forged.pid(), &name).unwrap();
    inventory.refresh().unwrap();
    assert_eq!(trusted(&inventory), []);
    let double = format!("qemu:{name}: another VM of this host has the same name");
    let warnings = inventory.warnings();
    assert!(
        warnings.iter().any(|w| w.starts_with(&double)),
        "{warnings:?}"
    );
    drop(forged);
    inventory.refresh().unwrap();
    assert_eq!(trusted(&inventory), [(plain, real.pid())]);
}

#[test]
fn only_a_confirmed_vm_is_asked_at_the_socket_that_it_names() {
    use std::os::unix::net::UnixListener;
    let dir = tempfile::tempdir().unwrap();
    let sources = sources(dir.path());
    let name = format!("asked{}", std::process::id());
    let socket = dir.path().join("qmp");
    let listener = UnixListener::bind(&socket).unwrap();
    listener.set_nonblocking(true).unwrap();
    let qmp = format!("unix:{},server=on", socket.display());
    // The VM's process has the socket, as QEMU has one that libvirt made.
    rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::empty()).unwrap();
    let process = Forged::start_with(&name, &["-qmp", &qmp]);
    let mut inventory = Inventory::new().unwrap();
    inventory.set_sources(sources.clone());
    inventory.refresh().unwrap();
    assert!(inventory.vms().iter().any(|vm| vm.name == name));
    assert!(
        listener.accept().is_err(),
        "the daemon connects for anybody"
    );
    registrations::write(&sources.registrations, process.pid(), &name).unwrap();
    inventory.refresh().unwrap();
    assert!(listener.accept().is_ok());
}

#[test]
fn root_of_a_container_is_no_vm_by_being_root() {
    let dir = tempfile::tempdir().unwrap();
    let sources = sources(dir.path());
    let name = format!("contained{}", std::process::id());
    let process = Forged::start_in_container(&name);
    let mut inventory = Inventory::new().unwrap();
    inventory.set_sources(sources.clone());
    let shown = inventory.refresh().unwrap();
    let shown: Vec<&Vm> = shown.iter().filter(|vm| vm.name == name).collect();
    assert_eq!(shown.len(), 1);
    assert_eq!((shown[0].pid, shown[0].confirmed), (process.pid(), None));
    assert_eq!(inventory.trusted().filter(|vm| vm.name == name).count(), 0);
    // What the host's root says of the same process counts.
    registrations::write(&sources.registrations, process.pid(), &name).unwrap();
    inventory.refresh().unwrap();
    assert_eq!(inventory.trusted().filter(|vm| vm.name == name).count(), 1);
}

#[test]
fn a_scope_of_machined_counts_while_root_owns_it_and_all_above() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let sources = sources(dir.path());
    let path = r"/machine.slice/machine-qemu\x2d1\x2dme.scope";
    let scope = dir.path().join(&path[1..]);
    std::fs::create_dir_all(&scope).unwrap();
    // Both hierarchies at the folder, whichever this host has.
    let point = dir.path().display();
    let mounts = Mounts::parse(&format!(
        "30 23 0:26 / {point} rw - cgroup2 cgroup2 rw\n31 23 0:27 / {point} rw - cgroup cgroup rw,cpu\n"
    ));
    let mut vm = own_process();
    vm.cgroup = Some(crate::cgroup::Cgroup {
        version: crate::cgroup::Version::V2,
        path: path.into(),
        weight: None,
        quota_permille_of_one_core: None,
        vcpu_quota_permille: None,
    });
    let confirm = || Evidence::new(&sources, &mounts, None).confirm(&vm);
    let allow = |folder: &Path, mode| {
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let slice = scope.parent().unwrap();
    for (slice_mode, scope_mode) in [(0o755, 0o775), (0o757, 0o755)] {
        allow(slice, slice_mode);
        allow(&scope, scope_mode);
        assert_eq!(confirm().unwrap_err(), "nothing confirms that it is a VM");
    }
    allow(slice, 0o755);
    assert_eq!(confirm(), Ok(Confirmation::Machined));
    std::fs::remove_dir(&scope).unwrap();
    assert!(confirm().is_err(), "a group that the host does not have");
}
