// SPDX-License-Identifier: Apache-2.0
//! A network namespace with an agent, a file, a server with the library preloaded, and a client that counts bytes.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use viola_lab::testing::noise;
use viola_netdev::{Netns, device};

use crate::agent::{Agent, Behaviour};

/// The port of the servers. Each test has its own network, so they do not collide.
pub const PORT: u16 = 8080;

/// The environment of one test.
pub struct Room {
    pub agent: Agent,
    pub bytes: Vec<u8>,
    pub folder: tempfile::TempDir,
    netns: Netns,
    running: Mutex<Vec<Child>>,
}

impl Room {
    /// Creates a file of `size` bytes named `file`.
    pub fn new(size: usize, behaviour: Behaviour) -> Self {
        let netns = Netns::new().unwrap();
        let up = netns.run(|| device::up("lo"));
        up.unwrap().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let bytes = noise(7, size);
        std::fs::write(folder.path().join("file"), &bytes).unwrap();
        let agent = Agent::start(&folder.path().join("agent"), behaviour);
        Self {
            agent,
            bytes,
            folder,
            netns,
            running: Mutex::default(),
        }
    }

    pub fn file(&self) -> PathBuf {
        self.folder.path().join("file")
    }

    /// Starts a server in the namespace and waits until it listens.
    pub fn serve(&self, mut server: Command) -> ChildStdout {
        server.env("VIOLA_PIPE_SOCKET", self.agent.path());
        server.env("VIOLA_PIPE_MIN", "262144");
        server.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = self.netns.run(|| server.spawn().unwrap()).unwrap();
        let output = child.stdout.take().unwrap();
        self.running.lock().unwrap().push(child);
        let begun = Instant::now();
        while self.try_connect().is_none() {
            assert!(
                begun.elapsed() < Duration::from_secs(20),
                "the server does not listen"
            );
            thread::sleep(Duration::from_millis(20));
        }
        output
    }

    /// Runs `work` in the namespace.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.netns.run(work).unwrap()
    }

    fn try_connect(&self) -> Option<TcpStream> {
        let stream = self
            .netns
            .run(|| TcpStream::connect((Ipv4Addr::LOCALHOST, PORT)));
        stream.unwrap().ok()
    }

    pub fn connect(&self) -> Client {
        let stream = self.try_connect().unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        Client(BufReader::with_capacity(1 << 16, stream))
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        for child in self.running.lock().unwrap().iter_mut() {
            // SIGTERM also ends the server's workers.
            // SAFETY: a child process that has not been waited for.
            unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
            let _ = child.wait();
        }
    }
}

/// The library, built beside the test.
pub fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let library = test.parent().unwrap().join("libvpipe_preload.so");
    assert!(library.exists(), "{}", library.display());
    library
}

/// A client with a persistent connection.
pub struct Client(BufReader<TcpStream>);

/// A received response.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub length: usize,
    pub body: Vec<u8>,
}

impl Client {
    /// Sends a request and reads nothing.
    pub fn ask(&mut self, method: &str, path: &str, more: &str) {
        let text = format!("{method} {path} HTTP/1.1\r\nHost: x\r\n{more}\r\n");
        self.0.get_mut().write_all(text.as_bytes()).unwrap();
    }

    /// Reads a response head: status and content length.
    pub fn head(&mut self) -> (u16, usize) {
        let (mut status, mut length) = (0, 0);
        loop {
            let mut line = String::new();
            assert!(
                self.0.read_line(&mut line).unwrap() > 0,
                "the connection ended before a response head"
            );
            let line = line.trim_end();
            if let Some(rest) = line.strip_prefix("HTTP/1.1 ") {
                status = rest[..3].parse().unwrap();
            } else if let Some(text) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = text.trim().parse().unwrap();
            } else if line.is_empty() {
                return (status, length);
            }
        }
    }

    /// Reads a whole response.
    pub fn response(&mut self) -> Response {
        let (status, length) = self.head();
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).unwrap();
        Response {
            status,
            length,
            body,
        }
    }

    pub fn get(&mut self, path: &str) -> Response {
        self.ask("GET", path, "");
        self.response()
    }

    /// Reads `n` bytes.
    pub fn some(&mut self, n: usize) -> Vec<u8> {
        let mut bytes = vec![0; n];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Reads until the connection ends or fails.
    pub fn rest(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let _ = self.0.read_to_end(&mut bytes);
        bytes
    }
}
