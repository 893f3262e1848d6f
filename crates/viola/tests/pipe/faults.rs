// SPDX-License-Identifier: Apache-2.0
//! Processes die, a file is written to, or its disk fails while the host sends.

use std::io::Read;
use std::path::Path;
use std::time::Duration;

use rustix::io::FdFlags;

use crate::client::Client;
use crate::common::guests::{signal, within};
use crate::rig::{CHANGE_TIMEOUT, MIB, Rig, WebSpec};

/// A client that has received a part of a large response.
pub fn half_way(rig: &Rig) -> (Client, Vec<u8>) {
    let mut client = rig.client();
    client.ask("/f1", "");
    let mut some = vec![0; MIB];
    client.0.read_exact(&mut some).unwrap();
    let mut found = None;
    within(CHANGE_TIMEOUT, "the transfer has begun", || {
        found = rig.work().transfers.first().cloned();
        found.is_some()
    });
    (client, some)
}

/// The position of the body in a response.
fn body_of(answer: &[u8]) -> usize {
    let head = answer.windows(4).position(|four| four == b"\r\n\r\n");
    head.map_or(answer.len(), |at| at + 4)
}

/// Asserts that the bytes match the file up to a reset: a cut body must never look complete.
fn assert_reset(mut client: Client, mut got: Vec<u8>, file: &[u8]) {
    let error = client.0.read_to_end(&mut got).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    let body = body_of(&got);
    assert!(got[body..] == file[..got.len() - body] && got.len() - body < file.len());
}

#[test]
fn a_killed_daemon_is_not_noticed_by_a_client() {
    let mut rig = Rig::boot("pi-daemon");
    rig.start_nginx();
    let (mut client, mut got) = half_way(&rig);
    rig.daemon.kill();
    let mut more = vec![0; 39 * MIB];
    client.0.read_exact(&mut more).unwrap();
    got.extend(more);
    let body = body_of(&got);
    assert!(got[body..] == rig.files[1][..got.len() - body]);
    // The next daemon finds the worker, which continues to serve.
    rig.daemon.restart();
    rig.wait_until_served();
    let mut client = rig.client();
    client.ask("/f1", "");
    assert!(client.answer().1 == rig.files[1]);
    within(
        CHANGE_TIMEOUT,
        "the next daemon counts the transfer",
        || rig.work().begun >= 2,
    );
}

/// Number of descriptors of a process that refer to this file.
fn open_in(pid: u32, file: &Path) -> usize {
    let all = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let leads = |fd: &std::fs::DirEntry| std::fs::read_link(fd.path()).is_ok_and(|to| to == file);
    all.flatten().filter(leads).count()
}

#[test]
fn a_worker_inherits_no_descriptor_of_the_daemons_parent() {
    let strange = tempfile::NamedTempFile::new().unwrap();
    // Every process that this test starts from now on inherits the descriptor.
    rustix::io::fcntl_setfd(&strange, FdFlags::empty()).unwrap();
    let rig = Rig::boot("pi-fds");
    let daemon = rig.daemon.pid();
    assert_eq!(
        open_in(daemon, strange.path()),
        1,
        "the daemon did not inherit the descriptor"
    );
    let workers = viola_host::proc::children(daemon).unwrap();
    assert_eq!(workers.len(), 1);
    assert_eq!(open_in(workers[0], strange.path()), 0);
    // It has only what connections need: CAP_NET_ADMIN (12) and CAP_NET_BIND_SERVICE (10).
    let status = std::fs::read_to_string(format!("/proc/{}/status", workers[0])).unwrap();
    for line in [
        "CapEff:\t0000000000001400",
        "CapPrm:\t0000000000001400",
        "CapInh:\t0000000000000000",
        "NoNewPrivs:\t1",
        "Seccomp:\t2",
    ] {
        assert!(status.contains(line), "{line}: {status}");
    }
    assert!(!status.contains("Uid:\t0\t"), "{status}");
}

#[test]
fn a_killed_worker_causes_a_reset_and_the_next_one_serves() {
    let rig = Rig::boot("pi-work");
    rig.start_nginx();
    let (client, got) = half_way(&rig);
    let workers = viola_host::proc::children(rig.daemon.pid()).unwrap();
    assert_eq!(workers.len(), 1);
    signal(workers[0], rustix::process::Signal::KILL);
    assert_reset(client, got, &rig.files[1]);
    // A connection that the agent hands over before it knows of the new worker is reset, too.
    within(CHANGE_TIMEOUT, "the next worker serves", || {
        let mut client = rig.client();
        client.ask("/f1", "");
        let mut whole = vec![0; 40 * MIB];
        let got = client.0.read_exact(&mut whole);
        let body = body_of(&whole);
        got.is_ok() && whole[body..] == rig.files[1][..whole.len() - body] && rig.work().begun > 0
    });
}

#[test]
fn a_killed_agent_causes_a_reset_and_never_an_end() {
    let rig = Rig::boot("pi-agent");
    rig.start_nginx();
    let (client, got) = half_way(&rig);
    rig.sh("killall -9 viola-agent");
    // A serial line does not report the agent's death; the host detects its silence.
    within(CHANGE_TIMEOUT, "the host resets the connection", || {
        rig.work().broken > 0
    });
    assert_reset(client, got, &rig.files[1]);
    // The server continues without the agent.
    let mut client = rig.client();
    client.ask("/f1", "");
    assert!(client.answer().1 == rig.files[1]);
}

#[test]
fn a_file_is_not_written_to_while_the_host_sends_it() {
    let rig = Rig::boot("pi-write");
    rig.start_nginx();
    let (mut client, mut got) = half_way(&rig);
    let before = rig.files[1].clone();
    std::thread::scope(|scope| {
        let rig = &rig;
        let writer = scope
            .spawn(move || rig.sh("printf new | dd of=/tmp/d/f1 conv=notrunc 2>/dev/null; sync"));
        std::thread::sleep(Duration::from_millis(500));
        assert!(
            !writer.is_finished(),
            "the write did not wait for the transfer's end"
        );
        let mut more = vec![0; 20 * MIB];
        client.0.read_exact(&mut more).unwrap();
        got.extend(more);
        // The VM itself sends the remaining bytes, with the file's new content.
        let mut rest = Vec::new();
        client
            .0
            .get_mut()
            .set_read_timeout(Some(Duration::from_secs(3)))
            .unwrap();
        let _ = client.0.read_to_end(&mut rest);
        got.extend(rest);
        writer.join().unwrap();
    });
    let body = body_of(&got);
    assert!(
        got[body..] == before[..got.len() - body],
        "the bytes sent before the write differ"
    );
    let mut client = rig.client();
    client.ask("/f1", "");
    let (_, now) = client.answer();
    assert!(&now[..3] == b"new" && now[3..] == before[3..]);
}

#[test]
fn a_disk_that_fails_is_a_cut_body_and_never_wrong_bytes() {
    let rig = Rig::with(&WebSpec {
        name: "pi-disk",
        looped: true,
        ..WebSpec::default()
    });
    rig.start_nginx();
    let (mut client, mut got) = half_way(&rig);
    let image = rig.folder.path().join("d.img");
    let image = std::fs::File::options().write(true).open(image);
    image.unwrap().set_len(30 << 20).unwrap();
    // The response ends early or with a reset.
    let _ = client.0.read_to_end(&mut got);
    let body = body_of(&got);
    let sent = got.len() - body;
    assert!(sent < 40 * MIB, "the disk has not failed");
    assert!(got[body..] == rig.files[1][..sent], "wrong bytes");
    let work = rig.settled(1);
    assert!(work.bytes < 40 * MIB as u64, "{work:?}");
    // The server has seen the error and continues to serve.
    rig.sh("grep -q 'sendfile() failed (5: Input/output error)' /tmp/n/error.log");
    rig.client().fetch("/f0", &rig.files[0]);
}
