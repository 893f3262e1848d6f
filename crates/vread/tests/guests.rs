// SPDX-License-Identifier: Apache-2.0
//! A guest reads blocks through the device. Needs root and the image that `scripts/lab-image.sh` makes.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::{Duration, Instant};

use support::{BLOCK, POOL, boot};

#[test]
fn a_guest_reads_the_very_bytes_and_finds_nothing_else() {
    let vm = boot("vr-read");
    for id in [1, 2, 3] {
        for name in [vm.data(id), vm.meta(id)] {
            let path = format!("/mnt/{POOL}/{name}");
            let size: usize = vm.sh(&format!("stat -c %s {path}")).trim().parse().unwrap();
            assert_eq!(size, vm.expected(&name).len(), "{name}");
            let sum = vm.sh(&format!("sha256sum < {path}"));
            assert_eq!(sum.split(' ').next().unwrap(), vm.sha(&name), "{name}");
        }
    }
    // in requests of 1 MiB past the page cache, and in any order
    let name = vm.data(1);
    let path = format!("/mnt/{POOL}/{name}");
    let sum = vm.sh(&format!(
        "dd if={path} bs=1M iflag=direct 2>/dev/null | sha256sum"
    ));
    assert_eq!(sum.split(' ').next().unwrap(), vm.sha(&name));
    let bytes = vm.expected(&name);
    for (at, length) in [
        (4096 * 7, 4096),
        (1 << 20, 65536),
        (BLOCK - 4096, 4096),
        (3 << 20, 2 << 20),
    ] {
        let sum = vm.sh(&format!(
            "dd if={path} bs=4096 skip={} count={} iflag=direct 2>/dev/null | sha256sum",
            at / 4096,
            length / 4096
        ));
        assert_eq!(
            sum.split(' ').next().unwrap(),
            support::sha256(&bytes[at..at + length])
        );
    }
    // what is not known, not allowed, or not a block's name
    for absent in [
        format!("/mnt/{POOL}/blk_99_1001"),
        format!("/mnt/{POOL}/blk_1_1002"),
        format!("/mnt/{POOL}/blk_01_1001"),
        format!("/mnt/BP-2-10.0.0.1-2/{}", vm.data(1)),
        "/mnt/etc".into(),
    ] {
        let (status, output) = vm.try_sh(&format!("cat {absent}"));
        assert!(
            status != 0 && output.contains("No such file"),
            "{absent}: {output}"
        );
    }
    for write in [
        format!("echo x > /mnt/{POOL}/new"),
        format!("echo x >> {path}"),
        format!("rm {path}"),
        format!("mkdir /mnt/{POOL}/d"),
    ] {
        let (status, output) = vm.try_sh(&write);
        assert!(
            status != 0 && output.contains("Read-only"),
            "{write}: {output}"
        );
    }
    let listed = vm.sh(&format!("cat {path} > /dev/null; ls -la /mnt /mnt/{POOL}"));
    assert!(listed.contains(POOL) && listed.contains(&name), "{listed}");
}

#[test]
fn a_guests_user_who_does_not_own_the_files_reads_none() {
    let vm = boot("vr-user");
    let name = vm.data(1);
    let path = format!("/mnt/{POOL}/{name}");
    let shown = vm.sh(&format!("stat -c '%u %a' {path} /mnt/{POOL} /mnt"));
    assert_eq!(shown, "100 400\n100 500\n100 500\n");
    let by = |user: &str| vm.try_sh(&format!("su -s /bin/sh {user} -c 'sha256sum < {path}'"));
    let (status, output) = by("nobody");
    assert!(
        status != 0 && output.contains("Permission denied"),
        "{output}"
    );
    let (status, output) = by("sshd");
    assert_eq!(
        (status, output.split(' ').next()),
        (0, Some(&*vm.sha(&name)))
    );
}

#[test]
fn a_withdrawn_block_gives_an_error_and_never_other_bytes() {
    let mut vm = boot("vr-gone");
    let path = format!("/mnt/{POOL}/{}", vm.data(1));
    // A reader that reads the block over and over past the page cache, and tells what it saw.
    let sum = vm.sha(&vm.data(1));
    vm.sh(&format!(
        "(while s=$(dd if={path} bs=64k iflag=direct 2>>/tmp/errors | sha256sum); do echo \"$s\" >> /tmp/sums; [ -s /tmp/errors-seen ] && break; done) > /dev/null 2>&1 &"
    ));
    std::thread::sleep(Duration::from_millis(1500));
    for round in 0..5 {
        assert_eq!(vm.order("withdraw 1"), "withdrawn 1");
        // From now on the disk may hold something else there.
        vm.overwrite(1, 0xee);
        std::thread::sleep(Duration::from_millis(200));
        let (status, output) = vm.try_sh(&format!("cat {path} | wc -c"));
        assert!(
            status != 0 || output.contains("No such file"),
            "round {round}: {output}"
        );
        vm.restore(1);
        assert_eq!(vm.order("name 1"), "named 1");
        std::thread::sleep(Duration::from_millis(200));
    }
    vm.sh("echo 1 > /tmp/errors-seen; sleep 1");
    let sums = vm.sh("cat /tmp/sums");
    let whole = sums.lines().filter(|l| l.starts_with(&sum)).count();
    assert!(whole > 0, "the block was never read whole");
    // What is cut short has its own sum; all bytes that came before an error must be the block's.
    let cut: Vec<String> = sums
        .lines()
        .map(|l| l.split(' ').next().unwrap().to_owned())
        .filter(|l| *l != sum)
        .collect();
    let prefixes = vm.prefixes(&vm.data(1), 64 << 10);
    for sum in &cut {
        assert!(
            prefixes.contains(sum),
            "bytes that are not the block's were read"
        );
    }
    assert_eq!(
        vm.sh(&format!("sha256sum < {path}"))
            .split(' ')
            .next()
            .unwrap(),
        sum
    );
}

#[test]
fn the_end_of_an_epoch_ends_a_read_and_the_next_look_up_starts_anew() {
    let mut vm = boot("vr-epoch");
    let path = format!("/mnt/{POOL}/{}", vm.data(2));
    vm.sh(&format!(
        "exec 3< {path}; dd bs=4096 count=1 <&3 > /dev/null 2>&1"
    ));
    assert_eq!(vm.order("end-epoch"), "ended");
    let (status, _) = vm.try_sh(&format!("cat {path} > /dev/null"));
    assert_ne!(status, 0);
    for id in [1, 2, 3] {
        assert_eq!(vm.order(&format!("name {id}")), format!("named {id}"));
    }
    let sum = vm.sh(&format!("sha256sum < {path}"));
    assert_eq!(sum.split(' ').next().unwrap(), vm.sha(&vm.data(2)));
}

/// A request that is pending when the worker dies waits forever unless the guest's kernel gives it up. A guest that
/// has not noticed the death yet may send one more request, so a read that begins after the death may also wait.
#[test]
fn a_guest_whose_worker_is_killed_lives_and_hears_of_it() {
    let mut vm = boot("vr-kill");
    vm.sh("umount /mnt && echo 2 > /proc/sys/fs/fuse/default_request_timeout");
    vm.mount();
    let waiting = format!("/mnt/{POOL}/{}", vm.data(1));
    let later = format!("/mnt/{POOL}/{}", vm.data(2));
    vm.sh(&format!("cat {waiting} {later} > /dev/null"));
    vm.stop_worker();
    vm.sh(&format!(
        "(cat {waiting} > /tmp/waiting 2>&1; echo $? >> /tmp/waiting) &"
    ));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(vm.sh("cat /tmp/waiting"), "", "it waits for the worker");
    vm.kill_worker();
    // The kernel looks every 15 seconds for requests that have waited too long.
    let began = Instant::now();
    let (status, output) = vm.try_sh(&format!("cat {later}"));
    assert!(status != 0 && says_it_is_gone(&output), "{output}");
    let output = loop {
        let output = vm.sh("cat /tmp/waiting");
        if !output.is_empty() {
            break output;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "it waits on");
        std::thread::sleep(Duration::from_millis(200));
    };
    assert!(
        says_it_is_gone(&output) && output.ends_with("1\n"),
        "{output}"
    );
    vm.guest().ping().unwrap();
    assert_eq!(vm.sh("echo alive").trim(), "alive");
}

fn says_it_is_gone(output: &str) -> bool {
    ["not connected", "Input/output", "connection abort"]
        .iter()
        .any(|words| output.contains(words))
}

#[test]
fn a_guest_that_starts_anew_gets_its_device_again() {
    let vm = boot("vr-boot");
    let path = format!("/mnt/{POOL}/{}", vm.data(3));
    vm.sh(&format!("cat {path} > /dev/null"));
    vm.sh("umount /mnt && mount -t virtiofs viola /mnt");
    vm.guest().reboot().unwrap();
    vm.mount();
    let sum = vm.sh(&format!("sha256sum < {path}"));
    assert_eq!(sum.split(' ').next().unwrap(), vm.sha(&vm.data(3)));
}
