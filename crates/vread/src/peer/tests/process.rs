// SPDX-License-Identifier: Apache-2.0
//! Workers in sandboxed processes, as the daemon starts them.

use std::fs::File;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::super::{Params, run};
use super::datanode::*;
use super::reader::*;
use super::support::*;
use crate::control::{Control, Inbox, WorkerSetup};
use crate::sandbox::{self, Profile};

/// No test: what [`Host::process`] starts.
#[test]
#[ignore = "it is the worker that other tests start"]
fn worker() {
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let (setup, fds) = Control::from_fd(stdin).receive_setup().unwrap();
    let mut fds = fds.into_iter();
    let WorkerSetup::Peer {
        host,
        certificate,
        key,
        ports,
        user,
        ..
    } = setup
    else {
        panic!("{setup:?}");
    };
    let inbox = Inbox::new(fds.next().unwrap());
    let params = Params {
        host,
        certificate,
        key: key.0,
        hazards: File::from(fds.next().unwrap()),
        listeners: fds.collect(),
    };
    sandbox::enter(user, Profile::Peer, &ports).unwrap();
    run(params, Box::new(|_, _| {}), inbox).unwrap();
}

fn status(host: &Host) -> String {
    let pid = host.process.as_ref().unwrap().id();
    std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap()
}

#[test]
fn a_sandboxed_worker_serves_and_a_dead_one_gives_an_error_soon() {
    let b = Host::process("b", vec![]);
    let a = Host::process("a", vec![b.address.port()]);
    let (mut a, mut b, datanode, reader) = connect_hosts(a, b, |address| address);
    for host in [&a, &b] {
        let status = status(host);
        assert!(status.contains("Seccomp:\t2"), "{status}");
        assert!(status.contains("NoNewPrivs:\t1"), "{status}");
        assert!(status.contains("CapEff:\t0000000000000000"), "{status}");
    }
    reader.wait();
    let queue = reader.queue();
    let (node, _) = queue.open_retrying(1, false);
    let right = expected(1, false);
    let mut rng = Rng(9);
    for _ in 0..100 {
        let at = rng.below(LENGTH as u64 - (1 << 20)) as usize;
        let size = 1 + rng.below(1 << 20) as usize;
        assert!(queue.read_retrying(node, at as u64, size) == right[at..at + size]);
    }
    let (meta, _) = queue.open_retrying(1, true);
    assert!(queue.read_retrying(meta, 7, 50_000) == expected(1, true)[7..50_007]);
    datanode.withdraw(1);
    assert!(queue.read_retrying(node, 4_000_000, 4096) == right[4_000_000..4_004_096]);

    let mut end = |host: &mut Host| {
        let process = host.process.as_mut().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                process.kill().unwrap();
            });
            loop {
                let at = rng.below(LENGTH as u64 - (1 << 20)) as usize;
                let begun = Instant::now();
                let read = queue.read(node, at as u64, 1 << 20);
                assert!(begun.elapsed() < MAX_ERROR_DELAY, "{:?}", begun.elapsed());
                match read {
                    Ok(bytes) => assert!(bytes == right[at..at + (1 << 20)]),
                    Err(_) => break,
                }
            }
        });
    };
    end(&mut b);
    end(&mut a);
    assert_eq!(queue.open(3, false), Err(libc::ENOENT));
}

#[test]
fn a_worker_connects_only_to_its_configured_ports() {
    let b = Host::process("b", vec![]);
    let a = Host::process("a", vec![b.address.port()]);
    let c = Host::new("c");
    a.set_peers(vec![
        spec("b", b.id.fingerprint(), Some(b.address), vec![]),
        spec("c", c.id.fingerprint(), Some(c.address), vec![]),
    ]);
    b.set_peers(vec![spec("a", a.id.fingerprint(), None, vec![])]);
    c.set_peers(vec![spec("a", a.id.fingerprint(), None, vec![])]);
    let _reader = Reader::new(&a, "client1", &["b", "c"]);
    wait_until("b is connected", || counts(&a.stat(), "b").links_out == 1);
    let at_c = counts(&a.stat(), "c");
    // Kernels before 6.7, and those without Landlock, look at no ports.
    if landlock_version() >= 4 {
        assert!(at_c.links_out == 0 && !at_c.why.is_empty(), "{at_c:?}");
    } else {
        wait_until("c is connected", || counts(&a.stat(), "c").links_out == 1);
    }
}

fn landlock_version() -> i64 {
    // SAFETY: with a null pointer, length 0 and flag 1 the call only tells its version.
    unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0usize, 0usize, 1) }
}
