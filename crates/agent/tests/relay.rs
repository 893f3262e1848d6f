// SPDX-License-Identifier: Apache-2.0
//! Blocks over a byte stream through the kernel's FUSE, agent and worker on one host. Needs root and /dev/fuse.
#![allow(clippy::unwrap_used)]

mod worker;

use std::fs::File;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use worker::{Agent, BLOCKS, LENGTH, Namespace, Worker, bytes, read_at, within};

const SERVED: &str = "served by the host";

struct Rig {
    worker: Worker,
    listener: UnixListener,
    stream: std::os::unix::net::UnixStream,
    agent: Agent,
    namespace: Namespace,
    folder: tempfile::TempDir,
}

fn rig(uid: u32) -> Rig {
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("port.sock")).unwrap();
    let worker = Worker::new(uid);
    let namespace = Namespace::new();
    let agent = Agent::start(folder.path(), &namespace);
    let stream = worker.take(&listener);
    agent.wait(SERVED);
    Rig {
        worker,
        listener,
        stream,
        agent,
        namespace,
        folder,
    }
}

impl Rig {
    /// Runs a command in the mount's namespace.
    fn run_as(&self, uid: u32, command: &str) -> std::process::Output {
        let mut inside = self.namespace.command();
        inside.args(["setpriv", "--clear-groups"]);
        inside.args([format!("--reuid={uid}"), format!("--regid={uid}")]);
        inside.args(["sh", "-c", command]).output().unwrap()
    }

    fn cut(&self) {
        self.stream.shutdown(std::net::Shutdown::Both).unwrap();
    }
}

/// Pseudorandom numbers.
struct Dice(u64);

impl Dice {
    fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % most
    }
}

/// Opens a file as the HDFS plug-in does.
fn direct(path: &std::path::Path) -> File {
    let mut options = File::options();
    options.read(true).custom_flags(libc::O_DIRECT);
    options.open(path).unwrap()
}

fn stale_or_io(error: i32) -> bool {
    error == libc::EIO || error == libc::ESTALE
}

#[test]
fn blocks_are_read_byte_for_byte_at_any_place_by_many_at_once() {
    let rig = rig(0);
    let block = |id| rig.agent.block(id);
    assert_eq!(std::fs::metadata(block(3)).unwrap().len(), LENGTH);
    assert_eq!(
        std::fs::read(block(0)).unwrap(),
        bytes(0, 0, LENGTH as usize)
    );
    let meta = block(5).with_file_name("blk_5_1001.meta");
    assert_eq!(std::fs::read(meta).unwrap(), bytes(5, 0, 7));
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let block = &block;
            scope.spawn(move || {
                let mut dice = Dice(0x1234_5678_9abc + thread);
                for _ in 0..60 {
                    let id = dice.below(BLOCKS.into()) as u32;
                    let file = File::open(block(id)).unwrap();
                    for _ in 0..4 {
                        let offset = dice.below(LENGTH + 100);
                        let length = dice.below(300_000) as usize;
                        let got = read_at(&file, offset, length).unwrap();
                        assert!(got == bytes(id, offset, length), "{id} {offset} {length}");
                    }
                }
            });
        }
    });
    // as the HDFS plug-in reads: past the page cache, up to 1 MiB in one request
    let direct = direct(&block(6));
    let before = rig.worker.service.stat().reads;
    let got = read_at(&direct, 1 << 20, 1 << 20).unwrap();
    assert!(got == bytes(6, 1 << 20, 1 << 20));
    let reads = rig.worker.service.stat().reads - before;
    assert!((1..=2).contains(&reads), "{reads} requests for 1 MiB");
    let status = rig.agent.status();
    assert!(status.contains("1 sessions"), "{status}");
}

#[test]
fn the_mount_is_read_only_for_one_user_and_has_what_a_virtio_fs_mount_has() {
    let rig = rig(1000);
    let block = rig.agent.block(1);
    let meta = std::fs::metadata(&block).unwrap();
    assert_eq!((meta.uid(), meta.mode() & 0o777), (1000, 0o400));
    let inside = format!("{}/mnt", rig.folder.path().display());
    std::fs::set_permissions(
        rig.folder.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    let cat = format!("cat {inside}/{}/blk_1_1001 | wc -c", worker::POOL);
    let own = rig.run_as(1000, &cat);
    assert_eq!(
        String::from_utf8_lossy(&own.stdout).trim(),
        LENGTH.to_string()
    );
    let other = rig.run_as(1001, &cat);
    assert_eq!(String::from_utf8_lossy(&other.stdout).trim(), "0");
    assert!(String::from_utf8_lossy(&other.stderr).contains("ermission denied"));
    let code = |result: std::io::Result<File>| result.unwrap_err().raw_os_error().unwrap();
    let write = File::options().write(true).open(&block);
    assert_eq!(code(write), libc::EROFS);
    assert_eq!(code(File::create(rig.agent.mount().join("x"))), libc::EROFS);
    assert_eq!(code(File::open(rig.agent.mount().join("x"))), libc::ENOENT);
    assert_eq!(code(File::open(rig.agent.block(BLOCKS))), libc::ENOENT);
}

#[test]
fn a_stream_cut_under_load_gives_errors_no_wrong_bytes_and_keeps_files_open() {
    let mut rig = rig(0);
    // past the page cache, so that every read is a request
    let files: Vec<File> = (0..BLOCKS).map(|id| direct(&rig.agent.block(id))).collect();
    let (end, whole, failed) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (files, end, whole, failed) = (&files, &end, &whole, &failed);
            scope.spawn(move || {
                let mut dice = Dice(0xfeed_5678_9abc + thread);
                while !end.load(Ordering::SeqCst) {
                    let id = dice.below(BLOCKS.into()) as u32;
                    let (offset, length) = (dice.below(LENGTH), dice.below(900_000) as usize);
                    let began = Instant::now();
                    match read_at(&files[id as usize], offset, length) {
                        Ok(got) => {
                            assert!(got == bytes(id, offset, length), "{id} {offset} {length}");
                            whole.fetch_add(1, Ordering::SeqCst);
                        }
                        Err(error) => {
                            assert_eq!(error, libc::EIO);
                            failed.fetch_add(1, Ordering::SeqCst);
                            std::thread::sleep(Duration::from_millis(5));
                        }
                    }
                    assert!(began.elapsed() < Duration::from_secs(20), "a read has hung");
                }
            });
        }
        for round in 0..8u64 {
            std::thread::sleep(Duration::from_millis(100 + 37 * round));
            let before = failed.load(Ordering::SeqCst);
            rig.cut();
            within("those who wait hear of it", Duration::from_secs(30), || {
                failed.load(Ordering::SeqCst) > before
            });
            rig.stream = rig.worker.take(&rig.listener);
            rig.agent.wait(SERVED);
        }
        let before = whole.load(Ordering::SeqCst);
        within("reads go on", Duration::from_secs(30), || {
            whole.load(Ordering::SeqCst) > before + 8
        });
        end.store(true, Ordering::SeqCst);
    });
    // the same files, opened before all that
    assert_eq!(read_at(&files[2], 5, 5000), Ok(bytes(2, 5, 5000)));
    assert!(rig.agent.status().contains("9 sessions"));
}

/// Drops the file's cached pages, so that the next read asks the host.
fn drop_cache(file: &File) {
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

#[test]
fn another_worker_serves_the_same_mount_and_never_another_files_bytes() {
    let mut rig = rig(0);
    let open: Vec<File> = (0..BLOCKS)
        .map(|id| File::open(rig.agent.block(id)).unwrap())
        .collect();
    for _ in 0..3 {
        // a killed worker: its successor knows none of the kernel's inode numbers
        rig.cut();
        rig.worker = Worker::new(0);
        rig.stream = rig.worker.take(&rig.listener);
        rig.agent.wait(SERVED);
        // cached names are looked up again, in another order than before
        for id in (0..BLOCKS).rev() {
            let file = File::open(rig.agent.block(id)).unwrap();
            assert_eq!(read_at(&file, 70_000, 9000), Ok(bytes(id, 70_000, 9000)));
        }
        for file in &open {
            drop_cache(file);
            let error = read_at(file, 0, 4096).unwrap_err();
            assert!(stale_or_io(error), "{error}");
        }
    }
    let status = rig.agent.status();
    assert!(status.contains("4 sessions"), "{status}");
}

#[test]
fn a_host_that_reads_nothing_blocks_no_reader_forever() {
    let mut rig = rig(0);
    let file = File::open(rig.agent.block(0)).unwrap();
    // a stopped worker: it has its end open and does not read
    rig.cut();
    let (deaf, _) = rig.listener.accept().unwrap();
    let error = read_at(&file, 0, 4096).unwrap_err();
    assert_eq!(error, libc::EIO);
    drop(deaf);
    rig.stream = rig.worker.take(&rig.listener);
    rig.agent.wait(SERVED);
    drop_cache(&file);
    assert_eq!(read_at(&file, 0, 4096), Ok(bytes(0, 0, 4096)));
    // a worker that falls silent within a session; O_DIRECT, since buffered reads would ask twice
    let direct = direct(&rig.agent.block(0));
    let silent = silent_host(&rig);
    rig.agent.wait(SERVED);
    let began = Instant::now();
    let took = loop {
        let each = Instant::now();
        assert_eq!(read_at(&direct, 0, 4096), Err(libc::EIO));
        // until the lost session is noticed, its reads fail at once
        if each.elapsed() > Duration::from_secs(1) || began.elapsed() > Duration::from_secs(20) {
            break each.elapsed();
        }
    };
    assert!(
        took > Duration::from_secs(4) && took < Duration::from_secs(15),
        "{took:?}"
    );
    silent.shutdown(std::net::Shutdown::Both).unwrap();
}

/// Opens sessions, knows the mount, and answers nothing else.
fn silent_host(rig: &Rig) -> std::os::unix::net::UnixStream {
    use std::io::Write;
    use viola_proto::fuse_stream::{FrameKind, FrameReader, Hello, push_frame};
    rig.cut();
    let (mut stream, _) = rig.listener.accept().unwrap();
    let hold = stream.try_clone().unwrap();
    std::thread::spawn(move || {
        let mut frames = FrameReader::from_agent();
        while frames.fill(&mut stream).is_ok_and(|n| n != Some(0)) {
            while let Ok(Some(frame)) = frames.next(false) {
                let mut out = Vec::new();
                match frame.kind {
                    FrameKind::Probe => {
                        push_frame(&mut out, FrameKind::Challenge, 5, &[1, 0, 0, 0])
                    }
                    FrameKind::Hello => {
                        let session = Hello::decode(frame.payload).unwrap().session;
                        push_frame(&mut out, FrameKind::Welcome, session, &[1]);
                    }
                    _ => {}
                }
                if stream.write_all(&out).is_err() {
                    return;
                }
            }
        }
    });
    hold
}

#[test]
fn a_killed_agent_blocks_no_reader_and_the_next_one_mounts_again() {
    let mut rig = rig(0);
    let file = File::open(rig.agent.block(4)).unwrap();
    assert_eq!(read_at(&file, 9, 9), Ok(bytes(4, 9, 9)));
    rustix::process::kill_process(rig.agent.pid(), rustix::process::Signal::KILL).unwrap();
    rig.agent.wait_end();
    drop_cache(&file);
    let error = read_at(&file, 1 << 20, 9).unwrap_err();
    assert!(
        [libc::ENOTCONN, libc::ECONNABORTED].contains(&error),
        "{error}"
    );
    drop(file);
    let mounts = |rig: &Rig| String::from_utf8(rig.run_as(0, "cat /proc/mounts").stdout).unwrap();
    assert_eq!(mounts(&rig).matches("fuse.viola").count(), 1);
    rig.agent = Agent::start(rig.folder.path(), &rig.namespace);
    rig.stream = rig.worker.take(&rig.listener);
    rig.agent.wait(SERVED);
    assert_eq!(mounts(&rig).matches("fuse.viola").count(), 1);
    let file = File::open(rig.agent.block(4)).unwrap();
    assert_eq!(read_at(&file, 9, 9), Ok(bytes(4, 9, 9)));
    // an agent that ends unmounts
    drop(file);
    rustix::process::kill_process(rig.agent.pid(), rustix::process::Signal::TERM).unwrap();
    rig.agent.wait_end();
    assert!(!mounts(&rig).contains("fuse.viola"));
    assert!(!rig.folder.path().join("status.sock").exists());
}

#[test]
fn an_operators_unmount_is_final() {
    let rig = rig(0);
    let inside = rig.folder.path().join("mnt");
    let output = rig.run_as(0, &format!("umount {}", inside.display()));
    assert!(output.status.success(), "{output:?}");
    rig.agent.wait("somebody has unmounted it");
    assert!(File::open(rig.agent.block(1)).is_err());
}
