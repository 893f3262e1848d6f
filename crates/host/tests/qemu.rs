// SPDX-License-Identifier: Apache-2.0
//! The inventory against real QEMU processes.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use common::{Qemu, alone, comm, register, until, warnings};
use viola_host::attrs::{self, Outcome, SavedThread, SchedAttr};
use viola_host::counters::{IoFiles, nic_counters};
use viola_host::{Hypervisor, Inventory, ServiceKind, Vm, proc};

/// A QMP client that stays connected.
struct Client(BufReader<UnixStream>);

impl Client {
    /// Connects and reads the greeting, so that QEMU serves no other client.
    fn hold(socket: &Path) -> Self {
        let mut client = Self(BufReader::new(UnixStream::connect(socket).unwrap()));
        assert!(client.line().contains("QMP"));
        client
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line
    }

    fn command(&mut self, json: &str) -> String {
        self.0
            .get_mut()
            .write_all(format!("{json}\n").as_bytes())
            .unwrap();
        loop {
            let line = self.line();
            if !line.contains("\"event\"") {
                return line;
            }
        }
    }
}

/// Waits until QEMU has closed its ends of all connections to this socket: while one is open it serves no other client.
fn until_unused(socket: &Path) {
    let path = format!(" {}", socket.display());
    let is_one = |list: String| list.lines().filter(|line| line.ends_with(&path)).count() == 1;
    while !is_one(std::fs::read_to_string("/proc/net/unix").unwrap()) {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

fn has_vcpus(vms: &[Vm], count: usize) -> bool {
    vms.len() == 1 && vms[0].vcpus.len() == count
}

fn kinds(vm: &Vm, kind: ServiceKind) -> Vec<u32> {
    vm.service
        .iter()
        .filter(|s| s.kind == kind)
        .map(|s| s.thread.tid)
        .collect()
}

#[test]
fn a_vm_is_found_with_its_vcpus_iothread_and_disk() {
    let _alone = alone();
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(8 << 20).unwrap();
    let disk = format!(
        "-name guest=%,debug-threads=on -smp 2 -object iothread,id=io0 \
-drive if=none,id=d0,file={},format=raw -device virtio-blk-pci,drive=d0,iothread=io0",
        image.path().display()
    );
    let qemu = Qemu::start("probe", &disk);
    let mut inventory = Inventory::new().unwrap();
    let vms = until(&mut inventory, &qemu.name, |vms, warnings| {
        has_vcpus(vms, 2) && vms[0].status.is_some() && warnings.is_empty()
    });
    let vm = &vms[0];

    assert_eq!(vm.hypervisor, Hypervisor::Qemu);
    assert_eq!(vm.id.as_str(), format!("qemu:{}", qemu.name));
    assert_eq!(vm.pid, qemu.pid());
    assert_eq!(
        vm.start_time,
        proc::stat(vm.pid).unwrap().unwrap().start_time
    );
    for (index, vcpu) in (0..).zip(&vm.vcpus) {
        assert_eq!((vcpu.index, vcpu.threads.len()), (index, 1));
        assert_eq!(comm(vcpu.threads[0].tid), format!("CPU {index}/TCG"));
    }
    assert_eq!(kinds(vm, ServiceKind::Emulator), [vm.pid]);
    let iothreads = kinds(vm, ServiceKind::Iothread);
    assert_eq!(
        iothreads.iter().map(|t| comm(*t)).collect::<Vec<_>>(),
        ["IO io0"]
    );
    // Workers come and go; once the list stands still, every thread has its place.
    until(&mut inventory, &qemu.name, |vms, _| {
        vms[0].threads().count() == proc::thread_ids(qemu.pid()).unwrap().len()
    });
    assert_eq!(vm.disks.len(), 1);
    assert_eq!(
        (vm.disks[0].path.as_path(), vm.disks[0].device.as_str()),
        (image.path(), "d0")
    );
    assert_eq!(
        (vm.disks[0].format.as_deref(), vm.disks[0].read_only),
        (Some("raw"), false)
    );
    assert_eq!(vm.status.as_deref(), Some("prelaunch"));
    let mut files = IoFiles::default();
    assert_eq!(files.read(vm), None, "it is not followed");
    files.follow(std::slice::from_ref(vm));
    assert!(files.read(vm).unwrap().read_chars > 0);
    assert!(!vm.cores.is_empty());
}

#[test]
fn thread_names_identify_vcpus_while_another_client_holds_qmp() {
    let _alone = alone();
    let image = tempfile::NamedTempFile::new().unwrap();
    let args = format!(
        "-name guest=%,debug-threads=on -smp 2 -object iothread,id=io0 -drive if=none,id=d0,file={},format=raw",
        image.path().display()
    );
    let qemu = Qemu::start("busy", &args);
    let _client = Client::hold(&qemu.socket());
    let mut inventory = Inventory::new().unwrap();
    let vms = until(&mut inventory, &qemu.name, |vms, warnings| {
        has_vcpus(vms, 2) && !warnings.is_empty()
    });

    let tids: Vec<String> = vms[0]
        .vcpus
        .iter()
        .map(|v| comm(v.threads[0].tid))
        .collect();
    assert_eq!(tids, ["CPU 0/TCG", "CPU 1/TCG"]);
    assert_eq!(kinds(&vms[0], ServiceKind::Iothread).len(), 1);
    assert_eq!(vms[0].disks[0].path, image.path());
    assert_eq!(vms[0].status, None, "no query was possible");
    let warning = warnings(&inventory, &qemu.name).join("\n");
    assert!(
        warning.contains(qemu.socket().to_str().unwrap()),
        "{warning}"
    );
    assert!(
        warning.contains("another client") && warning.contains("by name"),
        "{warning}"
    );
}

#[test]
fn without_qmp_and_names_a_warning_gives_the_remedy_until_qmp_answers() {
    let _alone = alone();
    let qemu = Qemu::start("nameless", "-name guest=%,debug-threads=off -smp 2");
    let client = Client::hold(&qemu.socket());
    let mut inventory = Inventory::scan().unwrap();
    let warning = warnings(&inventory, &qemu.name).join("\n");
    let vms = until(&mut inventory, &qemu.name, |vms, _| vms.len() == 1);
    assert_eq!(vms[0].vcpus.len(), 0);
    assert!(warning.contains("debug-threads=on"), "{warning}");
    drop(client);
    let vms = until(&mut inventory, &qemu.name, |vms, warnings| {
        has_vcpus(vms, 2) && warnings.is_empty()
    });
    assert_eq!(vms[0].status.as_deref(), Some("prelaunch"));
}

#[test]
fn a_qmp_socket_of_another_process_is_named_and_the_vm_is_still_found() {
    let _alone = alone();
    let qemu = Qemu::start("garbage", "-name guest=%,debug-threads=on -smp 1");
    std::fs::remove_file(qemu.socket()).unwrap();
    let listener = UnixListener::bind(qemu.socket()).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream.unwrap().write_all(b"{\"QMP\": {}}\n");
        }
    });
    let mut inventory = Inventory::new().unwrap();
    until(&mut inventory, &qemu.name, |vms, warnings| {
        has_vcpus(vms, 1)
            && warnings.iter().any(|w| {
                w.contains("another process than the VM's listens there") && w.contains("/qmp")
            })
    });
}

#[test]
fn who_looks_once_waits_for_late_emulators() {
    let _alone = alone();
    let qemus = ["late0", "late1"].map(|name| Qemu::start(name, "-name guest=%"));
    let status = |inventory: &Inventory, qemu: &Qemu| {
        let mut vms = inventory.vms().iter();
        vms.find(|vm| vm.pid == qemu.pid())
            .and_then(|vm| vm.status.clone())
    };
    let send = |signal| {
        for qemu in &qemus {
            let pid = rustix::process::Pid::from_raw(qemu.pid() as i32).unwrap();
            rustix::process::kill_process(pid, signal).unwrap();
        }
    };
    let mut inventory = Inventory::new().unwrap();
    for qemu in &qemus {
        until(&mut inventory, &qemu.name, |vms, _| vms[0].status.is_some());
        until_unused(&qemu.socket());
    }
    send(rustix::process::Signal::STOP);
    let mut inventory = Inventory::new().unwrap();
    inventory.refresh().unwrap();
    let first = qemus.each_ref().map(|qemu| status(&inventory, qemu));
    // An answer has half a second from the question on, of which the first refresh has used a tenth.
    send(rustix::process::Signal::CONT);
    inventory.refresh_fully().unwrap();
    assert_eq!(first, [None, None]);
    for qemu in &qemus {
        assert_eq!(status(&inventory, qemu).as_deref(), Some("prelaunch"));
    }
}

#[test]
fn a_vcpu_that_is_plugged_in_later_is_found() {
    let _alone = alone();
    let qemu = Qemu::start(
        "plug",
        "-name guest=%,debug-threads=off -smp 1,sockets=2,cores=1,threads=1,maxcpus=2 -cpu qemu64",
    );
    let mut inventory = Inventory::new().unwrap();
    until(&mut inventory, &qemu.name, |vms, _| has_vcpus(vms, 1));
    let mut client = Client::hold(&qemu.socket());
    client.command(r#"{"execute": "qmp_capabilities"}"#);
    let answer = client.command(
        r#"{"execute": "device_add", "arguments": {"driver": "qemu64-x86_64-cpu", "id": "c1",
"socket-id": 1, "core-id": 0, "thread-id": 0}}"#
            .replace('\n', " ")
            .as_str(),
    );
    assert!(answer.contains("return"), "{answer}");
    drop(client);
    let vms = until(&mut inventory, &qemu.name, |vms, _| has_vcpus(vms, 2));
    assert_ne!(vms[0].vcpus[0].threads, vms[0].vcpus[1].threads);
}

#[test]
fn a_vm_in_a_pid_namespace_is_known_by_the_hosts_thread_numbers() {
    let _alone = alone();
    let qemu = Qemu::start_through(
        &["unshare", "--pid", "--fork", "--kill-child"],
        "contained",
        "-name guest=%,debug-threads=off -smp 2",
    );
    let mut inventory = Inventory::new().unwrap();
    // QEMU is a child of unshare(1).
    let vms = until(&mut inventory, &qemu.name, |vms, _| !vms.is_empty());
    register(vms[0].pid, &qemu.name);
    let vms = until(&mut inventory, &qemu.name, |vms, warnings| {
        has_vcpus(vms, 2) && warnings.is_empty()
    });
    let threads = proc::thread_ids(vms[0].pid).unwrap();
    for vcpu in &vms[0].vcpus {
        assert!(threads.contains(&vcpu.threads[0].tid));
        assert_ne!(
            proc::inner_tid(vcpu.threads[0].tid).unwrap(),
            Some(vcpu.threads[0].tid)
        );
    }
}

#[test]
fn two_vms_of_one_name_are_listed_until_they_end() {
    let _alone = alone();
    let mut first = Qemu::start("twin", "-name guest=%,debug-threads=on");
    let mut inventory = Inventory::new().unwrap();
    until(&mut inventory, &first.name, |vms, _| has_vcpus(vms, 1));
    let second = Qemu::start("twin", "-name guest=%,debug-threads=on");
    let vms = until(&mut inventory, &first.name, |vms, _| vms.len() == 2);
    let id_of = |vms: &[Vm], pid| vms.iter().find(|vm| vm.pid == pid).unwrap().id.clone();
    assert_eq!(
        id_of(&vms, first.pid()).as_str(),
        format!("qemu:{}", first.name)
    );
    let id = id_of(&vms, second.pid());
    assert_eq!(id.as_str(), format!("qemu:{}@{}", first.name, second.pid()));

    assert_eq!(inventory.find(&first.name), None, "two have that name");
    assert_eq!(inventory.find(id.as_str()).unwrap().pid, second.pid());

    let gone = vms.iter().find(|vm| vm.pid == first.pid()).unwrap().clone();
    let mut files = IoFiles::default();
    files.follow(std::slice::from_ref(&gone));
    first.end();
    let vms = until(&mut inventory, &first.name, |vms, _| vms.len() == 1);
    assert_eq!(id_of(&vms, second.pid()), id, "it keeps its name");
    assert_eq!(inventory.find(&first.name).unwrap().id, id);
    assert_eq!(files.read(&gone), None);
    files.follow(std::slice::from_ref(&gone));
    assert_eq!(files.read(&gone), None);
}

#[test]
fn a_daemonized_vm_is_one_vm() {
    let _alone = alone();
    let mut qemu = Qemu::start(
        "daemon",
        "-name guest=%,debug-threads=on -smp 2 -daemonize -pidfile @/pid",
    );
    qemu.adopt_daemon(&qemu.dir.path().join("pid"));
    let mut inventory = Inventory::new().unwrap();
    let vms = until(&mut inventory, &qemu.name, |vms, _| has_vcpus(vms, 2));
    assert_eq!(vms[0].pid, qemu.pid());
}

/// In a network namespace of its own, so that the host's network does not change; needs root.
#[test]
fn a_tap_in_another_network_namespace_is_found_and_counted() {
    let _alone = alone();
    let make_tap = "ip tuntap add dev vtap7 mode tap && ip link set vtap7 up && exec \"$@\"";
    let qemu = Qemu::start_through(
        &["unshare", "--net", "sh", "-c", make_tap, "sh"],
        "net",
        "-name guest=%,debug-threads=on -netdev tap,id=n0,ifname=vtap7,script=no,downscript=no \
-device virtio-net-pci,netdev=n0,mac=52:54:00:00:00:07,romfile=",
    );
    let mut inventory = Inventory::new().unwrap();
    let vms = until(&mut inventory, &qemu.name, |vms, _| {
        has_vcpus(vms, 1) && !vms[0].nics.is_empty()
    });
    let nic = &vms[0].nics[0];
    assert_eq!(
        (nic.tap.as_str(), nic.mac.as_deref()),
        ("vtap7", Some("52:54:00:00:00:07"))
    );
    assert_eq!(Some(nic.netns), proc::netns(qemu.pid()).unwrap());
    assert_ne!(Some(nic.netns), proc::netns(std::process::id()).unwrap());
    assert!(nic.ifindex.is_some());
    assert!(nic_counters(&vms).unwrap()[0][0].is_some());
}

#[test]
fn threads_of_a_vm_are_restored() {
    let _alone = alone();
    let qemu = Qemu::start("saved", "-name guest=%,debug-threads=on -smp 2");
    let mut inventory = Inventory::new().unwrap();
    let vms = until(&mut inventory, &qemu.name, |vms, _| has_vcpus(vms, 2));
    for thread in vms[0].vcpus.iter().flat_map(|v| &v.threads) {
        let saved = SavedThread::capture(thread).unwrap().unwrap();
        assert_eq!(
            saved.attr.nice,
            proc::stat(thread.tid).unwrap().unwrap().nice
        );
        let other = SchedAttr {
            nice: 19,
            ..saved.attr
        };
        assert_eq!(attrs::set(thread.tid, &other).unwrap(), Outcome::Done);
        assert_ne!(SavedThread::capture(thread).unwrap().as_ref(), Some(&saved));
        assert_eq!(saved.restore().unwrap(), Outcome::Done);
        assert_eq!(SavedThread::capture(thread).unwrap(), Some(saved));
    }
}

#[test]
fn the_agent_port_is_found_and_events_report_resets_and_snapshots() {
    use viola_host::disk_files::{self, NamedBy};
    use viola_host::qemu::disk_watch::DiskWatch;
    use viola_host::{sockets, unix_connect};

    let _alone = alone();
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(8 << 20).unwrap();
    let more = format!(
        "-name guest=% -qmp unix:@/second,server=on,wait=off \
-blockdev driver=file,node-name=f0,filename={0} -blockdev driver=raw,node-name=d0,file=f0 \
-device virtio-blk-pci,drive=d0,id=disk0 -device virtio-serial-pci \
-chardev socket,id=agent0,path=@/agent,server=on,wait=off \
-device virtserialport,chardev=agent0,name={1}",
        image.path().display(),
        sockets::AGENT_PORT
    );
    let qemu = Qemu::start("events", &more);
    let mut inventory = Inventory::new().unwrap();
    let vms = until(&mut inventory, &qemu.name, |vms, _| vms.len() == 1);
    let vm = &vms[0];

    let channel = sockets::agent_socket(vm).unwrap().unwrap();
    assert!(
        unix_connect::connect(&channel, Some(qemu.pid())).is_ok(),
        "{channel:?}"
    );
    let (_, id) = disk_files::open(vm, image.path(), NamedBy::Vm).unwrap();
    assert_eq!(
        id,
        disk_files::file_id(&image.as_file().metadata().unwrap())
    );

    let events = sockets::event_socket(vm).unwrap().unwrap();
    assert!(events.ends_with("second"), "{events:?}");
    let mut watch = DiskWatch::connect(&events, Some(qemu.pid())).unwrap();
    let chains = watch.chains().unwrap();
    assert_eq!(chains.len(), 1, "{chains:?}");
    assert_eq!(
        chains[0].layers,
        [(image.path().to_owned(), "raw".to_owned())]
    );
    watch.changes().unwrap();

    let mut operator = Client::hold(&qemu.socket());
    operator.command(r#"{"execute": "qmp_capabilities"}"#);
    let mut seen = |command: &str, event: &str| {
        let answer = operator.command(command);
        assert!(answer.contains("return"), "{answer}");
        let start = std::time::Instant::now();
        while !watch.changes().unwrap().iter().any(|e| e == event) {
            assert!(start.elapsed().as_secs() < 20, "no {event}");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    };
    seen(r#"{"execute": "cont"}"#, "RESUME");
    seen(r#"{"execute": "system_reset"}"#, "RESET");
    seen(r#"{"execute": "stop"}"#, "STOP");
    // The live image becomes the one below. QEMU has no event for that.
    let overlay = qemu.dir.path().join("snap.qcow2");
    let snapshot = format!(
        r#"{{"execute": "blockdev-snapshot-sync", "arguments": {{"node-name": "d0", "snapshot-file": "{}", "snapshot-node-name": "s0"}}}}"#,
        overlay.display()
    );
    let answer = operator.command(&snapshot);
    assert!(answer.contains("return"), "{answer}");
    let chains = watch.chains().unwrap();
    assert_eq!(
        chains[0].layers,
        [
            (overlay.clone(), "qcow2".to_owned()),
            (image.path().to_owned(), "raw".to_owned())
        ]
    );
    assert!(disk_files::open(vm, &overlay, NamedBy::Vm).is_ok());
}
