// SPDX-License-Identifier: Apache-2.0
//! While hand-overs are expensive, the library leaves files of a few megabytes to the program and tries them again later. This
//! test has its own binary because the measured cost belongs to the process.
#![allow(clippy::unwrap_used)]

#[path = "support/agent.rs"]
mod agent;

use std::fs::File;
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::Duration;

use agent::{Agent, Behaviour};
use vpipe::ffi::vpipe_file;
use vpipe::threshold::{MAX_MINIMUM_BYTES, MEASUREMENT_LIFETIME};

const MIB: u64 = 1 << 20;

fn send(file: &File, socket: &TcpStream, length: u64) {
    let (mut at, end) = (0, length as i64);
    while at < end {
        let rest = (end - at) as usize;
        // SAFETY: the offset is a local variable.
        let sent = unsafe { vpipe_file(file.as_raw_fd(), socket.as_raw_fd(), &mut at, rest) };
        assert!(sent > 0);
    }
}

#[test]
fn expensive_hand_overs_are_avoided_and_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let behaviour = Behaviour {
        pause: Duration::ZERO,
        hand_over_time: Duration::from_millis(200),
        ..Behaviour::default()
    };
    let agent = Agent::start(&folder.path().join("agent"), behaviour);
    // SAFETY: no other code of this program reads or writes the environment now.
    unsafe {
        std::env::set_var("VIOLA_PIPE_SOCKET", agent.path());
        std::env::remove_var("VIOLA_PIPE_MIN");
    }
    let path = folder.path().join("file");
    std::fs::write(&path, vec![7; MAX_MINIMUM_BYTES as usize]).unwrap();
    let file = File::open(&path).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut far, _) = listener.accept().unwrap();
    let reading = thread::spawn(move || {
        let (mut all, mut piece) = (0, vec![0; 1 << 20]);
        while let Ok(n @ 1..) = far.read(&mut piece) {
            assert!(piece[..n].iter().all(|byte| *byte == 7));
            all += n as u64;
        }
        all
    });
    let large = 8 * MIB;
    for _ in 0..4 {
        send(&file, &socket, large);
    }
    // Without a measurement the library still asks the agent.
    assert_eq!(agent.pipes(), 4);
    for _ in 0..4 {
        send(&file, &socket, MIB);
    }
    send(&file, &socket, large);
    assert_eq!((agent.pipes(), agent.sent()), (4, 4 * large));
    // Files above the maximum of the threshold still use the agent.
    send(&file, &socket, MAX_MINIMUM_BYTES);
    assert_eq!(
        (agent.pipes(), agent.sent()),
        (5, 4 * large + MAX_MINIMUM_BYTES)
    );
    thread::sleep(MEASUREMENT_LIFETIME + Duration::from_millis(100));
    send(&file, &socket, large);
    assert_eq!(
        (agent.pipes(), agent.sent()),
        (6, 5 * large + MAX_MINIMUM_BYTES)
    );
    drop(socket);
    assert_eq!(
        reading.join().unwrap(),
        6 * large + 4 * MIB + MAX_MINIMUM_BYTES
    );
}
