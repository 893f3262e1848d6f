// SPDX-License-Identifier: Apache-2.0
//! The limit: the host itself answers, by sendfile from the same image.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, poll};
use viola_extents::Extent;
use viola_extents::host::Image;
use viola_vpipe::{Sending, Turn};

use crate::error::{Failure, Outcome};

/// A server of one file; it ends with this.
pub struct Server {
    address: SocketAddr,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens in the calling thread's network namespace.
    pub fn start(
        address: SocketAddr,
        image: Arc<Image>,
        extents: &[Extent],
        size: u64,
    ) -> Outcome<Self> {
        let map = image.check(extents, size).map_err(Failure::run)?;
        let listener =
            TcpListener::bind(address).map_err(|e| Failure::run(format!("{address}: {e}")))?;
        let ends = Arc::new(AtomicBool::new(false));
        let flag = ends.clone();
        let thread = std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if flag.load(Ordering::Relaxed) {
                    return;
                }
                let whole = || Sending::new(image.clone(), map.clone(), 0, size);
                // a client that has enough goes away
                let _ = serve(client, size, whole);
            }
        });
        Ok(Self {
            address,
            ends,
            thread: Some(thread),
        })
    }
}

/// Ends the thread; from the network namespace in which it listens.
impl Drop for Server {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(mut client: TcpStream, size: u64, whole: impl Fn() -> Sending) -> std::io::Result<()> {
    let mut questions = BufReader::new(client.try_clone()?);
    loop {
        loop {
            let mut line = String::new();
            if questions.read_line(&mut line)? == 0 {
                return Ok(());
            }
            if line.trim_end().is_empty() {
                break;
            }
        }
        write!(client, "HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n")?;
        client.set_nonblocking(true)?;
        let mut sending = whole();
        loop {
            match sending.turn(client.as_fd(), 1 << 20)?.1 {
                Turn::Done => break,
                Turn::More => {}
                Turn::Full => {
                    let _ = poll(&mut [PollFd::new(&client, PollFlags::OUT)], None)?;
                }
            }
        }
        client.set_nonblocking(false)?;
    }
}
