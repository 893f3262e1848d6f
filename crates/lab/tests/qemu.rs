// SPDX-License-Identifier: Apache-2.0
//! QEMU VMs of the lab, and its guests that QEMU runs. They are slow: part of `make test-beds`.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use support::{boot, gone, wait_for};
use viola_lab::load::{Http, Ping, http, ping};
use viola_lab::qemu::{Image, QemuVm, VmSpec};
use viola_lab::wire::Workload;

/// Time limit of a step of an emulated guest.
const STEP_TIMEOUT: Duration = Duration::from_secs(120);

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn a_vm_boots_runs_scripts_and_is_reset() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("d.img");
    std::fs::File::create(&disk)
        .unwrap()
        .set_len(8 << 20)
        .unwrap();
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let image = Image::find_from([here], "cloud").unwrap_or_else(|e| panic!("{e}"));
    let spec = VmSpec::new("qb-one").disk("d0", &disk, "raw").agent();
    let begin = std::time::Instant::now();
    let vm = QemuVm::start(&spec, &image, folder.path()).unwrap();
    println!("booted in {:.1} s", begin.elapsed().as_secs_f32());
    let text = vm
        .sh("hostname; blockdev --getsize64 /dev/vda; ls /dev/virtio-ports")
        .unwrap();
    assert_eq!(
        text,
        "qb-one\n8388608\norg.viola.agent.0\norg.viola.lab.0\n"
    );
    let refused = vm.qmp("no-such-thing", None).unwrap_err().to_string();
    assert!(refused.contains("no-such-thing"), "{refused}");
    let boots = vm.boots();
    vm.clear_events();
    vm.qmp("system_reset", None).unwrap();
    vm.wait_event("RESET", |_| true, Duration::from_secs(10))
        .unwrap();
    vm.wait_boot(boots).unwrap();
    assert_eq!(vm.sh("echo again").unwrap(), "again\n");
    assert!(vm.alive());
    vm.kill();
    assert!(vm.ping(Duration::from_secs(5)).is_err());
}

/// The same description, root file system, workloads and networks as with User Mode Linux.
#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn guests_of_a_lab_run_in_qemu() {
    let text = "vmm = 'qemu'\naccel = 'tcg'\n\
        [[guest]]\nname='a'\ncores=[CORE]\nweight=200\ncpus=1\n\
        disks=[{image='d.img',size='8M'}]\nworkloads=[{kind='nginx'},{kind='echo'}]\n\
        [[guest]]\nname='b'\ncores=[CORE]\ncpus=2\ntaps=2\n";
    let begin = std::time::Instant::now();
    let bench = boot("t-qemu", text);
    println!("{:.0} s: two guests are up", begin.elapsed().as_secs_f32());
    let [a, b] = ["a", "b"].map(|name| bench.lab.guest(name).unwrap());
    let sh = |guest: &viola_lab::Guest, line: &str| {
        let output = guest
            .exec_for(&["sh", "-c", line], "", STEP_TIMEOUT)
            .unwrap();
        assert_eq!(output.status, 0, "{line}: {}", output.stderr);
        output.stdout.trim().to_owned()
    };
    assert_eq!(
        sh(a, "hostname; blockdev --getsize64 /dev/vda"),
        "a\n8388608"
    );
    assert_eq!(
        sh(
            b,
            "grep -c ^processor /proc/cpuinfo; ls /sys/class/net | grep -c eth"
        ),
        "2\n2"
    );
    assert!(a.cgroup().is_some() && a.alive());
    let to = a.address().unwrap();
    sh(b, &format!("ping -c 1 {to}"));
    let pings = Ping {
        count: 20,
        ..Ping::default()
    };
    for guest in [a, b] {
        assert_eq!(
            ping(&bench.lab, guest.address().unwrap(), &pings)
                .unwrap()
                .lost,
            0
        );
    }
    let requests = Http {
        requests: 30,
        connections: 3,
        ..Http::default()
    };
    let result = http(&bench.lab, to, &requests).unwrap();
    assert_eq!((result.answered, result.first_failure), (30, None));

    // The shell and the line of the agent.
    a.start("agent", Workload::agent("data = ['/tmp']"))
        .unwrap();
    let mut line = UnixStream::connect(a.agent_socket()).unwrap();
    line.set_read_timeout(Some(STEP_TIMEOUT)).unwrap();
    assert!(line.read(&mut [0; 1]).unwrap() > 0);
    drop(line);
    b.reboot().unwrap();
    println!("{:.0} s: b is up again", begin.elapsed().as_secs_f32());
    assert_eq!(sh(b, "hostname"), "b");
    let pids = [a.pid(), b.pid()];
    bench.lab.down().unwrap();
    wait_for("the end of both", Duration::from_secs(10), || {
        pids.iter().all(|pid| gone(*pid))
    });
    println!("{:.0} s: down", begin.elapsed().as_secs_f32());
}
