// SPDX-License-Identifier: Apache-2.0
//! Three network namespaces and a wire between them. The test program is the wire: it carries packets and drops them on
//! request.
#![allow(dead_code)]

use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use viola_netdev::{Netns, add_address, device};

/// The namespace that receives the client's packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Route {
    Nowhere,
    Old,
    New,
}

/// A network namespace with one TUN device.
pub struct Namespace {
    netns: Netns,
    tun: File,
}

impl Namespace {
    fn new(address: IpAddr) -> Self {
        let netns = Netns::new().unwrap();
        let tun = netns.run(|| tun(address)).unwrap();
        Self { netns, tun }
    }

    /// Runs `work` in the namespace.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.netns.run(work).unwrap()
    }

    /// A TCP socket that is created in the namespace.
    pub fn socket(&self, address: SocketAddr) -> OwnedFd {
        self.netns.tcp_socket(address.ip()).unwrap()
    }
}

/// A TUN device with this address and an on-link network, in the thread's namespace.
fn tun(address: IpAddr) -> File {
    const TUNSETIFF: u64 = 0x4004_54ca;
    const IFF_TUN: i16 = 1;
    const IFF_NO_PI: i16 = 0x1000;
    let device = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .unwrap();
    // `struct ifreq`: name, then flags
    let mut request = [0u8; 40];
    request[..4].copy_from_slice(b"wire");
    request[16..18].copy_from_slice(&(IFF_TUN | IFF_NO_PI).to_ne_bytes());
    // SAFETY: TUNSETIFF reads and writes a struct ifreq, which has 40 bytes.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), TUNSETIFF as _, request.as_mut_ptr()) };
    assert_eq!(result, 0, "TUNSETIFF: {}", std::io::Error::last_os_error());
    match address {
        IpAddr::V4(ip) => device::set_address("wire", ip, 24).unwrap(),
        IpAddr::V6(_) => {
            device::up("wire").unwrap();
            add_address(device::index("wire").unwrap(), address, 64).unwrap();
        }
    }
    device
}

/// State that the wire's thread shares with the test.
struct WireState {
    route: AtomicU8,
    /// Random packet loss, in thousandths.
    loss: AtomicU32,
    /// Packets from an end that is not connected now: the index of the end, and the TCP header.
    unexpected_packets: Mutex<Vec<(usize, String)>>,
    /// Number of polls in which neither server end had sent a packet.
    quiet: AtomicU64,
    end: AtomicBool,
}

/// A client and two server ends with the same address.
pub struct Wire {
    pub client: Namespace,
    pub old: Namespace,
    pub new: Namespace,
    state: Arc<WireState>,
    thread: Option<JoinHandle<()>>,
}

impl Wire {
    /// `client` and `server` have the same address family and are in one /24 (IPv4) or /64 (IPv6) network.
    pub fn new(client: IpAddr, server: IpAddr) -> Self {
        let (client, old, new) = (
            Namespace::new(client),
            Namespace::new(server),
            Namespace::new(server),
        );
        let state = Arc::new(WireState {
            route: AtomicU8::new(Route::Old as u8),
            loss: AtomicU32::new(0),
            unexpected_packets: Mutex::default(),
            quiet: AtomicU64::new(0),
            end: AtomicBool::new(false),
        });
        let tun_devices = [&client, &old, &new].map(|space| space.tun.try_clone().unwrap());
        let shared = state.clone();
        let thread = std::thread::spawn(move || forward_packets(tun_devices, &shared));
        Self {
            client,
            old,
            new,
            state,
            thread: Some(thread),
        }
    }

    pub fn route_to(&self, route: Route) {
        self.state.route.store(route as u8, Ordering::SeqCst);
    }

    pub fn set_loss(&self, thousandths: u32) {
        self.state.loss.store(thousandths, Ordering::SeqCst);
    }

    /// Waits until the wire has carried or dropped all packets that both ends have sent.
    pub fn settle(&self) {
        let now = self.state.quiet.load(Ordering::SeqCst);
        while self.state.quiet.load(Ordering::SeqCst) < now + 2 {
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Packets that an end sent while the other one was connected.
    pub fn unexpected_packets(&self) -> Vec<(usize, String)> {
        self.state.unexpected_packets.lock().unwrap().clone()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.state.end.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn forward_packets(mut tun_devices: [File; 3], state: &WireState) {
    let mut packet = vec![0; 65536];
    let mut random: u32 = 1;
    while !state.end.load(Ordering::SeqCst) {
        let mut polls = [0, 1, 2].map(|i: usize| libc::pollfd {
            fd: tun_devices[i].as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        });
        // SAFETY: `polls` has three entries.
        unsafe { libc::poll(polls.as_mut_ptr(), 3, 20) };
        if (polls[1].revents | polls[2].revents) & libc::POLLIN == 0 {
            state.quiet.fetch_add(1, Ordering::SeqCst);
        }
        for from in 0..3 {
            if polls[from].revents & libc::POLLIN == 0 {
                continue;
            }
            let size = tun_devices[from].read(&mut packet).unwrap();
            // Carries TCP only; neighbour discovery and other protocols are ignored.
            let protocol = if packet[0] >> 4 == 4 {
                packet[9]
            } else {
                packet[6]
            };
            if protocol != 6 {
                continue;
            }
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            if random >> 8 & 1023 < state.loss.load(Ordering::SeqCst) * 1024 / 1000 {
                continue;
            }
            let route = state.route.load(Ordering::SeqCst);
            let to = match from {
                0 => usize::from(route),
                _ if from == usize::from(route) => 0,
                _ if route == Route::Nowhere as u8 => continue,
                _ => {
                    let header = match packet[0] >> 4 {
                        4 => usize::from(packet[0] & 15) * 4,
                        _ => 40,
                    };
                    let tcp = format!("{:02x?} of {size} bytes", &packet[header..header + 20]);
                    state.unexpected_packets.lock().unwrap().push((from, tcp));
                    continue;
                }
            };
            if from != 0 || to != 0 {
                let _ = tun_devices[to].write(&packet[..size]);
            }
        }
    }
}
