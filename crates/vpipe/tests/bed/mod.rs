// SPDX-License-Identifier: Apache-2.0
//! A VM whose agent requests pipes from a host.
#![allow(dead_code)]

use std::io::Write;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use viola_extents::Extent;
use viola_extents::host::{Image, Layer};
use viola_handover::{disconnect_silently, extract, from_wire, to_wire};
use viola_netdev::Netns;
use viola_proto::pipe::status::PipeStats;
use viola_proto::pipe::{Connection, PipeId, PipeReply};
use viola_vpipe::pipes::{Endpoint, PipeSpec, Pipes};
use viola_vpipe::transfer::FileRange;
use viola_vpipe::{Flow, Steering};

use super::tenant::{CLIENT, Tenant, noise};

pub const SIZE: u64 = 8 << 20;

pub struct Bed {
    pub pipes: Pipes,
    pub tenant: Tenant,
    pub steering: Steering,
    pub image: Arc<Image>,
    pub file: Vec<u8>,
    _host: Netns,
}

impl Bed {
    pub fn new(name: &str) -> Self {
        Self::capped(name, None)
    }

    pub fn capped(name: &str, max_bytes_per_s: Option<u64>) -> Self {
        Self::limited(name, max_bytes_per_s, None)
    }

    /// A VM whose NIC has this limit for what it receives.
    pub fn limited(name: &str, max_bytes_per_s: Option<u64>, receive_limit: Option<&str>) -> Self {
        let (host, steering) = (Netns::new().unwrap(), Steering::load().unwrap());
        let mut tenant = Tenant::new(&host, &steering, name);
        tenant.max_bytes_per_s = max_bytes_per_s;
        tenant.receive_limit = receive_limit.map(str::to_owned);
        let file = noise(SIZE as usize, 9);
        let mut image = tempfile::tempfile().unwrap();
        image.write_all(&file).unwrap();
        Self {
            pipes: tenant.pipes(&steering),
            tenant,
            steering,
            image: Arc::new(Image::open(vec![Layer::raw(image)]).unwrap()),
            file,
            _host: host,
        }
    }

    /// Starts a pipe for the whole file, as the agent does.
    pub fn start(&self, pipe: PipeId, guest: &TcpStream) {
        let extracted = extract(guest.as_fd()).unwrap();
        self.start_with(pipe, to_wire(extracted.detach()).unwrap());
    }

    pub fn start_with(&self, pipe: PipeId, connection: Connection) {
        let extent = Extent {
            logical: 0,
            physical: 0,
            length: SIZE,
            zero: false,
        };
        let source = Endpoint::File(FileRange {
            image: self.image.clone(),
            map: self.image.check(&[extent], SIZE).unwrap(),
            offset: 0,
        });
        let sink = Endpoint::Connection {
            connection,
            next_hop: CLIENT,
        };
        let spec = PipeSpec {
            pipe,
            source,
            sink,
            length: SIZE,
        };
        self.pipes.start(spec).unwrap();
    }

    /// Extracts the connection from the VM's socket.
    pub fn extracted(&self, guest: &TcpStream) -> Endpoint {
        let extracted = extract(guest.as_fd()).unwrap();
        Endpoint::Connection {
            connection: to_wire(extracted.detach()).unwrap(),
            next_hop: CLIENT,
        }
    }

    /// The part of the file that lies in these bytes of the disk.
    pub fn part(&self, disk: std::ops::Range<u64>, offset: u64) -> Endpoint {
        let length = disk.end - disk.start;
        let extent = Extent {
            logical: 0,
            physical: disk.start,
            length,
            zero: false,
        };
        Endpoint::File(FileRange {
            image: self.image.clone(),
            map: self.image.check(&[extent], length).unwrap(),
            offset,
        })
    }

    /// Content of the disk.
    pub fn disk(&self, bytes: std::ops::Range<u64>) -> Vec<u8> {
        let mut got = vec![0; (bytes.end - bytes.start) as usize];
        let Endpoint::File(part) = self.part(bytes, 0) else {
            panic!("the sink is a file");
        };
        self.image.read_at(&part.map, 0, &mut got).unwrap();
        got
    }

    /// Waits until `over` transfers are counted as ended: the counters follow a moment after the message to the agent.
    pub fn wait_for_ended(&self, over: u64) -> PipeStats {
        let begun = Instant::now();
        loop {
            let stats = self.pipes.stats();
            if stats.transfers.is_empty() && stats.returned + stats.broken >= over {
                return stats;
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "{stats:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The next message to the agent, except for progress.
    pub fn reply(&self) -> PipeReply {
        let begun = Instant::now();
        loop {
            let next = self
                .pipes
                .replies()
                .find(|m| !matches!(m, PipeReply::Progress { .. }));
            if let Some(message) = next {
                return message;
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "no reply");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Restores a connection as the agent does. Returns the number of bytes sent.
    pub fn restore_and_confirm(&self, pipe: PipeId, guest: &TcpStream) -> u64 {
        let PipeReply::Finished {
            sink: Some(connection),
            sent,
            errno: 0,
            ..
        } = self.reply()
        else {
            panic!("the connection is not returned");
        };
        // The VM is slow.
        std::thread::sleep(Duration::from_millis(20));
        restore(guest, *connection);
        self.pipes.restored(pipe);
        sent
    }

    pub fn wait_until_released(&self, flow: &Flow) {
        let begun = Instant::now();
        while !self.is_released(flow) {
            assert!(begun.elapsed() < Duration::from_secs(30), "still held");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    pub fn is_released(&self, flow: &Flow) -> bool {
        self.steering.flows().counts(flow).unwrap().is_none()
    }
}

/// `tcpi_total_retrans`: number of segments that a socket has retransmitted.
pub fn retransmitted_segments(socket: &TcpStream) -> u32 {
    let mut info = [0u8; 104];
    let mut size = info.len() as u32;
    // SAFETY: the buffer is ours and has the given size.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut size,
        )
    };
    assert_eq!((done, size), (0, 104));
    u32::from_ne_bytes(info[100..104].try_into().unwrap())
}

/// Restores the connection into the VM's socket.
pub fn restore(guest: &TcpStream, connection: Connection) {
    disconnect_silently(guest.as_fd()).unwrap();
    let state = from_wire(connection);
    viola_handover::restore(guest.as_fd(), &state)
        .unwrap()
        .activate()
        .unwrap();
}
