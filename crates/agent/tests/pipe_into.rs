// SPDX-License-Identifier: Apache-2.0
//! Files that the host writes past the file system: real sockets, a real ext4, the agent's own program.
#![allow(clippy::unwrap_used)]

mod bed;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use rustix::fs::{FallocateFlags, IFlags, fallocate, ioctl_getflags, ioctl_setflags};
use viola_proto::agent::FileMap;
use viola_proto::pipe::library::{LibraryReply, LibraryRequest, LostConnections};
use viola_proto::pipe::{Endpoint, PipeId, PipeReply, PipeRequest};

use bed::Bed;
use bed::files::{bytes, is_clean, is_fixed, new};
use bed::handover::{extract_one, hold, over, release, restore_one};

/// Number of bytes that can be read.
fn readable(stream: &TcpStream) -> u64 {
    rustix::io::ioctl_fionread(stream).unwrap()
}

/// An upload that was handed to the host.
struct Given {
    pipe: PipeId,
    socket: TcpStream,
    map: FileMap,
    offset: u64,
    length: u64,
}

fn given(bed: &Bed) -> Given {
    match bed.host.hear() {
        PipeRequest::Start {
            pipe,
            source,
            sink: Endpoint::File { map, offset, .. },
            length,
        } => Given {
            pipe,
            socket: restore_one(bed, source).into(),
            map,
            offset,
            length,
        },
        other => panic!("{other:?}"),
    }
}

impl Given {
    /// Moves at most `max_pipes` bytes from the connection to the disk; returns how many.
    fn work(&mut self, bed: &Bed, most: u64) -> u64 {
        let (mut sent, most) = (0, most.min(self.length));
        let mut piece = vec![0; 60_001];
        while sent < most {
            let want = piece.len().min((most - sent) as usize);
            let got = self.socket.read(&mut piece[..want]).unwrap();
            if got == 0 {
                break;
            }
            bed.host.write(&self.map, self.offset + sent, &piece[..got]);
            sent += got as u64;
        }
        sent
    }

    fn return_connection(self, bed: &Bed, server: &TcpStream, sent: u64) {
        let port = server.local_addr().unwrap().port();
        let source = Some(extract_one(bed, self.socket.into(), port));
        let pipe = self.pipe;
        bed.host.say(PipeReply::Finished {
            pipe,
            source,
            sink: None,
            sent,
            errno: 0,
            host_us: 0,
        });
        assert_eq!(bed.host.hear(), PipeRequest::Restored { pipe });
        release(bed, port);
    }
}

fn receive(id: u64, offset: u64, length: u64) -> LibraryRequest {
    LibraryRequest::Receive { id, offset, length }
}

#[test]
fn uploads_are_right_at_every_offset() {
    let bed = Bed::full();
    let program = bed.program();
    let (client, server) = bed.connection();
    // the old file: (offset of a byte, bytes), its size; the upload: offset, length, and bytes before it is held
    type Old<'a> = &'a [(u64, usize)];
    let cases: [(Old<'_>, u64, u64, u64, usize); 7] = [
        (&[], 0, 0, 1_000_000, 0),
        (&[], 0, 0, 9_500_001, 40_000),
        (&[(0, 100_000)], 100_000, 12_345, 55_555, 0),
        (&[(0, 100_000)], 100_000, 99_001, 500_000, 7),
        (
            &[(0, 5000), (300_000, 5000)],
            400_000,
            4097,
            390_001,
            10_000,
        ),
        (&[(0, 5001)], 5001, 70_001, 100, 0),
        (&[], 300_000, 100_003, 50_000, 50),
    ];
    for (n, (old, size, offset, length, early)) in cases.into_iter().enumerate() {
        let id = n as u64 + 1;
        let path = bed.path("srv").join(format!("upload{n}"));
        let file = new(&path);
        for (at, count) in old {
            file.write_all_at(&bytes(*count), *at).unwrap();
        }
        file.set_len(size).unwrap();
        let mut wanted = std::fs::read(&path).unwrap();
        let end = (offset + length) as usize;
        wanted.resize(wanted.len().max(end), 0);
        let body = bytes(length as usize);
        wanted[offset as usize..end].copy_from_slice(&body);

        (&client).write_all(&body[..early]).unwrap();
        bed.wait("it has come", |_| readable(&server) == early as u64);
        program.request(receive(id, offset, length), &server, &file);
        let pipe = hold(&bed);
        let mut given = given(&bed);
        assert_eq!((given.pipe, given.length), (pipe, length - early as u64));
        assert!(is_fixed(&path));
        let rest = body[early..].to_vec();
        let mut to = client.try_clone().unwrap();
        let sender = std::thread::spawn(move || {
            to.write_all(&rest).unwrap();
            to.write_all(b"next").unwrap();
        });
        // a reader caches the old bytes meanwhile, and must not see them afterwards
        let _ = std::fs::read(&path).unwrap();
        let sent = given.work(&bed, u64::MAX);
        assert_eq!(sent, given.length);
        let _ = std::fs::read(&path).unwrap();
        sender.join().unwrap();
        given.return_connection(&bed, &server, sent);
        assert_eq!(program.end(), over(id, length, LostConnections::NONE));
        let is = std::fs::read(&path).unwrap();
        assert_eq!(is.len(), wanted.len(), "{n}");
        assert!(is == wanted, "{n}: other bytes");
        assert!(!is_fixed(&path) && is_clean(&bed));
        // and with O_DIRECT
        sync(&file);
        let mut direct = Vec::new();
        (&file).seek(SeekFrom::Start(0)).unwrap();
        (&file).read_to_end(&mut direct).unwrap();
        assert!(direct == wanted, "{n}: other bytes on the disk");
        let mut next = [0; 4];
        (&server).read_exact(&mut next).unwrap();
        assert_eq!(&next, b"next");
        drop(file);
        std::fs::remove_file(&path).unwrap();
    }
    let status = bed.status();
    let all: u64 = cases.iter().map(|case| case.3).sum();
    assert_eq!((status.pipes, status.bytes), (cases.len() as u64, all));
}

/// Syncs a file and drops its cached pages.
fn sync(file: &File) {
    file.sync_all().unwrap();
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

#[test]
fn nobody_changes_the_file_while_the_host_writes_to_it() {
    let bed = Bed::full();
    let program = bed.program();
    let (_client, server) = bed.connection();
    let path = bed.path("srv/upload");
    let file = new(&path);
    file.write_all_at(&bytes(50_000), 0).unwrap();
    program.request(receive(1, 10, 80_000), &server, &file);
    hold(&bed);
    let given = given(&bed);
    let eperm = |result: std::io::Result<()>| {
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EPERM));
    };
    let other = bed.path("srv/other");
    std::fs::write(&other, b"other").unwrap();
    // a descriptor that was open before
    eperm(file.write_all_at(b"x", 20));
    eperm(file.set_len(20));
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    eperm(fallocate(&file, punch, 0, 4096).map_err(Into::into));
    eperm(fallocate(&file, FallocateFlags::empty(), 0, 1 << 20).map_err(Into::into));
    eperm(std::fs::remove_file(&path));
    eperm(std::fs::rename(&other, &path));
    eperm(std::fs::rename(&path, bed.path("srv/away")));
    eperm(File::options().write(true).open(&path).map(drop));
    // nor can another pipe
    let (_client, second) = bed.connection();
    program.request(receive(2, 0, 10), &second, &file);
    let errno = libc::EAGAIN;
    assert_eq!(program.end(), LibraryReply::Refused { id: 2, errno });
    given.return_connection(&bed, &server, 0);
    assert_eq!(program.end(), over(1, 0, LostConnections::NONE));
    assert!(std::fs::read(&path).unwrap() == bytes(50_000));
    file.write_all_at(b"x", 20).unwrap();
    std::fs::rename(&other, &path).unwrap();
}

#[test]
fn an_upload_that_ends_early_leaves_its_first_bytes() {
    let bed = Bed::full();
    let program = bed.program();
    let (mut client, server) = bed.connection();
    let path = bed.path("srv/upload");
    let file = new(&path);
    let body = bytes(500_000);
    // stopped while the host has it
    client.write_all(&body[..3000]).unwrap();
    bed.wait("it has come", |_| readable(&server) == 3000);
    program.request(receive(1, 1000, 1_000_000), &server, &file);
    hold(&bed);
    let mut one = given(&bed);
    client.write_all(&body[3000..200_000]).unwrap();
    let sent = one.work(&bed, 197_000);
    program.ask(LibraryRequest::Stop { id: 1 });
    let pipe = one.pipe;
    assert_eq!(bed.host.hear(), PipeRequest::Stop { pipe });
    one.return_connection(&bed, &server, sent);
    assert_eq!(program.end(), over(1, 200_000, LostConnections::NONE));
    let is = std::fs::read(&path).unwrap();
    assert!(is.len() == 201_000 && is[1000..] == body[..200_000] && is[..1000] == [0; 1000]);
    // everything arrives before the host gets it: the agent writes it
    client.write_all(&body[200_000..230_000]).unwrap();
    bed.wait("it has come", |_| readable(&server) == 30_000);
    program.request(receive(2, 201_000, 30_000), &server, &file);
    let pipe = hold(&bed);
    assert_eq!(bed.host.hear(), PipeRequest::Stop { pipe });
    release(&bed, server.local_addr().unwrap().port());
    assert_eq!(program.end(), over(2, 30_000, LostConnections::NONE));
    assert!(std::fs::read(&path).unwrap()[1000..] == body[..230_000]);
    // the peer ends
    client.write_all(&body[230_000..240_000]).unwrap();
    bed.wait("it has come", |_| readable(&server) == 10_000);
    program.request(receive(3, 231_000, 300_000), &server, &file);
    hold(&bed);
    let mut three = given(&bed);
    client.write_all(&body[240_000..]).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let sent = three.work(&bed, u64::MAX);
    three.return_connection(&bed, &server, sent);
    assert_eq!(program.end(), over(3, 270_000, LostConnections::NONE));
    assert!(std::fs::read(&path).unwrap()[1000..] == body[..]);
    assert_eq!((&server).read(&mut [0; 1]).unwrap(), 0);
    assert!(!is_fixed(&path) && is_clean(&bed));
}

#[test]
fn a_stop_during_preparation_is_immediate() {
    let bed = Bed::full();
    let program = bed.program();
    let (_client, server) = bed.connection();
    let path = bed.path("srv/upload");
    let file = new(&path);
    file.write_all_at(&bytes(5000), 0).unwrap();
    for id in 1..=3 {
        program.request(receive(id, 4000, 40 << 20), &server, &file);
        program.ask(LibraryRequest::Stop { id });
        assert_eq!(program.end(), over(id, 0, LostConnections::NONE));
        assert!(!is_fixed(&path) && is_clean(&bed));
        assert!(std::fs::read(&path).unwrap() == bytes(5000));
    }
}

#[test]
fn a_gone_program_or_a_refusing_host_leaves_the_file_as_it_was() {
    let bed = Bed::full();
    let (_client, server) = bed.connection();
    let path = bed.path("srv/upload");
    let file = new(&path);
    file.write_all_at(&bytes(5000), 0).unwrap();
    let program = bed.program();
    program.request(receive(1, 5000, 100_000), &server, &file);
    let PipeRequest::Hold { pipe, .. } = bed.host.hear() else {
        panic!("not held");
    };
    assert!(is_fixed(&path));
    let why = "no".to_owned();
    bed.host.say(PipeReply::Refused { pipe, why });
    let errno = libc::EAGAIN;
    assert_eq!(program.end(), LibraryReply::Refused { id: 1, errno });
    assert!(!is_fixed(&path) && is_clean(&bed));
    assert!(std::fs::read(&path).unwrap() == bytes(5000));
    // gone while the source is held
    program.request(receive(2, 5000, 100_000), &server, &file);
    let PipeRequest::Hold { pipe, .. } = bed.host.hear() else {
        panic!("not held");
    };
    drop(program);
    assert_eq!(bed.host.hear(), PipeRequest::Stop { pipe });
    bed.wait("it is let go", |bed| is_clean(bed) && !is_fixed(&path));
    assert!(std::fs::read(&path).unwrap() == bytes(5000));
    // gone while the host has it
    let program = bed.program();
    program.request(receive(3, 5000, 100_000), &server, &file);
    hold(&bed);
    let given = given(&bed);
    drop(program);
    let pipe = given.pipe;
    assert_eq!(bed.host.hear(), PipeRequest::Reset { pipe });
    assert!(is_fixed(&path), "the host may still write");
    bed.host.write(&given.map, given.offset, &bytes(50));
    let (source, sink) = (None, None);
    let (sent, errno) = (50, libc::ECONNRESET);
    bed.host.say(PipeReply::Finished {
        pipe,
        source,
        sink,
        sent,
        errno,
        host_us: 0,
    });
    bed.wait("it is let go", |bed| is_clean(bed) && !is_fixed(&path));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 5050);
}

#[test]
fn a_file_stays_immutable_until_no_host_can_write_it() {
    let mut bed = Bed::full();
    let (_client, server) = bed.connection();
    let path = bed.path("srv/upload");
    let file = new(&path);
    file.write_all_at(&bytes(5000), 0).unwrap();
    // the session ends: immutable until the next one
    let program = bed.program();
    program.request(receive(1, 5000, 100_000), &server, &file);
    hold(&bed);
    let one = given(&bed);
    let pipe = one.pipe;
    bed.host.write(&one.map, one.offset, &bytes(70));
    bed.host.say(PipeReply::Progress { pipe, sent: 70 });
    assert_eq!(
        program.answer(),
        Some(LibraryReply::Progress { id: 1, sent: 70 })
    );
    bed.host.hang_up();
    bed.wait("the socket is reset", |_| (&server).write(b"x").is_err());
    assert!(is_fixed(&path));
    bed.begin_session();
    let (source, sink) = (true, false);
    assert_eq!(program.end(), over(1, 70, LostConnections { source, sink }));
    assert!(!is_fixed(&path) && is_clean(&bed));
    assert!(std::fs::read(&path).unwrap() == [bytes(5000), bytes(70)].concat());

    // the agent is killed: immutable until the next one has a session
    let (_client, server) = bed.connection();
    program.request(receive(2, 5070, 100_000), &server, &file);
    hold(&bed);
    let two = given(&bed);
    bed.host.write(&two.map, two.offset, &bytes(100));
    bed.kill_agent();
    assert!(is_fixed(&path) && !is_clean(&bed));
    bed.host.hang_up();
    bed.start_agent();
    bed.wait("it answers", |bed| bed.is_there());
    assert!(is_fixed(&path), "the host may still write");
    bed.begin_session();
    bed.wait("it is let go", is_clean);
    assert!(!is_fixed(&path));
    assert!(std::fs::read(&path).unwrap() == [bytes(5000), bytes(70)].concat());
    // a deleted file delays nothing
    let program = bed.program();
    let (_client, server) = bed.connection();
    program.request(receive(3, 5070, 100_000), &server, &file);
    hold(&bed);
    let _three = given(&bed);
    bed.kill_agent();
    ioctl_setflags(&file, ioctl_getflags(&file).unwrap() - IFlags::IMMUTABLE).unwrap();
    std::fs::remove_file(&path).unwrap();
    drop(file);
    bed.host.hang_up();
    bed.start_agent();
    bed.begin_session();
    bed.wait("it is forgotten", is_clean);
}

#[test]
fn files_that_the_host_cannot_write_are_refused() {
    let bed = Bed::full();
    let program = bed.program();
    let (_client, server) = bed.connection();
    let path = bed.path("srv/upload");
    let open = |options: &mut std::fs::OpenOptions| options.open(&path).unwrap();
    let file = new(&path);
    file.write_all_at(&bytes(100_000), 0).unwrap();
    let mut id = 0;
    let mut refused = |file: &File, part: (u64, u64), errno: i32, what: &str| {
        id += 1;
        program.request(receive(id, part.0, part.1), &server, file);
        assert_eq!(program.end(), LibraryReply::Refused { id, errno }, "{what}");
    };
    let never = libc::EOPNOTSUPP;
    let some = (0, 9000);
    refused(&open(File::options().read(true)), some, never, "to be read");
    refused(&open(File::options().append(true)), some, never, "append");
    let by_path = open(File::options().read(true).custom_flags(libc::O_PATH));
    refused(&by_path, some, never, "by its path");
    let null = File::options().write(true).open("/dev/null").unwrap();
    refused(&null, some, never, "no file");
    let elsewhere = new(&bed.path("elsewhere"));
    refused(&elsewhere, some, never, "not of [pipe] into");
    refused(&file, (0, 0), libc::EINVAL, "no bytes");
    refused(&file, (u64::MAX, 2), libc::EINVAL, "bytes that cannot be");
    // more than there is room for: nothing is left of it
    refused(&file, (50_000, 1 << 30), libc::EAGAIN, "no room");
    assert_eq!(file.metadata().unwrap().len(), 100_000);
    // files that a write may change but the host may not
    let flags = ioctl_getflags(&file).unwrap();
    ioctl_setflags(&file, flags | IFlags::APPEND).unwrap();
    refused(&file, some, never, "append only");
    ioctl_setflags(&file, flags).unwrap();
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(PermissionsExt::from_mode(0o4755))
        .unwrap();
    refused(&file, some, never, "set-uid");
    file.set_permissions(PermissionsExt::from_mode(0o644))
        .unwrap();
    let map = Mapped::new(&file);
    refused(&file, some, never, "mapped");
    assert_eq!(map.first(), bytes(1)[0]);
    drop(map);
    ioctl_setflags(&file, flags | IFlags::IMMUTABLE).unwrap();
    refused(&file, some, never, "immutable");
    assert!(is_fixed(&path), "it is not ours to be let go");
    ioctl_setflags(&file, flags).unwrap();
    assert!(is_clean(&bed) && bed.host.is_quiet());
    assert!(std::fs::read(&path).unwrap() == bytes(100_000));
}

/// A file's first page, mapped by a program.
struct Mapped(*mut libc::c_void);

impl Mapped {
    fn new(file: &File) -> Self {
        // SAFETY: a mapping of its own, for reading.
        let at = unsafe {
            let (read, shared) = (libc::PROT_READ, libc::MAP_SHARED);
            libc::mmap(
                std::ptr::null_mut(),
                4096,
                read,
                shared,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(at, libc::MAP_FAILED);
        let map = Self(at);
        map.first();
        map
    }

    fn first(&self) -> u8 {
        // SAFETY: the mapping has a page.
        unsafe { self.0.cast::<u8>().read_volatile() }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: nobody has a reference into it.
        unsafe { libc::munmap(self.0, 4096) };
    }
}

#[test]
fn a_program_that_maps_the_file_meanwhile_sees_what_the_host_has_written() {
    let bed = Bed::full();
    let program = bed.program();
    let (mut client, server) = bed.connection();
    let path = bed.path("srv/upload");
    let file = new(&path);
    program.request(receive(1, 0, 20_000), &server, &file);
    hold(&bed);
    let mut given = given(&bed);
    let map = Mapped::new(&File::open(&path).unwrap());
    assert_eq!(map.first(), 0);
    client.write_all(&bytes(20_000)).unwrap();
    let sent = given.work(&bed, u64::MAX);
    given.return_connection(&bed, &server, sent);
    assert_eq!(program.end(), over(1, 20_000, LostConnections::NONE));
    assert_eq!(map.first(), bytes(1)[0]);
    assert!(std::fs::read(&path).unwrap() == bytes(20_000));
    sync(&file);
    assert!(std::fs::read(&path).unwrap() == bytes(20_000));
}
