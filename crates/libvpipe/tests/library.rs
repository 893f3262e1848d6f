// SPDX-License-Identifier: Apache-2.0
//! The agent sends files when it can; otherwise the program sends them.
#![allow(clippy::unwrap_used)]

#[path = "support/agent.rs"]
mod agent;
#[path = "support/room.rs"]
mod room;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::process::Command;

use agent::Behaviour;
use room::{SIZE, build, connection, ends, errno, file, is_readable, libraries, reader, room};
use vpipe::ffi::{vpipe_begin, vpipe_end, vpipe_file};

#[test]
fn the_agent_sends_and_the_socket_continues() {
    let mut room = room(Behaviour::default());
    let (mut socket, reading) = connection();
    socket.write_all(b"before").unwrap();
    let mut at = 1000;
    assert_eq!(
        file(&room.file, &socket, Some(&mut at), SIZE * 2),
        (SIZE - 1000) as isize
    );
    assert_eq!((at, room.file.stream_position().unwrap()), (SIZE as i64, 0));
    socket.write_all(b"between").unwrap();
    room.file.seek(SeekFrom::Start(500)).unwrap();
    assert_eq!(file(&room.file, &socket, None, 1_000_000), 1_000_000);
    assert_eq!(room.file.stream_position().unwrap(), 1_000_500);
    assert_eq!(room.agent.sent(), (SIZE - 1000 + 1_000_000) as u64);
    // Below the pipe minimum.
    assert_eq!(file(&room.file, &socket, None, 10), 10);
    assert_eq!(room.agent.pipes(), 2);
    drop(socket);
    let parts = [
        b"before",
        &room.bytes[1000..],
        b"between",
        &room.bytes[500..1_000_510],
    ];
    assert!(reading.join().unwrap() == parts.concat());
}

#[test]
fn the_program_sends_what_the_agent_refuses() {
    for errno in [libc::EOPNOTSUPP, libc::EAGAIN] {
        let room = room(Behaviour {
            refuse: Some(errno),
            ..Behaviour::default()
        });
        let (socket, reading) = connection();
        let mut at = 0;
        while at < SIZE as i64 {
            assert!(file(&room.file, &socket, Some(&mut at), SIZE) > 0);
        }
        drop(socket);
        assert!(reading.join().unwrap() == room.bytes);
        assert_eq!((room.agent.sent(), room.agent.programs()), (0, 1));
    }
}

#[test]
fn an_early_end_is_a_partial_count() {
    let room = room(Behaviour {
        end_after: Some(1_500_000),
        ..Behaviour::default()
    });
    let (socket, reading) = connection();
    let mut at = 0;
    assert_eq!(file(&room.file, &socket, Some(&mut at), SIZE), 1_500_000);
    assert_eq!(file(&room.file, &socket, Some(&mut at), SIZE), 1_500_000);
    assert_eq!(
        file(&room.file, &socket, Some(&mut at), SIZE),
        (SIZE - 3_000_000) as isize
    );
    drop(socket);
    assert!(reading.join().unwrap() == room.bytes);
    assert_eq!((room.agent.pipes(), room.agent.sent()), (3, SIZE as u64));
}

#[test]
fn an_agent_that_dies_breaks_the_connection_and_not_the_next_one() {
    let room = room(Behaviour {
        die_after: Some(2 << 20),
        ..Behaviour::default()
    });
    let (socket, reading) = connection();
    let mut at = 0;
    assert_eq!(file(&room.file, &socket, Some(&mut at), SIZE), 2 << 20);
    assert_eq!(file(&room.file, &socket, Some(&mut at), SIZE), -1);
    assert_eq!((errno(), at), (libc::ECONNRESET, 2 << 20));
    drop(socket);
    assert!(reading.join().unwrap() == room.bytes[..2 << 20]);

    let (socket, reading) = connection();
    let mut at = 0;
    while at < SIZE as i64 {
        assert!(file(&room.file, &socket, Some(&mut at), SIZE) > 0);
    }
    drop(socket);
    assert!(reading.join().unwrap() == room.bytes);
}

#[test]
fn a_peer_that_closes_is_an_error() {
    let room = room(Behaviour::default());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    drop(listener.accept().unwrap());
    let mut at = 0;
    let mut last = 1;
    while last > 0 && at < SIZE as i64 {
        last = file(&room.file, &socket, Some(&mut at), SIZE);
    }
    assert_eq!(last, -1);
    assert!([libc::ECONNRESET, libc::EPIPE].contains(&errno()));
}

#[test]
fn everything_else_is_copied() {
    let mut room = room(Behaviour::default());
    let path = room.folder.path().join("copy");

    // From a socket that is not TCP into a file, and from a socket into a socket.
    let (mut socket, reading) = connection();
    let (mut into, mut out) = std::os::unix::net::UnixStream::pair().unwrap();
    into.write_all(&room.bytes[..100_000]).unwrap();
    into.shutdown(std::net::Shutdown::Write).unwrap();
    let copy = File::create(&path).unwrap();
    assert_eq!(file(&out, &copy, None, 60_000), 60_000);
    assert_eq!(file(&out, &socket, None, 60_000), 40_000);
    assert_eq!(file(&out, &socket, Some(&mut 0), 1), -1);
    assert_eq!(errno(), libc::ESPIPE);
    assert!(std::fs::read(&path).unwrap() == room.bytes[..60_000]);
    socket.flush().unwrap();
    drop(socket);
    assert!(reading.join().unwrap() == room.bytes[60_000..100_000]);
    let _ = out.read(&mut [0]);

    // From a file that neither sendfile nor splice accepts.
    let zero = File::open("/dev/zero").unwrap();
    let copy = File::create(&path).unwrap();
    assert_eq!(file(&zero, &copy, None, 300_000), 300_000);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 300_000);
    let end = file(&room.file, &copy, Some(&mut { SIZE as i64 }), 10);
    assert_eq!(end, 0);
    // SAFETY: no offset is passed.
    assert_eq!(unsafe { vpipe_file(-1, 1, std::ptr::null_mut(), 1) }, -1);
    assert_eq!((errno(), room.agent.sent()), (libc::EBADF, 0));
    room.file.rewind().unwrap();
}

#[test]
fn waiting_for_a_completion_does_not_block() {
    let room = room(Behaviour::default());
    let refuse = |errno| Behaviour {
        refuse: Some(errno),
        ..Behaviour::default()
    };
    for behaviour in [
        None,
        Some(refuse(libc::EAGAIN)),
        Some(refuse(libc::EOPNOTSUPP)),
    ] {
        if let Some(behaviour) = behaviour {
            room.agent.set_behaviour(behaviour);
        }
        let (socket, theirs) = ends();
        let completion = vpipe_begin(room.file.as_raw_fd(), socket.as_raw_fd(), 10, SIZE - 10);
        // The transfer cannot end before the peer reads.
        assert!(completion >= 0 && !is_readable(completion, 0));
        let reading = reader(theirs);
        assert!(is_readable(completion, 30_000));
        assert_eq!(vpipe_end(completion), (SIZE - 10) as isize);
        assert_eq!((vpipe_end(completion), errno()), (-1, libc::EBADF));
        drop(socket);
        assert!(reading.join().unwrap() == room.bytes[10..]);
    }
    assert_eq!(room.agent.sent(), (SIZE - 10) as u64);
    let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let completion = vpipe_begin(room.file.as_raw_fd(), theirs.as_raw_fd(), 0, SIZE);
    let mut bytes = vec![0; SIZE];
    ours.read_exact(&mut bytes).unwrap();
    assert!(is_readable(completion, 30_000) && bytes == room.bytes);
    assert_eq!(vpipe_end(completion), SIZE as isize);
}

#[test]
fn a_child_opens_its_own_connection_to_the_agent() {
    let room = room(Behaviour::default());
    let (socket, reading) = connection();
    let mut at = 0;
    assert_eq!(
        file(&room.file, &socket, Some(&mut at), 1_000_000),
        1_000_000
    );
    // SAFETY: the child only calls the library and exits without running handlers.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let sent = file(&room.file, &socket, Some(&mut at), 1_000_000);
        // SAFETY: _exit may always be called.
        unsafe { libc::_exit(i32::from(sent != 1_000_000)) };
    }
    let mut status = 0;
    // SAFETY: the status is an int.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    let mut at = 2_000_000;
    assert_eq!(
        file(&room.file, &socket, Some(&mut at), 1_000_000),
        1_000_000
    );
    assert_eq!((room.agent.programs(), room.agent.pipes()), (2, 3));
    drop(socket);
    assert!(reading.join().unwrap() == room.bytes[..3_000_000]);
}

#[test]
fn a_c_program_sends_a_file_with_either_library() {
    let room = room(Behaviour::default());
    let libraries = libraries();
    for link in ["-l:libvpipe.so", "-l:libvpipe.a"] {
        let program = build("send", room.folder.path(), link);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port().to_string();
        let mut run = Command::new(&program);
        run.arg(room.folder.path().join("file"))
            .args(["127.0.0.1", &port]);
        let mut running = run.env("LD_LIBRARY_PATH", &libraries).spawn().unwrap();
        let mut bytes = Vec::new();
        listener
            .accept()
            .unwrap()
            .0
            .read_to_end(&mut bytes)
            .unwrap();
        assert!(running.wait().unwrap().success() && bytes == room.bytes);
    }
    assert_eq!(room.agent.sent(), 2 * SIZE as u64);
}
