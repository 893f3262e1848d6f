// SPDX-License-Identifier: Apache-2.0
//! A host server that sends a file with sendfile(2) from the same image: the upper bound, and the server behind the
//! proxy.

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

/// A server of one file; drop ends it.
pub struct Server {
    listener: TcpListener,
    clients: Arc<Mutex<Vec<TcpStream>>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens in the calling thread's network namespace. The file has these extents in the image
    /// and `size` bytes.
    ///
    /// # Errors
    /// The extents do not cover the file, or the address is in use.
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
            // Until drop shuts the listener down.
            while let Ok((client, _)) = accepts.accept() {
                if let (Ok(client), Ok(mut all)) = (client.try_clone(), accepted.lock()) {
                    all.push(client);
                }
                let (image, map) = (image.clone(), map.clone());
                let whole = move || FileToSocket::new(image.clone(), map.clone(), 0, size);
                // A client disconnects when it has enough; its thread ends then.
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
        // Wakes the thread from any network namespace.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // A proxy keeps its connections and would send the next server's requests over this one.
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
