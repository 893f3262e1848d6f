// SPDX-License-Identifier: Apache-2.0
//! QEMU VMs of the lab. They are slow: part of `make test-beds`.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::time::Duration;

use viola_lab::qemu::{Image, QemuVm, VmSpec};

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
