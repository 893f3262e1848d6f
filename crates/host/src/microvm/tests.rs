// SPDX-License-Identifier: Apache-2.0
//! With threads named as both programs name theirs, and with interfaces that answer as theirs do.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use proptest::prelude::*;

use super::*;
use crate::Inventory;

fn args(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

#[test]
fn the_program_name_identifies_the_hypervisor() {
    let of = |path: &str| of_program(Path::new(path));
    for yes in [
        "/usr/bin/firecracker",
        "/srv/jailer/firecracker-v1.12.0-x86_64",
        "/firecracker (deleted)",
    ] {
        assert_eq!(of(yes), Some(Hypervisor::Firecracker), "{yes}");
    }
    for yes in ["/usr/bin/cloud-hypervisor", "/x/cloud-hypervisor-static"] {
        assert_eq!(of(yes), Some(Hypervisor::CloudHypervisor), "{yes}");
    }
    for no in [
        "/usr/bin/firecracker-containerd",
        "/bin/firecrackerd",
        "/x/ch-remote",
        "/",
    ] {
        assert_eq!(of(no), None, "{no}");
    }
}

#[test]
fn names_and_sockets_come_from_the_arguments() {
    let fc = |line: &str| MicroVm::new(Hypervisor::Firecracker, &args(line));
    let vm = fc("--id web --api-sock /run/web.socket");
    assert_eq!(
        (vm.name(7).as_str(), vm.socket.as_deref()),
        ("web", Some("/run/web.socket"))
    );
    assert_eq!(fc("--api-sock=/x --id=db").name(7), "db");
    assert_eq!(fc("--no-api").name(7), "pid-7");
    assert_eq!(fc("--id a\x1b[2J").name(7), "a\u{fffd}[2J");
    let ch = |line: &str| MicroVm::new(Hypervisor::CloudHypervisor, &args(line));
    let vm = ch("--api-socket path=/run/libvirt/ch/db01-socket,fd=3 --cpus boot=2");
    assert_eq!(vm.name(7), "db01");
    assert_eq!(vm.socket.as_deref(), Some("/run/libvirt/ch/db01-socket"));
    assert_eq!(ch("--api-socket=/tmp/ch.sock").name(7), "ch");
    assert_eq!(ch("--api-socket fd=7").socket, None);
}

#[test]
fn thread_names_identify_vcpus() {
    let fc = |name| vcpu_of_name(Hypervisor::Firecracker, name);
    let ch = |name| vcpu_of_name(Hypervisor::CloudHypervisor, name);
    assert_eq!(
        (fc("fc_vcpu 0"), fc("fc_vcpu 31"), fc("fc_api")),
        (Some(0), Some(31), None)
    );
    assert_eq!(
        (ch("vcpu0"), ch("vcpu12"), ch("vcpux"), ch("vmm")),
        (Some(0), Some(12), None, None)
    );
    let thread = Thread {
        pid: 1,
        tid: 2,
        start_time: 3,
    };
    assert_eq!(kind_of(1, &thread, "_disk0_q0"), ServiceKind::Iothread);
    assert_eq!(kind_of(1, &thread, "fc_api"), ServiceKind::Helper);
    assert_eq!(kind_of(2, &thread, "firecracker"), ServiceKind::Emulator);
}

/// Not a test: the body of the process that the next test starts under Firecracker's name.
#[test]
#[ignore = "it never ends"]
fn fake_firecracker() {
    for name in ["fc_api", "fc_vcpu 0", "fc_vcpu 1"] {
        let wait = || loop {
            std::thread::park()
        };
        std::thread::Builder::new()
            .name(name.into())
            .spawn(wait)
            .unwrap();
    }
    println!("\nhere");
    loop {
        std::thread::park();
    }
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_vm_is_found_with_its_vcpus_until_it_ends() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("firecracker");
    let me = std::env::current_exe().unwrap();
    std::fs::hard_link(&me, &program)
        .or_else(|_| std::fs::copy(&me, &program).map(drop))
        .unwrap();
    let mut command = Command::new(&program);
    command.arg0("firecracker").args([
        "microvm::tests::fake_firecracker",
        "--exact",
        "--ignored",
        "--nocapture",
    ]);
    let mut process = Process(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut output = Vec::new();
    let out = process.0.stdout.as_mut().unwrap();
    while !String::from_utf8_lossy(&output).contains("here\n") {
        let mut more = [0; 256];
        let n = out.read(&mut more).unwrap();
        assert!(n > 0, "{}", String::from_utf8_lossy(&output));
        output.extend_from_slice(&more[..n]);
    }
    let pid = process.0.id();
    let mut inventory = Inventory::new().unwrap();
    let found = |i: &Inventory| i.vms().iter().find(|vm| vm.pid == pid).cloned();
    inventory.refresh().unwrap();
    let vm = found(&inventory).unwrap();
    assert_eq!(vm.hypervisor, Hypervisor::Firecracker);
    assert_eq!(vm.id.as_str(), format!("firecracker:pid-{pid}"));
    assert_eq!(vm.vcpus.iter().map(|v| v.index).collect::<Vec<_>>(), [0, 1]);
    assert!(vm.vcpus.iter().all(|v| !v.cores.is_empty()));
    assert!(vm.service.iter().any(|s| s.kind == ServiceKind::Emulator));
    drop(process);
    inventory.refresh().unwrap();
    assert_eq!(found(&inventory), None);
}

/// Answers each connection with the next of `answers`, whatever the request.
fn serve(answers: Vec<Vec<u8>>) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("api");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        let mut open = Vec::new();
        for answer in answers {
            let (mut client, _) = listener.accept().unwrap();
            let _ = client.read(&mut [0; 4096]);
            let _ = client.write_all(&answer);
            open.push(client);
        }
        std::thread::sleep(Duration::from_secs(5));
    });
    (dir, socket)
}

fn http(body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 200 \r\nServer: x\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

#[test]
fn firecracker_reports_state_drives_and_addresses() {
    let about = r#"{"id":"web","state":"Running","vmm_version":"1.12.0","app_name":"Firecracker"}"#;
    let config = r#"{"drives":[{"drive_id":"rootfs","path_on_host":"/srv/web.ext4","is_read_only":false,"is_root_device":true},
        {"drive_id":"ro","path_on_host":"base.img","is_read_only":true}],
        "network-interfaces":[{"iface_id":"eth0","guest_mac":"06:00:ac:10:00:02","host_dev_name":"tap0"}]}"#;
    let (_dir, socket) = serve(vec![http(about), http(config)]);
    let answer = api::query(Hypervisor::Firecracker, (&socket, std::process::id())).unwrap();
    assert_eq!(answer.state, "running");
    let disks: Vec<_> = answer
        .disks
        .iter()
        .map(|d| (d.path.to_str().unwrap(), d.read_only))
        .collect();
    assert_eq!(disks, [("/srv/web.ext4", false), ("base.img", true)]);
    assert_eq!(answer.macs["tap0"], "06:00:ac:10:00:02");
}

#[test]
fn cloud_hypervisor_reports_state_disks_and_addresses() {
    let info = r#"{"config":{"disks":[{"path":"/srv/db.raw","readonly":false,"id":"_disk0"}],
        "net":[{"tap":"vmtap0","mac":"12:34:56:78:90:ab","id":"_net1"}]},"state":"Paused","memory_actual_size":1}"#;
    let (_dir, socket) = serve(vec![http(info)]);
    let answer = api::query(Hypervisor::CloudHypervisor, (&socket, std::process::id())).unwrap();
    assert_eq!((answer.state.as_str(), answer.disks.len()), ("paused", 1));
    assert_eq!(answer.disks[0].format, None, "viola does not probe images");
    assert_eq!(answer.macs["vmtap0"], "12:34:56:78:90:ab");
}

#[test]
fn silence_refusals_and_malformed_answers_are_errors_within_the_timeout() {
    for answer in [
        &b""[..],
        b"HTTP/1.1 400 Bad\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 \r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 \r\nContent-Length: 50\r\n\r\n{",
        b"HTTP/1.1 200 \r\n\r\n{}",
        b"HTTP/1.1 200 \r\nContent-Length: 3\r\n\r\n{]}",
    ] {
        let (_dir, socket) = serve(vec![answer.to_vec()]);
        let begun = Instant::now();
        assert!(api::query(Hypervisor::CloudHypervisor, (&socket, std::process::id())).is_err());
        assert!(begun.elapsed() < Duration::from_secs(30));
    }
    assert!(
        api::query(
            Hypervisor::Firecracker,
            (Path::new("/nonexistent/socket"), 1)
        )
        .is_err()
    );
}

proptest! {
    #[test]
    fn any_arguments_parse_without_a_panic(words in proptest::collection::vec("(--id|--api-sock(et)?)?[=,/a-z]{0,9}", 0..6)) {
        for hypervisor in [Hypervisor::Firecracker, Hypervisor::CloudHypervisor] {
            let vm = MicroVm::new(hypervisor, &words);
            prop_assert!(!vm.name(1).is_empty());
        }
    }
}
