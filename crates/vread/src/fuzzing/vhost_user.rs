// SPDX-License-Identifier: Apache-2.0
//! Fuzzes the vhost-user messages of a hostile VMM to its reader's worker, with descriptors.
//!
//! Input: a sequence of messages. Each begins with four bytes: the request, the low bits of its flags, the descriptors that go
//! with it, and the length of its body. If the highest bit of the flags' byte is set, the header claims a body of 255 times that
//! length. Of the descriptors' byte, the lowest two bits are their number; each of the next bits makes one an event instead of
//! 64 KiB of memory.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vhost::vhost_user::Listener;

use super::fuse_requests;
use crate::reader::serve_connection;

/// A connection that takes longer to end hangs.
const END_TIMEOUT: Duration = Duration::from_secs(10);
const MEMORY_BYTES: u64 = 64 << 10;
/// The version of the protocol in a header's flags.
const VERSION: u32 = 1;

/// A worker's thread that serves one connection after another.
struct Server {
    address: SocketAddr,
    /// One message for each connection that has ended.
    ended: Mutex<Receiver<()>>,
}

fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| {
        let name = format!("viola-fuzz-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).expect("a name");
        let socket = UnixListener::bind_addr(&address).expect("a socket");
        let (end, ended) = channel();
        std::thread::spawn(move || {
            let mut listener = Listener::from(socket);
            loop {
                // A connection may fail, but not the socket.
                let _ = serve_connection(&fuse_requests::bed().service, &mut listener, 0);
                if end.send(()).is_err() {
                    return;
                }
            }
        });
        Server {
            address,
            ended: Mutex::new(ended),
        }
    })
}

/// Runs one input; panics when the worker does not see the end of the connection.
pub fn vhost_user(input: &[u8]) {
    let server = server();
    let ended = server.ended.lock().unwrap_or_else(|e| e.into_inner());
    let stream = UnixStream::connect_addr(&server.address).expect("a connection");
    stream.set_nonblocking(true).expect("a socket");
    let mut rest = input;
    while let Some(([request, flags, descriptors, length], after)) = rest.split_first_chunk::<4>() {
        let (body, after) = after.split_at(after.len().min(usize::from(*length)));
        rest = after;
        let claimed = match flags & 0x80 {
            0 => body.len() as u32,
            _ => 255 * u32::from(*length),
        };
        let header = [
            u32::from(*request),
            VERSION | u32::from(flags & 0x7c),
            claimed,
        ];
        let header: Vec<u8> = header.into_iter().flat_map(u32::to_ne_bytes).collect();
        let kinds = (0..descriptors & 3).map(|i| descriptors >> (2 + i) & 1 == 1);
        let fds: Vec<OwnedFd> = kinds.map(descriptor).collect();
        if send(&stream, &[&header, body], &fds).is_err() {
            break;
        }
    }
    drop(stream);
    assert!(
        ended.recv_timeout(END_TIMEOUT).is_ok(),
        "the worker does not see the end of the connection"
    );
}

fn descriptor(is_event: bool) -> OwnedFd {
    if is_event {
        return eventfd(1, EventfdFlags::NONBLOCK).expect("an event");
    }
    let memory = super::memory_file();
    memory.set_len(MEMORY_BYTES).expect("memory");
    memory.into()
}

/// Sends a message, or a part of it if the worker does not read.
fn send(stream: &UnixStream, parts: &[&[u8]; 2], fds: &[OwnedFd]) -> io::Result<()> {
    let parts = parts.map(IoSlice::new);
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    }
    sendmsg(stream, &parts, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}
