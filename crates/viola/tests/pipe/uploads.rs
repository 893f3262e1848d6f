// SPDX-License-Identifier: Apache-2.0
//! The host writes a client's upload into a file of the VM and copies a file into another one.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use crate::common::guests::{signal, within};
use crate::rig::{CHANGE_TIMEOUT, MIB, Rig};

const PORT: u16 = 90;
const BLOCK: usize = 4096;

/// Starts the library's example of an upload server, which writes into `/tmp/d/in`.
fn start_server(rig: &Rig) {
    rig.sh(&format!(
        "mkdir -p /tmp/d/in; VIOLA_PIPE_SOCKET=/tmp/n/pipe.sock vpipe-upload /tmp/d/in 0.0.0.0 {PORT} > /tmp/n/up 2>&1 &"
    ));
    within(CHANGE_TIMEOUT, "the server listens", || {
        rig.connect(PORT).is_ok()
    });
}

fn connect(rig: &Rig) -> TcpStream {
    let client = rig.connect(PORT).unwrap();
    client.set_read_timeout(Some(CHANGE_TIMEOUT)).unwrap();
    client
}

/// Uploads a file and waits for the server's confirmation.
fn upload(client: &mut TcpStream, bytes: &[u8]) {
    let head = (bytes.len() as u64).to_be_bytes();
    client.write_all(&head).unwrap();
    client.write_all(bytes).unwrap();
    let mut answer = [0; 8];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(answer, head);
}

/// Compares two files in the guest, from its page cache and then from its disk.
fn same(rig: &Rig, one: &str, other: &str) {
    rig.sh(&format!(
        "cmp {one} {other} && sync && echo 3 > /proc/sys/vm/drop_caches && cmp {one} {other}"
    ));
}

#[test]
fn an_upload_is_written_by_the_host_and_is_what_the_client_sent() {
    let mut rig = Rig::boot("pi-up");
    start_server(&rig);
    let files = rig.files.clone();
    let [small, large] = &files[..] else {
        unreachable!()
    };
    let mut client = connect(&rig);
    for _ in 0..2 {
        upload(&mut client, large);
        upload(&mut client, &small[..1000]);
    }
    let work = rig.settled(2);
    assert_eq!(
        (work.begun, work.refused, work.broken),
        (2, 0, 0),
        "{work:?} {}",
        rig.agent_status()
    );
    assert!(work.bytes > 70 * MIB as u64, "{work:?}");
    for name in [2, 4] {
        rig.sh(&format!("head -c 1000 /tmp/d/f0 | cmp - /tmp/d/in/{name}"));
    }
    for name in [1, 3] {
        same(&rig, "/tmp/d/f1", &format!("/tmp/d/in/{name}"));
    }
    limit_receiving(&mut rig);
    upload(&mut client, large);
    same(&rig, "/tmp/d/f1", "/tmp/d/in/5");
    within(CHANGE_TIMEOUT, "the host refuses", || {
        rig.work().refused > 0
    });
    let work = rig.work();
    assert_eq!(work.begun, 0, "{work:?}");
    // No lease or lock prevents changes to the files afterwards.
    rig.sh("rm -r /tmp/d/in; killall vpipe-upload");
    check_disk(&rig);
}

/// Limits what the VM receives, as libvirt's `inbound` does, and waits until its worker knows.
fn limit_receiving(rig: &mut Rig) {
    let limit = || {
        let links = viola_netdev::links().unwrap();
        for port in links.iter().filter(|link| link.master.is_some()) {
            let words = ["qdisc", "add", "dev", &port.name, "root", "tbf"];
            let rate = ["rate", "4gbit", "burst", "1mb", "latency", "100ms"];
            let set = Command::new("tc").args(words).args(rate).output().unwrap();
            assert!(set.status.success(), "{set:?}");
        }
    };
    rig.lab.in_netns(limit).unwrap();
    // Until its counters begin anew, the daemon may show the former worker's state.
    within(CHANGE_TIMEOUT, "the worker is replaced", || {
        rig.daemon.log().contains("or their limits have changed") && rig.work().begun == 0
    });
    rig.wait_until_served();
}

#[test]
fn cp_copies_by_the_host() {
    let rig = Rig::boot("pi-cp");
    let cp =
        "LD_PRELOAD=/usr/lib/libvpipe_preload.so VIOLA_PIPE_SOCKET=/tmp/n/pipe.sock /usr/bin/cp";
    rig.sh(&format!(
        "cd /tmp/d; {cp} f1 new; {cp} f0 f1.part; {cp} f1 new"
    ));
    same(&rig, "/tmp/d/f1", "/tmp/d/new");
    rig.sh("cmp /tmp/d/f0 /tmp/d/f1.part");
    let work = rig.settled(2);
    assert_eq!((work.refused, work.broken), (0, 0), "{work:?}");
    assert!(work.bytes >= 80 * MIB as u64, "{work:?}");
    check_disk(&rig);
}

/// Asserts that the file system is consistent.
fn check_disk(rig: &Rig) {
    // The agent keeps files open for a while, because a program may use them again.
    within(CHANGE_TIMEOUT, "the file system is unmounted", || {
        rig.sh("umount /tmp/d && echo done; true").contains("done")
    });
    let checked = Command::new("/usr/sbin/e2fsck")
        .args(["-fn", rig.folder.path().join("d.img").to_str().unwrap()])
        .output()
        .unwrap();
    assert!(checked.status.success(), "{checked:?}");
}

/// Reads a file from the disk of a dead VM.
fn dump(rig: &Rig, path: &str) -> Vec<u8> {
    let image = rig.folder.path().join("d.img");
    let to = rig.folder.path().join("dumped");
    // Replays the journal first, as the guest's next boot would.
    let played = Command::new("/usr/sbin/e2fsck")
        .args(["-fp", image.to_str().unwrap()])
        .output()
        .unwrap();
    assert!(
        played.status.code().is_some_and(|code| code <= 1),
        "{played:?}"
    );
    let what = format!("dump {path} {}", to.display());
    let dumped = Command::new("/usr/sbin/debugfs")
        .args(["-R", &what, image.to_str().unwrap()])
        .output()
        .unwrap();
    assert!(dumped.status.success(), "{dumped:?}");
    std::fs::read(to).unwrap()
}

#[test]
fn after_a_vms_death_each_block_has_old_bytes_zeros_or_new_bytes() {
    let rig = Rig::boot("pi-die");
    start_server(&rig);
    let large = &rig.files[1];
    let mut client = connect(&rig);
    client
        .write_all(&(large.len() as u64).to_be_bytes())
        .unwrap();
    client.write_all(&large[..20 * MIB]).unwrap();
    within(CHANGE_TIMEOUT, "half of the upload is written", || {
        let work = rig.work();
        work.transfers
            .first()
            .is_some_and(|t| t.sent > 15 * MIB as u64)
    });
    // The guest's journal records a new file only after some seconds, unless a program syncs.
    rig.sh("sync");
    signal(rig.guest().pid(), rustix::process::Signal::KILL);
    // The client sees the failure.
    let begun = std::time::Instant::now();
    while client.write(&[0; 4096]).is_ok() {
        assert!(begun.elapsed() < CHANGE_TIMEOUT, "the client sees no error");
        std::thread::sleep(Duration::from_millis(10));
    }
    let got = dump(&rig, "/in/1");
    let mut written = 0;
    for (block, wanted) in got.chunks(BLOCK).zip(large.chunks(BLOCK)) {
        // The block between the VM's and the host's part has zeros beside new bytes.
        let fits = block
            .iter()
            .zip(wanted)
            .all(|(is, new)| is == new || *is == 0);
        assert!(fits, "the block has bytes of another file");
        written += usize::from(*block == wanted[..block.len()]);
    }
    assert!(written * BLOCK > 10 * MIB, "{written} blocks");
    for (name, file) in [("/f0", &rig.files[0]), ("/f1", &rig.files[1])] {
        assert!(dump(&rig, name) == *file, "{name} has changed");
    }
}
