// SPDX-License-Identifier: Apache-2.0
//! A TCP relay that tests use to break connections.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

/// A relay between two hosts that can be told to misbehave.
pub struct Relay {
    pub address: SocketAddr,
    mode: Arc<AtomicU8>,
}

const PASS: u8 = 0;
const CUT: u8 = 1;
const SWALLOW: u8 = 2;

impl Relay {
    pub fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mode = Arc::new(AtomicU8::new(PASS));
        let told = mode.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let client = client.unwrap();
                if told.load(Ordering::SeqCst) == CUT {
                    continue;
                }
                let server = TcpStream::connect(target).unwrap();
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let told = told.clone();
                    std::thread::spawn(move || carry(from, to, &told));
                }
            }
        });
        Self { address, mode }
    }

    /// Ends all connections, and those that are made from now on.
    pub fn cut(&self) {
        self.mode.store(CUT, Ordering::SeqCst);
    }

    /// Keeps all connections, and carries nothing any more.
    pub fn swallow(&self) {
        self.mode.store(SWALLOW, Ordering::SeqCst);
    }

    pub fn pass(&self) {
        self.mode.store(PASS, Ordering::SeqCst);
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, mode: &AtomicU8) {
    let tick = Duration::from_millis(5);
    from.set_read_timeout(Some(tick)).unwrap();
    let mut bytes = vec![0; 64 << 10];
    loop {
        match mode.load(Ordering::SeqCst) {
            CUT => break,
            SWALLOW => std::thread::sleep(tick),
            _ => match from.read(&mut bytes) {
                Ok(0) => break,
                Ok(n) => {
                    // What was under way when it began to swallow is lost, too.
                    if mode.load(Ordering::SeqCst) == PASS && to.write_all(&bytes[..n]).is_err() {
                        break;
                    }
                }
                Err(e)
                    if matches!(
                        e.kind(),
                        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                    ) => {}
                Err(_) => break,
            },
        }
    }
    let _ = from.shutdown(std::net::Shutdown::Both);
    let _ = to.shutdown(std::net::Shutdown::Both);
}
