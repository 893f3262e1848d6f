// SPDX-License-Identifier: Apache-2.0
//! How fast it is on the loopback, where TLS, copies and waiting are all there is.
//!
//! `cargo test --release -p viola-vread --lib -- --ignored --nocapture peer::tests::throughput`

use std::time::{Duration, Instant};

use super::support::*;

/// How long each way of reading is measured.
const TIME: Duration = Duration::from_secs(3);

/// Reads on so many threads, and gives the seconds, reads and bytes.
fn measure(reader: &Reader, threads: u64, size: usize, in_order: bool) -> (f64, u64, u64) {
    let begun = Instant::now();
    let (mut reads, mut bytes) = (0, 0);
    std::thread::scope(|scope| {
        let read = |thread: u64| {
            let queue = reader.queue();
            let (node, _) = queue.open_retrying(1 + thread as i64 % 8, false);
            let (mut rng, mut at, mut reads, mut bytes) = (Rng(thread + 1), 0, 0, 0);
            while begun.elapsed() < TIME {
                let got = queue.read_retrying(node, at, size).len() as u64;
                (reads, bytes) = (reads + 1, bytes + got);
                at = match in_order {
                    true if at + got + size as u64 <= LENGTH as u64 => at + got,
                    true => 0,
                    false => rng.below(LENGTH as u64 - size as u64),
                };
            }
            (reads, bytes)
        };
        let threads: Vec<_> = (0..threads).map(|t| scope.spawn(move || read(t))).collect();
        for thread in threads {
            let (r, b): (u64, u64) = thread.join().unwrap();
            (reads, bytes) = (reads + r, bytes + b);
        }
    });
    (begun.elapsed().as_secs_f64(), reads, bytes)
}

#[test]
#[ignore = "it measures"]
fn throughput() {
    let b = Host::process("b", vec![]);
    let a = Host::process("a", vec![b.address.port()]);
    let (_a, _b, _datanode, reader) = connect_hosts(a, b, |address| address);
    reader.wait();
    for (what, threads, size, in_order) in [
        ("in order, 1 MiB", 1, 1 << 20, true),
        ("in order, 128 KiB", 1, 128 << 10, true),
        ("in order, 1 MiB", 4, 1 << 20, true),
        ("anywhere, 1 MiB", 4, 1 << 20, false),
        ("anywhere, 64 KiB", 1, 64 << 10, false),
        ("anywhere, 4 KiB", 1, 4096, false),
        ("anywhere, 4 KiB", 4, 4096, false),
    ] {
        let (seconds, reads, bytes) = measure(&reader, threads, size, in_order);
        println!(
            "{what}, {threads} threads: {:.0} MiB/s, {:.0} reads/s, {:.0} us each",
            bytes as f64 / seconds / f64::from(1 << 20),
            reads as f64 / seconds,
            threads as f64 * seconds / reads as f64 * 1e6
        );
    }
}
