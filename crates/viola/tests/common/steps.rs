// SPDX-License-Identifier: Apache-2.0
//! Steps that change the blocks of a real HDFS while clients read them.

#![allow(dead_code, clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use viola_lab::hadoop::{Client, FileSystem, Hdfs, ROOT};

use super::guests::within;
use super::hdfs::{Bed, Counts, ReadResult, STEP_TIMEOUT, ask, check, check_local, tell};

pub const MIB: u64 = 1 << 20;

/// Runs a step and prints its name and duration.
pub fn step<T>(name: &str, work: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    eprintln!("{name} ...");
    let result = work();
    eprintln!("{name}: {:.1} s", begun.elapsed().as_secs_f64());
    result
}

pub fn begin(client: &Mutex<Client>, path: &str) {
    for side in ["viola", "raw"] {
        tell(client, &format!("{side} watch {path} 262144 {side} 1"));
    }
}

/// Ends the readers and asserts that neither has seen a wrong byte.
pub fn end(client: &Mutex<Client>) -> [ReadResult; 2] {
    ["viola", "raw"].map(|side| {
        let seen: ReadResult = ask(client, &format!("ended {side}"));
        eprintln!(
            "  {side}: {} reads, {} MiB, {} of them past the DataNode, longest gap {} ms, failures {:?} {}",
            seen.reads,
            seen.bytes / MIB,
            seen.local / MIB,
            seen.longest_ms,
            seen.failures,
            seen.said
        );
        assert_eq!(seen.wrong, 0, "{side}: {}", seen.said);
        seen
    })
}

/// Bytes that the reader's worker has read from a DataNode's disk, as the daemon reports them.
pub fn bytes_past_datanode(bed: &Bed, node: &str) -> u64 {
    let bytes = bed.shown(node).1.bytes;
    let of = format!("-{node}");
    bytes
        .iter()
        .filter(|(name, _)| name.ends_with(&of))
        .map(|(_, n)| n)
        .sum()
}

/// Reads a file until all of it bypasses the DataNode, and asserts that the worker's own count agrees.
pub fn check_past(bed: &Bed, client: &Mutex<Client>, path: &str, bytes: u64) {
    let before = bytes_past_datanode(bed, "dn") + bytes_past_datanode(bed, "d2");
    check_local(client, path, bytes);
    // The daemon polls its workers' counters.
    within(
        STEP_TIMEOUT,
        "the worker's count reaches the bytes read",
        || bytes_past_datanode(bed, "dn") + bytes_past_datanode(bed, "d2") >= before + bytes,
    );
}

/// Appends, a slow writer, truncation, and new bytes after it.
pub fn changes_of_a_file(client: &Mutex<Client>) {
    // The last block is half full; the append writes to it again.
    let (first, second) = ("/a_1", "/a_1_5242880_3");
    tell(
        client,
        &format!("stock fill {first} {} {}", 6 * MIB, 4 * MIB),
    );
    check_local(client, first, 6 * MIB);
    begin(client, first);
    for to in [7, 9] {
        tell(client, &format!("stock extend {first} {}", to * MIB));
        check(client, "viola", first, to * MIB);
    }
    // A slow writer that flushes, so that readers see what it has written.
    tell(client, &format!("stock extend {first} {} 300", 14 * MIB));
    for seen in end(client) {
        assert!(seen.failures.is_empty() && seen.reads > 0, "{seen:?}");
    }
    check_local(client, first, 14 * MIB);
    begin(client, first);
    tell(client, &format!("stock truncate {first} {}", 5 * MIB));
    check(client, "viola", first, 5 * MIB);
    end(client);
    // New bytes replace the truncated ones.
    tell(client, &format!("stock rename {first} {second}"));
    begin(client, second);
    tell(client, &format!("stock extend {second} {}", 8 * MIB));
    check(client, "viola", second, 8 * MIB);
    for seen in end(client) {
        assert!(seen.failures.is_empty() && seen.reads > 0, "{seen:?}");
    }
    check_local(client, second, 8 * MIB);
}

/// Moves the extents of a file while it is read: e4defrag on a fragmented file, or a swap of extents with a copy as xfs_fsr
/// does.
pub fn defragment(bed: &Bed, client: &Mutex<Client>) {
    let before: BTreeSet<String> = bed.blocks("dn").into_iter().collect();
    let ext4 = bed.file_system() == FileSystem::Ext4;
    let filler = ext4.then(|| bed.fill_up("dn", 48 * MIB, true));
    tell(client, &format!("stock fill /d_5 {} {}", 40 * MIB, 8 * MIB));
    check_past(bed, client, "/d_5", 40 * MIB);
    let blocks: Vec<String> = bed
        .blocks("dn")
        .into_iter()
        .filter(|b| !before.contains(b))
        .collect();
    let blocks = blocks.join(" ");
    let program = match filler {
        Some(filler) => {
            let script = format!("rm {filler}; sync; ln -sfn /proc/mounts {ROOT}/etc/mtab");
            bed.sh("dn", &script);
            format!("chroot {ROOT} /usr/sbin/e4defrag -v $b 2>&1")
        }
        None => format!(
            "cp $b /mnt/donor; sync; chroot {ROOT} /usr/sbin/xfs_io -c 'swapext /mnt/donor' $b 2>&1; rm /mnt/donor"
        ),
    };
    let relocated = || {
        let withdrawals = bed.shown("dn").0.withdrawals;
        withdrawals.get("relocated").copied().unwrap_or(0)
    };
    let then = relocated();
    begin(client, "/d_5");
    let said = bed.sh(
        "dn",
        &format!("for b in {blocks}; do {program}; done; sync"),
    );
    within(
        STEP_TIMEOUT,
        &format!("extents that moved are noticed: {said}"),
        || relocated() > then,
    );
    // New bytes replace the old ones.
    tell(client, &format!("stock fill /o_6 {} {}", 40 * MIB, 8 * MIB));
    std::thread::sleep(Duration::from_secs(3));
    for seen in end(client) {
        assert!(
            seen.failures.is_empty() && seen.reads > 0,
            "{seen:?} {said}"
        );
    }
    eprintln!("  {} blocks were relocated", relocated() - then);
    check_past(bed, client, "/d_5", 40 * MIB);
    tell(client, "stock delete /d_5");
    tell(client, "stock delete /o_6");
}

/// Deletes files and writes others in their place on a nearly full disk, while readers read all of them.
pub fn refill(bed: &Bed, client: &Mutex<Client>, span: Duration) -> u64 {
    const FILES: u64 = 10;
    const SIZE: u64 = 8 * MIB;
    let filler = bed.fill_up("dn", 160 * MIB, false);
    let count = || {
        let (datanode, reader) = bed.shown("dn");
        (
            datanode.withdrawals.get("deleted").copied().unwrap_or(0),
            reader.withdrawn,
        )
    };
    let (deleted, withdrawn) = count();
    let before: Counts = ask(client, "counts");
    let mut names: Vec<String> = Vec::new();
    let mut seed = 100;
    for side in ["viola", "raw"] {
        tell(client, &format!("{side} watch /r 131072 {side} 2"));
    }
    let begun = Instant::now();
    while begun.elapsed() < span {
        if names.len() as u64 == FILES {
            // Deletes neither the oldest nor the newest file.
            let old = names.remove((seed as usize * 7) % names.len());
            tell(client, &format!("stock delete {old}"));
        }
        seed += 1;
        let name = format!("/r/x_{seed}");
        tell(client, &format!("stock fill {name} {SIZE} {}", 2 * MIB));
        names.push(name);
        // A file must live long enough to be named and read.
        std::thread::sleep(Duration::from_millis(300));
    }
    let seen = end(client);
    let after: Counts = ask(client, "counts");
    let (deleted, withdrawn) = (count().0 - deleted, count().1 - withdrawn);
    eprintln!(
        "  {} files written, {deleted} blocks withdrawn because they were deleted, {withdrawn} reads of withdrawn blocks; \
         fallbacks {:?}",
        seed - 100,
        after.fallbacks
    );
    assert!(deleted > 0 && seen.iter().all(|s| s.local > 0), "{seen:?}");
    for seen in &seen {
        let gone = [
            "FileNotFoundException",
            "BlockMissingException",
            "EOFException",
            "IOException",
            "RemoteException",
        ];
        assert!(
            seen.failures
                .keys()
                .all(|kind| gone.contains(&kind.as_str())),
            "{seen:?}"
        );
    }
    assert_eq!(
        after.fallbacks["Checksum"], before.fallbacks["Checksum"],
        "the checksums found wrong bytes"
    );
    for name in names {
        check_local(client, &name, SIZE);
        tell(client, &format!("stock delete {name}"));
    }
    bed.sh("dn", &format!("rm {filler}"));
    withdrawn
}

/// The number of blocks that the NameNode knows to be corrupt.
pub fn corrupt_blocks(bed: &Bed) -> u64 {
    let text = bed.sh(
        "dn",
        "wget -q -O - 'http://127.0.0.1:9870/jmx?qry=Hadoop:service=NameNode,name=FSNamesystem'",
    );
    let (_, rest) = text.split_once("\"CorruptBlocks\" : ").unwrap();
    rest.split(',').next().unwrap().trim().parse().unwrap()
}

/// A byte changes on the disk. The client's checksums detect it, and the client gets the right byte over TCP.
pub fn corrupt(bed: &Bed, client: &Mutex<Client>) {
    let before: BTreeSet<String> = bed.blocks("dn").into_iter().collect();
    tell(client, &format!("stock fill /c_9 {} {}", 4 * MIB, 4 * MIB));
    check_local(client, "/c_9", 4 * MIB);
    let block = bed
        .blocks("dn")
        .into_iter()
        .find(|b| !before.contains(b))
        .unwrap();
    // The DataNode still has the right byte in its page cache.
    bed.corrupt_byte("dn", &block, MIB + 12_345);
    let found = |counts: Counts| counts.fallbacks["Checksum"];
    let then = found(ask(client, "counts"));
    let raw: ReadResult = ask(client, "raw check /c_9 262144");
    assert_eq!(
        (raw.wrong, raw.local),
        (1, 4 * MIB),
        "the byte on the disk is not wrong: {raw:?}"
    );
    let seen = check(client, "viola", "/c_9", 4 * MIB);
    assert!(seen.local < 4 * MIB && seen.failures.is_empty(), "{seen:?}");
    assert_eq!(found(ask(client, "counts")), then + 1);
    assert_eq!(
        corrupt_blocks(bed),
        0,
        "the plug-in reported the block as corrupt"
    );
}

/// The DataNode's scanner finds the corrupt block, as it does without viola.
pub fn scan_corrupt(bed: &Bed, client: &Mutex<Client>) {
    within(
        STEP_TIMEOUT,
        "the DataNode's scanner finds the corrupt block",
        || corrupt_blocks(bed) == 1,
    );
    tell(client, "stock delete /c_9");
    within(STEP_TIMEOUT, "the NameNode drops the corrupt block", || {
        corrupt_blocks(bed) == 0
    });
}

/// Longest time (ms) that a plug-in call may take, and longest time between two reads, when a process dies. On an idle machine
/// both are below a second; the bounds leave room for a busy one.
const MAX_PLUGIN_CALL_MS: u64 = 5_000;
const MAX_READ_GAP_MS: u64 = 15_000;

/// A process dies while the client reads. The client goes on.
pub fn assert_no_stall(client: &Mutex<Client>, what: &str, path: &str, die: impl FnOnce()) {
    tell(client, &format!("viola watch {path} 65536 viola 2"));
    std::thread::sleep(Duration::from_secs(1));
    let _: Counts = ask(client, "counts");
    let _: ReadResult = ask(client, "watched viola");
    std::thread::sleep(Duration::from_secs(2));
    let calm: ReadResult = ask(client, "watched viola");
    assert!(
        calm.local > 0,
        "{what}: nothing is read past the DataNode: {calm:?}"
    );
    die();
    std::thread::sleep(Duration::from_secs(3));
    let seen: ReadResult = ask(client, "ended viola");
    let counts: Counts = ask(client, "counts");
    eprintln!(
        "  {what}: longest gap between two reads {} ms (before: {} ms), longest call of the plug-in {} ms, {} reads, \
         {} MiB of {} past the DataNode",
        seen.longest_ms,
        calm.longest_ms,
        counts.longest_ms,
        seen.reads,
        seen.local / MIB,
        seen.bytes / MIB,
    );
    assert!(
        seen.wrong == 0 && seen.failures.is_empty() && seen.reads > 0,
        "{what}: {seen:?}"
    );
    assert!(
        counts.longest_ms <= MAX_PLUGIN_CALL_MS && seen.longest_ms <= MAX_READ_GAP_MS,
        "{what}: the client waited too long: {counts:?} {seen:?}"
    );
}

/// Upgrades the layout next to the old one and rolls back. Existing blocks are read past the DataNode; missing ones are not.
pub fn upgrade(bed: &Bed, hdfs: &Hdfs, client: &Mutex<Client>, with_corrupt: bool) {
    let said = |e: viola_lab::Error| -> () { panic!("{}", e.full()) };
    tell(client, &format!("stock fill /o_11 {} {}", 3 * MIB, 2 * MIB));
    check_local(client, "/o_11", 3 * MIB);
    hdfs.stop_daemons().unwrap_or_else(said);
    // The scanner starts again.
    bed.sh(
        "dn",
        "find /mnt/data -name scanner.cursor -exec rm {} +; sync; echo 3 >/proc/sys/vm/drop_caches",
    );
    hdfs.start_daemons_with(&["-upgrade"], &[])
        .unwrap_or_else(said);
    let previous = "find /mnt/data -path '*/previous/*' -name 'blk_*' | wc -l";
    assert!(
        bed.sh("dn", previous).trim().parse::<u32>().unwrap() > 0,
        "there is no `previous`"
    );
    for (path, size) in [("/f_7", 24), ("/o_11", 3)] {
        check_local(client, path, size * MIB);
    }
    if with_corrupt {
        step("scan", || scan_corrupt(bed, client));
    }
    tell(client, "stock delete /o_11");
    tell(client, &format!("stock fill /n_12 {} {}", 5 * MIB, 2 * MIB));
    check_local(client, "/n_12", 5 * MIB);
    hdfs.stop_daemons().unwrap_or_else(said);
    let class = "org.apache.hadoop.hdfs.server.namenode.NameNode";
    let back = hdfs.java_fed(bed.guest("dn"), class, &["-rollback"], "Y\n", STEP_TIMEOUT);
    let back = back.unwrap_or_else(|e| panic!("{}", e.full()));
    assert_eq!(back.status, 0, "{}", back.stderr);
    hdfs.start_daemons_with(&[], &["-rollback"])
        .unwrap_or_else(said);
    for (path, size) in [("/f_7", 24), ("/o_11", 3)] {
        check_local(client, path, size * MIB);
    }
    let gone = client
        .lock()
        .unwrap()
        .ask("viola check /n_12 65536")
        .unwrap_err();
    assert!(gone.full().contains("FileNotFound"), "{}", gone.full());
    // HDFS reuses block IDs for other bytes. A client with the old checksums in memory detects the mismatch and reads over TCP
    // from then on. No byte is ever wrong.
    tell(client, &format!("stock fill /n_13 {} {}", 5 * MIB, 2 * MIB));
    within(
        STEP_TIMEOUT,
        "blocks written after the rollback are named",
        || check(client, "raw", "/n_13", 5 * MIB).local == 5 * MIB,
    );
    let seen = check(client, "viola", "/n_13", 5 * MIB);
    assert!(seen.failures.is_empty(), "{seen:?}");
    tell(client, "stock delete /n_13");
    check_past(bed, client, "/f_7", 24 * MIB);
}

/// Without a mount the client reads all bytes over TCP, and they are right.
pub fn end_of_the_mount(client: &Mutex<Client>) {
    let seen = check(client, "viola", "/f_7", 24 * MIB);
    assert!(seen.local == 0 && seen.failures.is_empty(), "{seen:?}");
}

/// The agent ends and another one starts.
pub fn restart_agent(bed: &Bed, node: &str) {
    let _ = bed.guest(node).stop("agent");
    bed.agent(node);
}

/// On a file system that journals data the daemon serves no block and reports the reason. HDFS works.
pub fn data_journal(bed: &Bed, hdfs: &Hdfs, client: &Mutex<Client>) {
    let said = |e: viola_lab::Error| -> () { panic!("{}", e.full()) };
    check_past(bed, client, "/f_7", 24 * MIB);
    let _ = bed.guest("dn").stop("agent");
    hdfs.stop_daemons().unwrap_or_else(said);
    bed.sh(
        "dn",
        &format!(
            "umount {ROOT}/mnt; umount /mnt; mount -t ext4 -o noatime,data=journal /dev/ubda /mnt; \
             mount -o bind /mnt {ROOT}/mnt"
        ),
    );
    hdfs.start_daemons().unwrap_or_else(said);
    bed.agent("dn");
    let status = "viola-agent --config /run/viola/agent.toml status";
    within(
        STEP_TIMEOUT,
        "data=journal is the reason for serving nothing",
        || {
            let (_, said) = bed.try_sh("dn", status);
            said.contains("data=journal")
        },
    );
    assert_eq!(bed.shown("dn").0.blocks, 0);
    tell(client, &format!("stock fill /j_6 {} {}", 3 * MIB, 2 * MIB));
    let before = bytes_past_datanode(bed, "dn");
    for (path, bytes) in [("/f_7", 24 * MIB), ("/j_6", 3 * MIB)] {
        let seen = check(client, "viola", path, bytes);
        assert!(seen.local == 0 && seen.failures.is_empty(), "{seen:?}");
    }
    assert_eq!(bytes_past_datanode(bed, "dn"), before);
}

/// Replicas move from `dn` to `d2` while they are read: HDFS copies them and then deletes those on the fuller disk.
pub fn rebalance(bed: &Bed, client: &Mutex<Client>, path: &str, bytes: u64, block: u64) {
    let blocks = || (bed.blocks("dn").len(), bed.blocks("d2").len());
    let gone = || bed.shown("dn").0.withdrawn;
    let ((dn, d2), withdrawn) = (blocks(), gone());
    let count = usize::try_from(bytes / block).unwrap();
    begin(client, path);
    tell(client, &format!("stock replicas {path} 2"));
    within(STEP_TIMEOUT, "the second DataNode has copies", || {
        blocks().1 >= d2 + count
    });
    // Both replicas are named.
    std::thread::sleep(Duration::from_secs(4));
    tell(client, &format!("stock replicas {path} 1"));
    within(STEP_TIMEOUT, "surplus replicas are gone", || {
        let now = blocks();
        now.0 + now.1 <= dn + d2
    });
    let now = blocks();
    eprintln!(
        "  blocks of both DataNodes: {dn} and {d2}, then {} and {}",
        now.0, now.1
    );
    assert!(now.0 < dn && now.1 > d2, "no replica has moved");
    within(
        STEP_TIMEOUT,
        "names of moved replicas are withdrawn",
        || gone() > withdrawn,
    );
    for seen in end(client) {
        assert!(seen.failures.is_empty() && seen.local > 0, "{seen:?}");
    }
    let then = bytes_past_datanode(bed, "d2");
    check_past(bed, client, path, bytes);
    assert!(
        bytes_past_datanode(bed, "d2") > then,
        "nothing is read from d2"
    );
}
