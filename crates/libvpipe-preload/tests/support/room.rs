// SPDX-License-Identifier: Apache-2.0
//! A network of its own with an agent, a file, a server that is preloaded, and a client that counts bytes.
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

use crate::agent::{Agent, Manner};

/// Where servers listen: each test has its own network.
pub const PORT: u16 = 8080;

/// One test's surroundings.
pub struct Room {
    pub agent: Agent,
    pub bytes: Vec<u8>,
    pub folder: tempfile::TempDir,
    netns: Netns,
    running: Mutex<Vec<Child>>,
}

impl Room {
    /// With a file of so many bytes, named `file`.
    pub fn new(size: usize, manner: Manner) -> Self {
        let netns = Netns::new().unwrap();
        let up = netns.run(|| device::up("lo"));
        up.unwrap().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let bytes = noise(7, size);
        std::fs::write(folder.path().join("file"), &bytes).unwrap();
        let agent = Agent::start(&folder.path().join("agent"), manner);
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

    /// Starts a server in the network, and waits until it listens.
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

    /// Does something in the network.
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
            // a server's workers end with it when it is asked to end
            // SAFETY: a process of ours that nobody has waited for.
            unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
            let _ = child.wait();
        }
    }
}

/// The library, beside the test.
pub fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let library = test.parent().unwrap().join("libvpipe_preload.so");
    assert!(library.exists(), "{}", library.display());
    library
}

/// A client that keeps its connection.
pub struct Client(BufReader<TcpStream>);

/// What came back.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub length: usize,
    pub body: Vec<u8>,
}

impl Client {
    /// Asks, and reads nothing.
    pub fn ask(&mut self, method: &str, path: &str, more: &str) {
        let text = format!("{method} {path} HTTP/1.1\r\nHost: x\r\n{more}\r\n");
        self.0.get_mut().write_all(text.as_bytes()).unwrap();
    }

    /// Reads a head: status and length.
    pub fn head(&mut self) -> (u16, usize) {
        let (mut status, mut length) = (0, 0);
        loop {
            let mut line = String::new();
            assert!(self.0.read_line(&mut line).unwrap() > 0, "no head");
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

    /// Reads so many bytes.
    pub fn some(&mut self, n: usize) -> Vec<u8> {
        let mut bytes = vec![0; n];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Reads until the end, however it comes.
    pub fn rest(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let _ = self.0.read_to_end(&mut bytes);
        bytes
    }
}
