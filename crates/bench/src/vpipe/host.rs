// SPDX-License-Identifier: Apache-2.0
//! The host itself answers, by sendfile from the same image: the limit, and the server behind the proxy.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, poll};
use viola_extents::Extent;
use viola_extents::host::Image;
use viola_vpipe::transfer::{FileToSocket, StepOutcome};

use viola_cli::error::{Failure, Outcome};

/// A server of one file; it ends with this.
pub struct Server {
    listener: TcpListener,
    clients: Arc<Mutex<Vec<TcpStream>>>,
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
        let clients = Arc::<Mutex<Vec<TcpStream>>>::default();
        let accepted = Arc::clone(&clients);
        let accepts = listener.try_clone().map_err(Failure::run)?;
        let thread = std::thread::spawn(move || {
            // until it is shut down
            while let Ok((client, _)) = accepts.accept() {
                if let (Ok(client), Ok(mut all)) = (client.try_clone(), accepted.lock()) {
                    all.push(client);
                }
                let (image, map) = (image.clone(), map.clone());
                let whole = move || FileToSocket::new(image.clone(), map.clone(), 0, size);
                // a client that has enough goes away, and the thread with it
                std::thread::spawn(move || drop(serve(client, size, whole)));
            }
        });
        Ok(Self {
            listener,
            clients,
            thread: Some(thread),
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // wakes the thread, from whatever network namespace
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // a proxy keeps its connections, and would ask the next server's questions of this one
        if let Ok(clients) = self.clients.lock() {
            for client in clients.iter() {
                let _ = client.shutdown(std::net::Shutdown::Both);
            }
        }
    }
}

fn serve(
    mut client: TcpStream,
    size: u64,
    whole: impl Fn() -> FileToSocket,
) -> std::io::Result<()> {
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
            match sending.step(client.as_fd(), 1 << 20)?.1 {
                StepOutcome::Done | StepOutcome::SourceEnded => break,
                StepOutcome::BudgetUsed => {}
                StepOutcome::SinkFull | StepOutcome::SourceEmpty => {
                    let _ = poll(&mut [PollFd::new(&client, PollFlags::OUT)], None)?;
                }
            }
        }
        client.set_nonblocking(false)?;
    }
}
