// SPDX-License-Identifier: Apache-2.0
//! The workloads `echo` and `sink`: one process, one epoll loop, TCP and UDP on the same port.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use crate::counters::{Slot, ready};

const LISTENER: u64 = u64::MAX;
const DATAGRAMS: u64 = u64::MAX - 1;
const EVENTS: usize = 64;
/// Reads from one stream before the others get their turn.
const MAX_READS_PER_EVENT: usize = 16;

pub fn serve(port: u16, slot: &Slot, answer: bool) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("port {port}: {e}");
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).map_err(failed)?;
    let datagrams = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    datagrams.set_nonblocking(true).map_err(failed)?;
    let poll = epoll::create(CreateFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
    let watch = |fd: &dyn AsFd, key: u64| {
        epoll::add(&poll, fd.as_fd(), EventData::new_u64(key), EventFlags::IN)
            .map_err(|e| failed(e.into()))
    };
    watch(&listener, LISTENER)?;
    watch(&datagrams, DATAGRAMS)?;
    ready();
    let mut streams: HashMap<u64, TcpStream> = HashMap::new();
    let mut data = vec![0_u8; 64 << 10];
    let mut events = Vec::with_capacity(EVENTS);
    loop {
        events.clear();
        match epoll::wait(&poll, rustix::buffer::spare_capacity(&mut events), None) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other.map_err(|e| failed(e.into()))?,
        };
        for event in &events {
            match event.data.u64() {
                LISTENER => {
                    while let Ok((stream, _)) = listener.accept() {
                        let key = stream.as_raw_fd().cast_unsigned().into();
                        if stream.set_nodelay(true).is_ok()
                            && stream.set_nonblocking(!answer).is_ok()
                            && watch(&stream, key).is_ok()
                        {
                            streams.insert(key, stream);
                        }
                    }
                }
                DATAGRAMS => {
                    while let Ok((count, from)) = datagrams.recv_from(&mut data) {
                        slot.add(1, count as u64);
                        if answer {
                            let _ = datagrams.send_to(&data[..count], from);
                        }
                    }
                }
                key => {
                    if let Some(stream) = streams.get_mut(&key)
                        && !serve_stream(stream, &mut data, slot, answer)
                    {
                        streams.remove(&key); // closing it takes it out of the epoll set
                    }
                }
            }
        }
    }
}

/// Serves what a stream has sent. Returns whether the stream stays open.
fn serve_stream(stream: &mut TcpStream, data: &mut [u8], slot: &Slot, answer: bool) -> bool {
    // an echo stream is blocking, so it reads once per event
    for _ in 0..if answer { 1 } else { MAX_READS_PER_EVENT } {
        match stream.read(data) {
            Ok(0) => return false,
            Ok(count) => {
                slot.add(1, count as u64);
                if answer && stream.write_all(&data[..count]).is_err() {
                    return false;
                }
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => return true,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(_) => return false,
        }
    }
    true
}
