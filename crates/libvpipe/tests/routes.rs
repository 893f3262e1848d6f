// SPDX-License-Identifier: Apache-2.0
//! Uploads, copies and relays: the agent runs them when it can; otherwise the program does.
#![allow(clippy::unwrap_used)]

#[path = "support/agent.rs"]
mod agent;
#[path = "support/room.rs"]
mod room;

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use agent::Behaviour;
use room::{
    Room, SIZE, build, connection, ends, errno, file, is_readable, libraries, reader, room,
};
use vpipe::ffi::{vpipe_begin, vpipe_end};

/// A connection whose peer sends `bytes` and then, if asked, closes its side.
fn speaker(bytes: Vec<u8>, ends_after: bool) -> (TcpStream, JoinHandle<TcpStream>) {
    let (theirs, ours) = ends();
    (ours, speak(theirs, bytes, ends_after))
}

/// A peer that sends `bytes` and then, if asked, closes its side.
fn speak(mut theirs: TcpStream, bytes: Vec<u8>, ends: bool) -> JoinHandle<TcpStream> {
    thread::spawn(move || {
        let said = theirs.write_all(&bytes);
        if ends && said.is_ok() {
            theirs.shutdown(Shutdown::Write).unwrap();
        }
        theirs
    })
}

/// A new file for each call, because the library remembers by file what the agent refused.
fn new_file(room: &Room) -> File {
    static LAST: AtomicU32 = AtomicU32::new(0);
    let number = LAST.fetch_add(1, Ordering::Relaxed);
    let path = room.folder.path().join(format!("new {number}"));
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
        .unwrap()
}

fn content(file: &mut File) -> Vec<u8> {
    let mut bytes = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut bytes).unwrap();
    bytes
}

fn refusing(errno: i32) -> Behaviour {
    Behaviour {
        refuse: Some(errno),
        ..Behaviour::default()
    }
}

#[test]
fn an_upload_is_written_at_the_files_offset() {
    let room = room(Behaviour::default());
    for nonblocking in [false, true] {
        let (mut socket, speaking) = speaker([&room.bytes[..], b"after"].concat(), false);
        socket.set_nonblocking(nonblocking).unwrap();
        let mut new = new_file(&room);
        new.write_all(b"before").unwrap();
        assert_eq!(file(&socket, &new, None, SIZE), SIZE as isize);
        assert_eq!(new.stream_position().unwrap(), 6 + SIZE as u64);
        let after = &mut [0; 5];
        let theirs = speaking.join().unwrap();
        socket.set_nonblocking(false).unwrap();
        socket.read_exact(after).unwrap();
        assert_eq!(after, b"after");
        // The connection works in both directions.
        drop(theirs);
        assert!(content(&mut new) == [b"before", &room.bytes[..]].concat());
        let at = Some(&mut 0_i64);
        assert_eq!((file(&socket, &new, at, SIZE), errno()), (-1, libc::ESPIPE));
    }
    assert_eq!(
        (room.agent.pipes(), room.agent.sent()),
        (2, 2 * SIZE as u64)
    );
}

#[test]
fn the_end_of_an_upload_is_a_partial_count() {
    let room = room(Behaviour::default());
    let (socket, speaking) = speaker(room.bytes.clone(), true);
    let mut new = new_file(&room);
    assert_eq!(file(&socket, &new, None, 2 * SIZE), SIZE as isize);
    // The library does not ask the agent for a transfer that cannot happen.
    assert_eq!(file(&socket, &new, None, SIZE), 0);
    assert_eq!((room.agent.pipes(), room.agent.refused()), (1, 0));
    drop(speaking.join().unwrap());
    assert!(content(&mut new) == room.bytes);
}

#[test]
fn a_file_that_is_appended_to_is_written_by_the_program() {
    let room = room(Behaviour::default());
    let path = room.folder.path().join("log");
    std::fs::write(&path, "before").unwrap();
    let log = OpenOptions::new().append(true).open(&path).unwrap();
    let (socket, speaking) = speaker(room.bytes.clone(), true);
    assert_eq!(file(&socket, &log, None, SIZE), SIZE as isize);
    drop(speaking.join().unwrap());
    assert!(std::fs::read(&path).unwrap() == [b"before", &room.bytes[..]].concat());
    assert_eq!(room.agent.programs(), 0);
}

#[test]
fn a_copy_moves_what_copy_file_range_moves() {
    let mut room = room(Behaviour::default());
    let mut new = new_file(&room);
    new.write_all(b"before").unwrap();
    let mut at = 1000;
    let some = 3_000_000;
    assert_eq!(file(&room.file, &new, Some(&mut at), some), some as isize);
    assert_eq!((at, room.file.stream_position().unwrap()), (3_001_000, 0));
    assert_eq!(new.stream_position().unwrap(), 3_000_006);
    room.file.seek(SeekFrom::Start(3_001_000)).unwrap();
    assert_eq!(
        file(&room.file, &new, None, usize::MAX / 4),
        (SIZE - 3_001_000) as isize
    );
    assert_eq!(room.file.stream_position().unwrap(), SIZE as u64);
    assert_eq!(file(&room.file, &new, None, SIZE), 0);
    assert_eq!(
        (room.agent.pipes(), room.agent.sent()),
        (2, SIZE as u64 - 1000)
    );
    assert!(content(&mut new) == [b"before", &room.bytes[1000..]].concat());
    // The agent is not asked to copy a file into itself.
    let mut both = new_file(&room);
    both.write_all(&room.bytes).unwrap();
    both.seek(SeekFrom::End(0)).unwrap();
    assert_eq!(file(&both, &both, Some(&mut 0), 1_000_000), 1_000_000);
    assert_eq!(room.agent.pipes(), 2);
}

#[test]
fn a_relay_returns_both_connections() {
    let room = room(Behaviour::default());
    for nonblocking in [false, true] {
        let (mut source, speaking) = speaker([&room.bytes[..], b"after"].concat(), false);
        let (mut sink, reading) = connection();
        source.set_nonblocking(nonblocking).unwrap();
        sink.set_nonblocking(nonblocking).unwrap();
        sink.write_all(b"before").unwrap();
        assert_eq!(file(&source, &sink, None, SIZE), SIZE as isize);
        source.set_nonblocking(false).unwrap();
        let mut after = [0; 5];
        source.read_exact(&mut after).unwrap();
        sink.write_all(&after).unwrap();
        source.write_all(b"thanks").unwrap();
        drop(sink);
        let parts = [b"before", &room.bytes[..], b"after"];
        assert!(reading.join().unwrap() == parts.concat());
        let mut thanks = [0; 6];
        speaking.join().unwrap().read_exact(&mut thanks).unwrap();
        assert_eq!(&thanks, b"thanks");
    }
    assert_eq!(
        (room.agent.pipes(), room.agent.sent()),
        (2, 2 * SIZE as u64)
    );
}

#[test]
fn a_lost_sink_is_an_error_of_the_sink_and_the_source_continues() {
    let room = room(Behaviour::default());
    let (mut source, speaking) = speaker([&room.bytes[..], &room.bytes].concat(), false);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let sink = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut theirs, _) = listener.accept().unwrap();
    let reading = thread::spawn(move || {
        theirs.read_exact(&mut vec![0; 1_500_000]).unwrap();
    });
    let moved = file(&source, &sink, None, 2 * SIZE);
    reading.join().unwrap();
    assert!((1_500_000..2 * SIZE as isize).contains(&moved), "{moved}");
    // The source is free for another transfer.
    source
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    source.read_exact(&mut [0; 1000]).unwrap();
    let (other, _reading) = connection();
    assert!(file(&source, &other, None, 500_000) > 0);
    let before = room.agent.pipes();
    assert_eq!(file(&source, &sink, None, SIZE), -1);
    assert!([libc::ECONNRESET, libc::EPIPE].contains(&errno()));
    assert_eq!(room.agent.pipes(), before);
    drop(source);
    let _ = speaking.join();
}

#[test]
fn the_program_does_what_is_refused_and_does_not_ask_again_at_once() {
    for errno in [libc::EOPNOTSUPP, libc::EAGAIN] {
        let room = room(refusing(errno));
        let all = |from: &dyn AsRawFd, to: &dyn AsRawFd| {
            let mut done = 0;
            while done < SIZE {
                let n = file(&from.as_raw_fd(), &to.as_raw_fd(), None, SIZE - done);
                assert!(n > 0, "{}", room::errno());
                done += n as usize;
            }
        };
        let mut new = new_file(&room);
        let (socket, speaking) = speaker([&room.bytes[..], &room.bytes].concat(), false);
        all(&socket, &new);
        assert!(content(&mut new) == room.bytes);
        let (sink, reading) = connection();
        all(&socket, &sink);
        drop((sink, speaking.join().unwrap()));
        assert!(reading.join().unwrap() == room.bytes);
        let mut source = room.file.try_clone().unwrap();
        let mut new = new_file(&room);
        let half = file(&source, &new, None, SIZE / 2);
        assert_eq!(half, (SIZE / 2) as isize);
        assert_eq!(file(&source, &new, None, SIZE), SIZE as isize - half);
        assert!(content(&mut new) == room.bytes);
        source.rewind().unwrap();
        assert_eq!((room.agent.refused(), room.agent.sent()), (3, 0));
    }
}

#[test]
fn a_dead_agent_is_an_error_and_the_program_does_the_next_transfer() {
    let room = room(Behaviour {
        die_after: Some(2 << 20),
        ..Behaviour::default()
    });
    let (socket, speaking) = speaker(room.bytes.clone(), false);
    let mut new = new_file(&room);
    let moved = file(&socket, &new, None, SIZE);
    assert!(moved >= 2 << 20);
    assert_eq!(file(&socket, &new, None, SIZE), -1);
    assert_eq!(errno(), libc::ECONNRESET);
    drop(socket);
    let _ = speaking.join();
    assert!(content(&mut new) == room.bytes[..moved as usize]);
    let mut at = 0;
    let mut new = new_file(&room);
    while at < SIZE as i64 {
        assert!(file(&room.file, &new, Some(&mut at), SIZE) > 0);
    }
    assert!(content(&mut new) == room.bytes);
}

#[test]
fn an_agent_that_dies_while_it_copies_is_an_error() {
    let room = room(Behaviour {
        die_after: Some(2 << 20),
        ..Behaviour::default()
    });
    let new = new_file(&room);
    let mut at = 0;
    assert_eq!(file(&room.file, &new, Some(&mut at), SIZE), -1);
    assert_eq!((errno(), at), (libc::EIO, 0));
}

#[test]
fn waiting_for_uploads_copies_and_relays_does_not_block() {
    let room = room(Behaviour::default());
    let begin = |from: &dyn AsRawFd, to: &dyn AsRawFd, offset| {
        let completion = vpipe_begin(from.as_raw_fd(), to.as_raw_fd(), offset, SIZE);
        assert!(completion >= 0);
        completion
    };
    let end = |completion| {
        assert!(is_readable(completion, 30_000));
        vpipe_end(completion)
    };
    for behaviour in [None, Some(refusing(libc::EOPNOTSUPP))] {
        if let Some(behaviour) = behaviour {
            room.agent.set_behaviour(behaviour);
        }
        // The transfer cannot end before the peer sends.
        let (theirs, socket) = ends();
        let mut new = new_file(&room);
        let upload = begin(&socket, &new, 0);
        assert!(!is_readable(upload, 0));
        let speaking = speak(theirs, [&room.bytes[..], &room.bytes].concat(), false);
        assert_eq!(end(upload), SIZE as isize);
        assert_eq!(new.stream_position().unwrap(), SIZE as u64);
        assert!(content(&mut new) == room.bytes);
        // It cannot end before the peer reads, either.
        let (sink, theirs) = ends();
        let relay = begin(&socket, &sink, 0);
        assert!(!is_readable(relay, 0));
        let reading = reader(theirs);
        assert_eq!(end(relay), SIZE as isize);
        assert_eq!(vpipe_begin(socket.as_raw_fd(), sink.as_raw_fd(), 1, 1), -1);
        assert_eq!(errno(), libc::ESPIPE);
        drop((sink, speaking.join().unwrap()));
        assert!(reading.join().unwrap() == room.bytes);
        if behaviour.is_none() {
            room.agent.set_behaviour(Behaviour {
                piece: SIZE as u64,
                pause: Duration::from_secs(1),
                ..Behaviour::default()
            });
        }
        let mut new = new_file(&room);
        let copy = begin(&room.file, &new, 10);
        assert!(behaviour.is_some() || !is_readable(copy, 0));
        assert_eq!(end(copy), SIZE as isize - 10);
        assert!(content(&mut new) == room.bytes[10..]);
    }
    assert_eq!(room.agent.pipes(), 3);
}

/// A listening program that ends with the test.
struct Running(Child);

impl Running {
    fn start(room: &Room, example: &str, arguments: &[&str], port: u16) -> Self {
        let program = build(example, room.folder.path(), "-l:libvpipe.so");
        let mut run = Command::new(program);
        run.args(arguments).env("LD_LIBRARY_PATH", libraries());
        let running = Self(run.spawn().unwrap());
        let begun = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(20));
            thread::sleep(Duration::from_millis(10));
        }
        running
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

#[test]
fn the_example_of_uploads() {
    let room = room(Behaviour::default());
    let port = free_port();
    let at = room.folder.path().join("uploads");
    let _ = std::fs::remove_dir_all(&at);
    std::fs::create_dir(&at).unwrap();
    let arguments = [at.to_str().unwrap(), "127.0.0.1", &port.to_string()];
    let _running = Running::start(&room, "upload", &arguments, port);
    let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
    for (number, with_agent) in [(1, true), (2, true), (3, false)] {
        if !with_agent {
            room.agent.kill();
        }
        client.write_all(&(SIZE as u64).to_be_bytes()).unwrap();
        client.write_all(&room.bytes).unwrap();
        let mut answer = [0; 8];
        client.read_exact(&mut answer).unwrap();
        assert_eq!(u64::from_be_bytes(answer), SIZE as u64);
        let file = std::fs::read(at.join(number.to_string())).unwrap();
        assert!(file == room.bytes);
    }
    assert_eq!(
        (room.agent.pipes(), room.agent.sent()),
        (2, 2 * SIZE as u64)
    );
}

#[test]
fn the_example_of_backups() {
    let room = room(Behaviour::default());
    let program = build("backup", room.folder.path(), "-l:libvpipe.so");
    for with_agent in [true, false] {
        if !with_agent {
            room.agent.kill();
        }
        let copy = room.folder.path().join("backup of file");
        let mut run = Command::new(&program);
        run.arg(room.folder.path().join("file")).arg(&copy);
        let done = run.env("LD_LIBRARY_PATH", libraries()).output().unwrap();
        assert!(done.status.success());
        assert_eq!(String::from_utf8_lossy(&done.stderr), format!("{SIZE}\n"));
        assert!(std::fs::read(&copy).unwrap() == room.bytes);
        std::fs::remove_file(&copy).unwrap();
    }
    assert_eq!((room.agent.pipes(), room.agent.sent()), (1, SIZE as u64));
}

#[test]
fn the_example_of_proxies() {
    let room = room(Behaviour::default());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let behind = listener.local_addr().unwrap().port().to_string();
    let bytes = room.bytes.clone();
    thread::spawn(move || {
        for server in listener.incoming() {
            let (mut server, bytes) = (server.unwrap(), bytes.clone());
            thread::spawn(move || {
                while server.read_exact(&mut [0; 4]).is_ok() {
                    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {SIZE}\r\n\r\n");
                    server.write_all(head.as_bytes()).unwrap();
                    server.write_all(&bytes).unwrap();
                }
            });
        }
    });
    let port = free_port();
    let arguments = [&port.to_string(), "127.0.0.1", &behind];
    let _running = Running::start(&room, "proxy", &arguments, port);
    let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
    for with_agent in [true, true, false] {
        if !with_agent {
            room.agent.kill();
        }
        client.write_all(b"GET.").unwrap();
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {SIZE}\r\n\r\n");
        let mut answer = vec![0; head.len() + SIZE];
        client.read_exact(&mut answer).unwrap();
        assert!(answer == [head.as_bytes(), &room.bytes].concat());
    }
    assert_eq!(room.agent.pipes(), 2);
}
