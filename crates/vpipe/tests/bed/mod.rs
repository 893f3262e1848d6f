// SPDX-License-Identifier: Apache-2.0
//! A VM whose agent asks a host for pipes.
#![allow(dead_code)]

use std::io::Write;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use viola_extents::Extent;
use viola_extents::host::{Image, Layer};
use viola_handover::{drop_quietly, from_wire, put, take, to_wire};
use viola_netdev::Netns;
use viola_proto::pipe::shown::Work;
use viola_proto::pipe::{Connection, PipeId, ToGuest};
use viola_vpipe::moving::Part;
use viola_vpipe::work::{End, Give, Pipes};
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

    pub fn capped(name: &str, rate: Option<u64>) -> Self {
        let (host, steering) = (Netns::new().unwrap(), Steering::load().unwrap());
        let mut tenant = Tenant::new(&host, &steering, name);
        tenant.rate = rate;
        for address in ["10.66.0.2", "fd66::2"] {
            tenant.space.add(address.parse().unwrap()).unwrap();
        }
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

    /// As the agent does it; the whole file.
    pub fn give(&self, pipe: PipeId, guest: &TcpStream) {
        let taken = take(guest.as_fd()).unwrap();
        self.give_as(pipe, to_wire(taken.keep()).unwrap());
    }

    pub fn give_as(&self, pipe: PipeId, connection: Connection) {
        let extent = Extent {
            logical: 0,
            physical: 0,
            length: SIZE,
            zero: false,
        };
        let source = End::File(Part {
            image: self.image.clone(),
            map: self.image.check(&[extent], SIZE).unwrap(),
            offset: 0,
        });
        let sink = End::Connection {
            connection,
            next_hop: CLIENT,
        };
        let give = Give {
            pipe,
            source,
            sink,
            length: SIZE,
        };
        self.pipes.give(give).unwrap();
    }

    /// Out of the VM's socket.
    pub fn taken(&self, guest: &TcpStream) -> End {
        let taken = take(guest.as_fd()).unwrap();
        End::Connection {
            connection: to_wire(taken.keep()).unwrap(),
            next_hop: CLIENT,
        }
    }

    /// A part of the file that these bytes of the disk are.
    pub fn part(&self, disk: std::ops::Range<u64>, offset: u64) -> End {
        let length = disk.end - disk.start;
        let extent = Extent {
            logical: 0,
            physical: disk.start,
            length,
            zero: false,
        };
        End::File(Part {
            image: self.image.clone(),
            map: self.image.check(&[extent], length).unwrap(),
            offset,
        })
    }

    /// Bytes of the disk.
    pub fn disk(&self, bytes: std::ops::Range<u64>) -> Vec<u8> {
        let mut got = vec![0; (bytes.end - bytes.start) as usize];
        let End::File(part) = self.part(bytes, 0) else {
            panic!("it is a file");
        };
        self.image.read_at(&part.map, 0, &mut got).unwrap();
        got
    }

    /// Waits until so many are counted as over: the counts come a moment after the agent is told.
    pub fn settled(&self, over: u64) -> Work {
        let begun = Instant::now();
        loop {
            let work = self.pipes.work();
            if work.transfers.is_empty() && work.returned + work.broken >= over {
                return work;
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "{work:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The next thing that is said to the agent, but for progress.
    pub fn heard(&self) -> ToGuest {
        let begun = Instant::now();
        loop {
            let next = self
                .pipes
                .heard()
                .find(|m| !matches!(m, ToGuest::Progress { .. }));
            if let Some(message) = next {
                return message;
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "nothing is said");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Takes a connection back as the agent does it; what was sent.
    pub fn take_back(&self, pipe: PipeId, guest: &TcpStream) -> u64 {
        let ToGuest::Back {
            sink: Some(connection),
            sent,
            errno: 0,
            ..
        } = self.heard()
        else {
            panic!("it does not come back");
        };
        // the VM is slow
        std::thread::sleep(Duration::from_millis(20));
        restore(guest, *connection);
        self.pipes.taken(pipe);
        sent
    }

    pub fn wait_until_left_alone(&self, flow: &Flow) {
        let begun = Instant::now();
        while !self.is_left_alone(flow) {
            assert!(begun.elapsed() < Duration::from_secs(30), "it is held on");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    pub fn is_left_alone(&self, flow: &Flow) -> bool {
        self.steering.flows().counts(flow).unwrap().is_none()
    }
}

/// `tcpi_total_retrans`: segments that a socket had to send again.
pub fn sent_again(socket: &TcpStream) -> u32 {
    let mut info = [0u8; 104];
    let mut size = info.len() as u32;
    // SAFETY: the buffer is ours and of the size given.
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

/// Into the VM's socket again.
pub fn restore(guest: &TcpStream, connection: Connection) {
    drop_quietly(guest.as_fd()).unwrap();
    let state = from_wire(connection);
    put(guest.as_fd(), &state).unwrap().go().unwrap();
}
