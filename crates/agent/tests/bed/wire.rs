// SPDX-License-Identifier: Apache-2.0
//! Three network namespaces with a TAP device each, joined by this program: a client, a guest, and a host that has
//! the guest's addresses.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use viola_netdev::Netns;

pub const CLIENT: ([u8; 6], &str) = ([2, 0, 0, 0, 0, 1], "10.98.0.1");
pub const GUEST: ([u8; 6], &str) = ([2, 0, 0, 0, 0, 2], "10.98.0.2");

/// Where the client's packets go, and whose packets reach the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    Nowhere,
    Guest,
    Host,
    /// The client's packets are held until the route changes; the guest's pass.
    Held,
}

/// The routes by the guest's port.
struct Routes {
    all: Route,
    some: BTreeMap<u16, Route>,
}

impl Routes {
    fn of(&self, port: u16) -> Route {
        self.some.get(&port).copied().unwrap_or(self.all)
    }
}

struct Board {
    routes: Mutex<Routes>,
    /// Number of polls without a packet.
    quiet: AtomicU64,
    end: AtomicBool,
}

pub struct Wire {
    pub client: Netns,
    pub guest: Netns,
    pub host: Netns,
    board: Arc<Board>,
    thread: Option<JoinHandle<()>>,
}

/// A namespace with one device and a permanent neighbour.
fn space(own: ([u8; 6], &str), other: ([u8; 6], &str)) -> (Netns, File) {
    let netns = Netns::new().unwrap();
    let mac = |bytes: [u8; 6]| bytes.map(|b| format!("{b:02x}")).join(":");
    let script = format!(
        "ip link set lo up; ip link set wire address {}; ip address add {}/24 dev wire; ip link set wire up; \
         ip neighbour replace {} lladdr {} dev wire nud permanent",
        mac(own.0),
        own.1,
        other.1,
        mac(other.0)
    );
    let device = netns.run(|| {
        let device = tap();
        sh(&script);
        device
    });
    (netns, device.unwrap())
}

pub fn sh(script: &str) -> String {
    let output = Command::new("sh").args(["-ec", script]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{script}: {text}{errors}");
    text
}

fn tap() -> File {
    const TUNSETIFF: u64 = 0x4004_54ca;
    const IFF_TAP: i16 = 2;
    const IFF_NO_PI: i16 = 0x1000;
    let device = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .unwrap();
    // `struct ifreq`: the name, the flags
    let mut request = [0u8; 40];
    request[..4].copy_from_slice(b"wire");
    request[16..18].copy_from_slice(&(IFF_TAP | IFF_NO_PI).to_ne_bytes());
    // SAFETY: TUNSETIFF reads and writes a struct ifreq, which has 40 bytes.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), TUNSETIFF as _, request.as_mut_ptr()) };
    assert_eq!(result, 0, "TUNSETIFF: {}", std::io::Error::last_os_error());
    device
}

impl Wire {
    pub fn new() -> Self {
        let (client, a) = space(CLIENT, GUEST);
        let (guest, b) = space(GUEST, CLIENT);
        let (host, c) = space(GUEST, CLIENT);
        let board = Arc::new(Board {
            routes: Mutex::new(Routes {
                all: Route::Guest,
                some: BTreeMap::new(),
            }),
            quiet: AtomicU64::new(0),
            end: AtomicBool::new(false),
        });
        let shared = Arc::clone(&board);
        let thread = std::thread::spawn(move || carry([a, b, c], &shared));
        Self {
            client,
            guest,
            host,
            board,
            thread: Some(thread),
        }
    }

    /// Routes all connections.
    pub fn redirect(&self, way: Route) {
        let mut routes = self.board.routes.lock().unwrap();
        (routes.all, routes.some) = (way, BTreeMap::new());
    }

    /// Routes the connections of one port of the guest.
    pub fn redirect_port(&self, port: u16, way: Route) {
        self.board.routes.lock().unwrap().some.insert(port, way);
    }

    /// Waits until all packets in flight are delivered or lost.
    pub fn settle(&self) {
        let now = self.board.quiet.load(Ordering::SeqCst);
        while self.board.quiet.load(Ordering::SeqCst) < now + 2 {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.board.end.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn carry(mut taps: [File; 3], board: &Board) {
    let mut frame = vec![0; 65536];
    let mut kept = BTreeMap::<u16, Vec<Vec<u8>>>::new();
    while !board.end.load(Ordering::SeqCst) {
        let mut polls = [0, 1, 2].map(|i: usize| libc::pollfd {
            fd: taps[i].as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        });
        // SAFETY: three entries, as said.
        unsafe { libc::poll(polls.as_mut_ptr(), 3, 2) };
        if polls.iter().all(|p| p.revents & libc::POLLIN == 0) {
            board.quiet.fetch_add(1, Ordering::SeqCst);
        }
        let routes = board.routes.lock().unwrap();
        // in order, before all later packets
        kept.retain(|port, frames| {
            let to = match routes.of(*port) {
                Route::Held => return true,
                Route::Nowhere => return false,
                Route::Guest => 1,
                Route::Host => 2,
            };
            for frame in frames {
                let _ = taps[to].write(frame);
            }
            false
        });
        for from in 0..3 {
            if polls[from].revents & libc::POLLIN == 0 {
                continue;
            }
            let size = taps[from].read(&mut frame).unwrap();
            // TCP over IPv4 only
            if frame[12..14] != [8, 0] || frame[23] != 6 {
                continue;
            }
            let head = 14 + usize::from(frame[14] & 15) * 4;
            let at = if from == 0 { head + 2 } else { head };
            let port = u16::from_be_bytes([frame[at], frame[at + 1]]);
            let to = match (from, routes.of(port)) {
                (0, Route::Held) => {
                    kept.entry(port).or_default().push(frame[..size].to_vec());
                    continue;
                }
                (0, Route::Guest) => 1,
                (0, Route::Host) => 2,
                (1, Route::Guest | Route::Held) | (2, Route::Host) => 0,
                _ => continue,
            };
            let _ = taps[to].write(&frame[..size]);
        }
    }
}
