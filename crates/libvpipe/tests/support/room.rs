// SPDX-License-Identifier: Apache-2.0
//! An agent, a file, connections, and the compiler's settings for the C examples.
#![allow(dead_code)]

use std::fs::File;
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vpipe::ffi::vpipe_file;

use crate::agent::{Agent, Behaviour};

pub const SIZE: usize = 4_000_003;

/// The library reads its settings once, so all tests share one path and run one after the other.
static FOLDER: LazyLock<Mutex<tempfile::TempDir>> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    // SAFETY: every test begins here and waits for this initializer, so no other test uses the environment now.
    unsafe {
        std::env::set_var("VIOLA_PIPE_SOCKET", folder.path().join("agent"));
        std::env::set_var("VIOLA_PIPE_MIN", "262144");
    }
    Mutex::new(folder)
});

/// The time at which the library looks for an agent again after a test's agent is gone. The library waits for a second.
static RETRY_AT: Mutex<Option<Instant>> = Mutex::new(None);
const RETRY_INTERVAL: Duration = Duration::from_millis(1100);

pub struct Room {
    pub agent: Agent,
    pub bytes: Vec<u8>,
    pub file: File,
    pub folder: MutexGuard<'static, tempfile::TempDir>,
}

pub fn room(behaviour: Behaviour) -> Room {
    let folder = FOLDER.lock().unwrap_or_else(PoisonError::into_inner);
    let again = *RETRY_AT.lock().unwrap();
    thread::sleep(again.map_or(Duration::ZERO, |at| {
        at.saturating_duration_since(Instant::now())
    }));
    let agent = Agent::start(&folder.path().join("agent"), behaviour);
    let bytes: Vec<u8> = (0..SIZE as u32).map(|i| (i * 7 + i / 251) as u8).collect();
    std::fs::write(folder.path().join("file"), &bytes).unwrap();
    let file = File::open(folder.path().join("file")).unwrap();
    Room {
        agent,
        bytes,
        file,
        folder,
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if self.agent.is_gone() {
            *RETRY_AT.lock().unwrap() = Some(Instant::now() + RETRY_INTERVAL);
        }
    }
}

/// Both ends of a connection. Their buffers are small, so little fits in while the peer does not read.
pub fn ends() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&ours, 64 << 10).unwrap();
    let (theirs, _) = listener.accept().unwrap();
    (ours, theirs)
}

/// Reads until the connection ends.
pub fn reader(mut end: TcpStream) -> JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = end.read_to_end(&mut bytes);
        bytes
    })
}

pub fn connection() -> (TcpStream, JoinHandle<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (theirs, _) = listener.accept().unwrap();
    (ours, reader(theirs))
}

pub fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

pub fn file(from: &impl AsRawFd, to: &impl AsRawFd, at: Option<&mut i64>, length: usize) -> isize {
    let at = at.map_or(std::ptr::null_mut(), |at| at);
    // SAFETY: the offset is null or points to an i64.
    unsafe { vpipe_file(from.as_raw_fd(), to.as_raw_fd(), at, length) }
}

pub fn is_readable(fd: i32, milliseconds: i32) -> bool {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: the array has one element.
    unsafe { libc::poll(&mut poll, 1, milliseconds) == 1 }
}

/// The folder of the libraries, which cargo builds beside this test.
pub fn libraries() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().unwrap().to_path_buf();
    assert!(folder.join("libvpipe.so").exists(), "{}", folder.display());
    folder
}

/// Builds a C example in a folder.
pub fn build(example: &str, folder: &Path, link: &str) -> PathBuf {
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = folder.join(example);
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Wextra", "-Werror", "-o"]).arg(&program);
    cc.arg(top.join(format!("examples/{example}.c")));
    cc.arg("-I").arg(top.join("include"));
    cc.arg("-L").arg(libraries());
    cc.args([link, "-lpthread", "-ldl", "-lm"]);
    let built = cc.output().unwrap();
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    program
}
