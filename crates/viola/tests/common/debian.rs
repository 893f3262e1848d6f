// SPDX-License-Identifier: Apache-2.0
//! An emulated PC with Debian, libvirt and nested KVM, from the image of `scripts/debian-image.sh`.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use viola_lab::qemu::{Image, QemuVm, VmSpec};
use viola_lab::testing::core_of_counting_pc;

/// Boots it. `disks` are a name, an image and QEMU's options each; /dev/vda is Debian's. A script may take `timeout`.
///
/// Under emulation a VM exit and entry take a thousand times as long as their instructions, and an answer needs ten milliseconds of
/// them. With a clock that counts instructions an answer takes its real time.
pub fn boot(name: &str, folder: &Path, disks: &[(&str, &Path, &str)], timeout: Duration) -> QemuVm {
    let image = Image::find_from([Path::new(env!("CARGO_MANIFEST_DIR"))], "debian");
    let image = image.unwrap_or_else(|e| panic!("{e}; run scripts/debian-image.sh"));
    let root = image.kernel().with_file_name("root.img");
    let spec = VmSpec::new(name).memory(3072).cpus(2).icount(0);
    // QEMU discards all writes.
    let mut spec = spec.disk("root", &root, "raw,snapshot=on");
    for (disk, image, options) in disks {
        spec = spec.disk(disk, image, options);
    }
    spec.cores = vec![core_of_counting_pc()];
    spec.boot_timeout = timeout;
    spec.kernel_args.push("net.ifnames=0".into());
    let console = || std::fs::read_to_string(folder.join(format!("{name}.log")));
    QemuVm::start(&spec, &image, folder)
        .unwrap_or_else(|e| panic!("{e}; the console: {}", console().unwrap_or_default()))
}

/// Runs a program of this machine, which must succeed.
pub fn run(program: &str, args: &[&str]) {
    let done = Command::new(program).args(args).output().unwrap();
    let text = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{program} {args:?}: {text}");
}
