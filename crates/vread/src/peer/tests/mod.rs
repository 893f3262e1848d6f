// SPDX-License-Identifier: Apache-2.0
//! Tests with two hosts by TCP and TLS on the loopback.

mod datanode;
mod hostile;
mod process;
mod reader;
mod relay;
mod support;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use datanode::*;
use reader::*;
use relay::Relay;
use support::*;

use super::new_memory;
use crate::control::{Source, socket_pair};
use crate::reader::without_waiting;

#[test]
fn a_block_of_another_host_is_read_byte_for_byte() {
    let (a, b, _datanode, reader) = two_hosts();
    reader.wait();
    let queue = reader.queue();
    let (node, size) = queue.open_retrying(1, false);
    assert_eq!(size, LENGTH as u64);
    let right = expected(1, false);
    // In order, as a VM reads ahead; then the end, and beyond it.
    for piece in [128 << 10, 1 << 20, 300_001] {
        let mut at = 0;
        while at < LENGTH {
            let bytes = queue.read_retrying(node, at as u64, piece);
            let end = (at + piece).min(LENGTH);
            assert!(bytes == right[at..end], "{piece} {at}");
            at = end;
        }
    }
    assert_eq!(queue.read_retrying(node, LENGTH as u64 - 1, 4096).len(), 1);
    assert!(queue.read_retrying(node, LENGTH as u64, 4096).is_empty());
    let (meta, size) = queue.open_retrying(1, true);
    assert_eq!(queue.read_retrying(meta, 0, 1 << 20), expected(1, true));
    let stat = reader.service.stat();
    let bytes = 3 * LENGTH as u64 + 1 + size;
    assert_eq!(
        stat.remote_bytes,
        [("uml:dn1@b".to_owned(), bytes)].into_iter().collect()
    );
    assert!(stat.remote && stat.remote_reads > 0);
    let (at_a, at_b) = (counts(&a.stat(), "b"), counts(&b.stat(), "a"));
    assert!(at_a.bytes_in >= bytes && at_a.links_out == 1, "{at_a:?}");
    assert!(at_b.bytes_out >= bytes && at_b.links_in == 1, "{at_b:?}");
    // Fetched ahead, and hardly anything twice.
    assert!(at_a.bytes_in < 2 * bytes, "{at_a:?}");
    assert_eq!(total(&stat.bytes), 0);
}

#[test]
fn an_upgraded_host_and_an_older_one_read_from_each_other() {
    // The first of each pair asks, the second serves.
    for (asks, serves) in [((1, 2), (1, 1)), ((1, 1), (1, 2)), ((1, 2), (2, 3))] {
        let host = |name, (lowest, highest)| Host::speaking(name, lowest, highest);
        let (_a, _b, _datanode, reader) =
            connect_hosts(host("a", asks), host("b", serves), |address| address);
        reader.wait();
        let queue = reader.queue();
        let (node, _) = queue.open_retrying(1, false);
        assert!(
            queue.read_retrying(node, 0, 1 << 20) == expected(1, false)[..1 << 20],
            "{asks:?} {serves:?}"
        );
    }
}

#[test]
fn hosts_without_a_common_version_say_so() {
    let (a, _b, _datanode, _reader) = connect_hosts(
        Host::speaking("a", 1, 1),
        Host::speaking("b", 2, 3),
        |address| address,
    );
    wait_until("the reason is known", || {
        counts(&a.stat(), "b")
            .why
            .contains("the host has another protocol version")
    });
}

#[test]
fn many_threads_read_anywhere_and_get_the_right_bytes() {
    let (_a, _b, _datanode, reader) = two_hosts();
    reader.wait();
    std::thread::scope(|scope| {
        for thread in 0..6u64 {
            let queue = reader.queue();
            scope.spawn(move || {
                let id = 1 + thread as i64 % 4;
                let (node, _) = queue.open_retrying(id, false);
                let right = expected(id, false);
                let mut rng = Rng(thread * 77 + 1);
                for _ in 0..60 {
                    let at = rng.below(LENGTH as u64);
                    let size = match rng.below(3) {
                        0 => 4096,
                        1 => 65_536,
                        _ => 1 + rng.below(1 << 20) as usize,
                    };
                    let end = (at as usize + size).min(LENGTH);
                    let bytes = queue.read_retrying(node, at, size);
                    assert!(bytes == right[at as usize..end], "{at} {size}");
                }
            });
        }
    });
}

#[test]
fn a_thread_that_does_not_wait_only_sends_the_request() {
    let (_a, _b, _datanode, reader) = two_hosts();
    reader.wait();
    let queue = reader.queue();
    let (node, _) = queue.open_retrying(3, false);
    let right = expected(3, false);
    for at in (0..LENGTH).step_by(1 << 20) {
        let begun = Instant::now();
        let mut sent = 0;
        let bytes = loop {
            match without_waiting(|| queue.read(node, at as u64, 1 << 20)) {
                Some(Ok(bytes)) => break bytes,
                Some(Err(_)) | None => sent += 1,
            }
            assert!(begun.elapsed() < Duration::from_secs(30));
            std::thread::sleep(Duration::from_millis(1));
        };
        assert!(bytes == right[at..(at + (1 << 20)).min(LENGTH)]);
        assert!(at > 0 || sent > 0, "it has waited");
    }
    // A name that no host knows takes waiting, too.
    assert!(without_waiting(|| queue.open(77, false)).is_none());
    assert_eq!(queue.open(77, false), Err(libc::ENOENT));
}

#[test]
fn a_withdrawal_gives_an_error_soon_and_no_wrong_byte() {
    let (_a, b, datanode, reader) = two_hosts();
    reader.wait();
    let right = expected(2, false);
    for round in 0..4 {
        let queue = reader.queue();
        let (node, _) = queue.open_retrying(2, false);
        let withdrawn = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (datanode, withdrawn) = (&datanode, &withdrawn);
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(20 + 10 * round));
                // in turn with its answers, as an agent worker does both
                let mut named = datanode.named.lock().unwrap();
                *named = false;
                datanode.withdraw(2);
                drop(named);
                // Its place on the disk is given to something else.
                let other = vec![0xee; 16 << 20];
                std::os::unix::fs::FileExt::write_all_at(&datanode.image, &other, 0).unwrap();
                withdrawn.store(true, Ordering::SeqCst);
            });
            let begun = Instant::now();
            let mut at = 0;
            let error = loop {
                let size = 256 << 10;
                match queue.read(node, at as u64, size) {
                    Ok(bytes) => {
                        assert!(bytes == right[at..(at + size).min(LENGTH)], "{at}");
                    }
                    Err(error) => break error,
                }
                at = if at + size < LENGTH { at + size } else { 0 };
                assert!(begun.elapsed() < Duration::from_secs(30), "no error");
            };
            assert!([libc::EIO, libc::ESTALE].contains(&error), "{error}");
        });
        assert!(withdrawn.load(Ordering::SeqCst));
        assert_eq!(queue.open(2, false), Err(libc::ENOENT));
        let bytes = &DISK_BYTES[..16 << 20];
        std::os::unix::fs::FileExt::write_all_at(&datanode.image, bytes, 0).unwrap();
        *datanode.named.lock().unwrap() = true;
    }
    let at_b = counts(&b.stat(), "a");
    assert!(at_b.unknown + at_b.withdrawn > 0, "{at_b:?}");
}

#[test]
fn a_lost_connection_is_an_error_within_a_second_and_comes_back() {
    for swallows in [false, true] {
        let mut relay = None;
        let (a, _b, _datanode, reader) =
            two_hosts_through(|address| relay.insert(Relay::to(address)).address);
        let relay = relay.unwrap();
        reader.wait();
        let queue = reader.queue();
        let (node, _) = queue.open_retrying(1, false);
        let right = expected(1, false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                match swallows {
                    true => relay.swallow(),
                    false => relay.cut(),
                }
            });
            let mut rng = Rng(5);
            let error = loop {
                let (at, begun) = (rng.below(LENGTH as u64 - (1 << 20)), Instant::now());
                let read = queue.read(node, at, 1 << 20);
                let took = begun.elapsed();
                assert!(took < MAX_ERROR_DELAY, "{took:?}");
                match read {
                    Ok(bytes) => assert!(bytes == right[at as usize..][..1 << 20]),
                    Err(error) => break error,
                }
            };
            assert!([libc::EIO, libc::ESTALE].contains(&error), "{error}");
        });
        // Requests fail at once while the other host is unreachable.
        let begun = Instant::now();
        assert!(queue.open(5, false).is_err());
        assert!(begun.elapsed() < MAX_ERROR_DELAY);
        let at_a = counts(&a.stat(), "b");
        assert!(at_a.broken > 0 && !at_a.why.is_empty(), "{at_a:?}");
        relay.pass();
        reader.wait();
        let (node, _) = queue.open_retrying(1, false);
        assert!(queue.read_retrying(node, 5, 4096) == right[5..5 + 4096]);
    }
}

#[test]
fn a_stopped_peer_worker_gives_an_error_within_a_second() {
    let reader = Reader::alone();
    let (ours, theirs) = socket_pair().unwrap();
    reader
        .service
        .set_remote(Some((ours, new_memory().unwrap())))
        .unwrap();
    let queue = reader.queue();
    let begun = Instant::now();
    assert_eq!(queue.open(1, false), Err(libc::ENOENT));
    assert!(begun.elapsed() < MAX_ERROR_DELAY);
    // The peer worker is not asked again for a while.
    let is_fast = || {
        let begun = Instant::now();
        assert_eq!(queue.open(2, false), Err(libc::ENOENT));
        begun.elapsed() < Duration::from_millis(200)
    };
    assert!((0..8).any(|_| is_fast()));
    drop(theirs);
    assert_eq!(queue.open(3, false), Err(libc::ENOENT));
}

#[test]
fn blocks_that_are_not_allowed_are_unknown() {
    let (a, b, _datanode, reader) = two_hosts();
    reader.wait();
    let other = Reader::new(&a, "other", &["b"]);
    wait_until("it is connected", || counts(&a.stat(), "b").links_out == 2);
    assert_eq!(other.queue().open(1, false), Err(libc::ENOENT));
    let queue = reader.queue();
    let (node, _) = queue.open_retrying(1, false);
    // Another pool, from this moment on.
    let spec_of_a = |pool| spec("a", a.id.fingerprint(), None, vec![grant("client*", pool)]);
    b.set_peers(vec![spec_of_a("BP-2-*")]);
    assert_eq!(queue.open(2, false), Err(libc::ENOENT));
    assert!(queue.read(node, 8_000_000, 4096).is_err());
    b.set_peers(vec![spec_of_a("BP-1-*")]);
    queue.open_retrying(2, false);
    // What the asking host does not take from there.
    for (datanodes, pools) in [("dn2", "*"), ("*", "BP-2-*")] {
        let source = Source {
            peer: "b".into(),
            datanodes: vec![datanodes.into()],
            pools: vec![pools.into()],
        };
        reader.ask(&a, "client1", vec![source]);
        wait_until("it is connected", || counts(&a.stat(), "b").links_out == 2);
        assert_eq!(reader.queue().open(3, false), Err(libc::ENOENT));
    }
}

#[test]
fn a_datanode_is_found_on_the_host_to_which_it_has_moved() {
    let (a, b, datanode, reader) = two_hosts();
    let c = Host::new("c");
    let known = |host: &Host, name| spec(name, host.id.fingerprint(), Some(host.address), vec![]);
    a.set_peers(vec![known(&b, "b"), known(&c, "c")]);
    let moved = Datanode::on(&c);
    c.set_peers(vec![spec(
        "a",
        a.id.fingerprint(),
        None,
        vec![grant("client1", POOL)],
    )]);
    *moved.named.lock().unwrap() = false;
    let both = ["b", "c"].map(|peer| Source {
        peer: peer.into(),
        datanodes: vec!["uml:dn1".into()],
        pools: vec!["*".into()],
    });
    reader.ask(&a, "client1", both.to_vec());
    wait_until("both are connected", || {
        let stat = a.stat();
        counts(&stat, "b").links_out == 1 && counts(&stat, "c").links_out == 1
    });
    let queue = reader.queue();
    let (node, _) = queue.open_retrying(4, false);
    let right = expected(4, false);
    assert!(queue.read_retrying(node, 7_000_000, 5000) == right[7_000_000..7_005_000]);
    *datanode.named.lock().unwrap() = false;
    datanode.withdraw(4);
    *moved.named.lock().unwrap() = true;
    // The same open file goes on.
    assert!(queue.read_retrying(node, 3_000_000, 5000) == right[3_000_000..3_005_000]);
    let bytes = reader.service.stat().remote_bytes;
    assert_eq!(bytes.get("uml:dn1@c"), Some(&5000), "{bytes:?}");
}
