// SPDX-License-Identifier: Apache-2.0
//! What `make run` does on a host with KVM: an emulated PC with nested KVM, whose clock counts instructions, runs `viola-lab demo`.
//! Part of `make test-beds`, where it has to be named. Needs root, the images of `scripts/qemu-image.sh` and
//! `scripts/debian-image.sh`, and release builds of `viola` and `viola-lab`.
#![allow(clippy::unwrap_used)]

#[path = "common/debian.rs"]
mod debian;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use debian::run;
use serde_json::Value;

/// Time limit of a script of the emulated host.
const SCRIPT_TIMEOUT: Duration = Duration::from_secs(3600);

/// A disk with the programs, the lab's image, and what its QEMU guests need.
fn disk(folder: &Path) -> PathBuf {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let tree = folder.join("tree");
    let text = |path: &Path| path.display().to_string();
    for name in ["bin", "cloud"] {
        std::fs::create_dir_all(tree.join(name)).unwrap();
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or(top.join("target"), PathBuf::from);
    for name in ["viola", "viola-lab"] {
        let program = target.join("release").join(name);
        assert!(
            program.exists(),
            "there is no {}; run `make build`",
            program.display()
        );
        run(
            "strip",
            &["-o", &text(&tree.join("bin").join(name)), &text(&program)],
        );
    }
    for name in ["vmlinuz", "initrd.img", "root.img"] {
        let from = top.join("build/qemu/cloud").join(name);
        assert!(
            from.exists(),
            "there is no {}; run scripts/qemu-image.sh",
            from.display()
        );
        run(
            "cp",
            &["--sparse=always", &text(&from), &text(&tree.join("cloud"))],
        );
    }
    let image = top.join("build/lab/current/.");
    run("cp", &["-a", &text(&image), &text(&tree.join("lab"))]);
    let disk = folder.join("lab.img");
    std::fs::File::create(&disk)
        .unwrap()
        .set_len(2 << 30)
        .unwrap();
    run(
        "/usr/sbin/mkfs.ext4",
        &["-q", "-d", &text(&tree), &text(&disk)],
    );
    std::fs::remove_dir_all(tree).unwrap();
    disk
}

#[test]
#[ignore = "boots an emulated PC with VMs in it: make test-beds ARGS=qemu_kvm"]
fn the_demo_measures_kvm_guests() {
    let begin = Instant::now();
    let folder = tempfile::tempdir().unwrap();
    let disk = disk(folder.path());
    let disks = [("lab", disk.as_path(), "raw,readonly=on")];
    let machine = debian::boot("kvm-host", folder.path(), &disks, SCRIPT_TIMEOUT);
    println!("{:.0} s: the host is up", begin.elapsed().as_secs_f32());
    let sh = |script: &str| {
        let output = machine.exec(script, SCRIPT_TIMEOUT).unwrap();
        let is_good = !output.timed_out && output.status == 0;
        assert!(is_good, "{script}: {output:?}");
        output
    };
    let said = sh(
        "set -e; mount -o ro /dev/vdb /mnt; ls -l /dev/kvm; cd /root; \
        export VIOLA_LAB_IMAGE=/mnt/lab VIOLA_QEMU_IMAGE=/mnt/cloud VIOLA_QEMU=/usr/bin/qemu-system-x86_64; \
        begin=$(date +%s); /mnt/bin/viola-lab demo --rounds 1 --output /root/out; \
        echo \"$(($(date +%s) - begin)) s of its own time\"",
    );
    println!(
        "{:.0} s: {}\n{}",
        begin.elapsed().as_secs_f32(),
        said.stdout,
        said.stderr
    );
    assert!(said.stdout.contains("viola to stock"));
    let report: Value = serde_json::from_str(&sh("cat /root/out/report.json").stdout).unwrap();
    let guests = report["guests"].as_str().unwrap();
    assert!(guests.starts_with("KVM, Linux "), "{guests}");
    // HTTP loads are left out, and named, when the load generator was late itself.
    let names = ["ping p50", "ping p99", "TCP request p50", "TCP request p99"];
    for row in report["rows"].as_array().unwrap() {
        let name = row["name"].as_str().unwrap();
        let median = |side: &str| row["sides"][side]["median"].as_f64();
        if names.iter().any(|n| name.starts_with(n)) {
            let (stock, viola) = (median("stock").unwrap(), median("viola 0.3 ms").unwrap());
            assert!(viola < stock, "{row}");
        }
    }
    // Nothing is left of the lab.
    sh("! pgrep -f qemu-system; ! ls /run/viola-lab/demo; ! ip netns list | grep .");
}
