// SPDX-License-Identifier: Apache-2.0
//! Moves what a held connection has already received: to the other connection, or into memory.
//!
//! Never blocks. Bytes stay in the source's receive queue until the sink has accepted them.

use std::os::fd::BorrowedFd;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags, recv};

use crate::pipe::life::Sides;

/// Bytes per chunk.
const CHUNK_BYTES: usize = 64 << 10;
/// Maximum number of chunks per call, since other pipes wait.
const MAX_CHUNKS_PER_CALL: usize = 32;

/// State after a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The source's receive queue is empty.
    Empty,
    /// The source has more, or the sink accepts no more now.
    Blocked,
    /// All wanted bytes are moved, the source has ended, or these connections are broken.
    End(Sides),
}

/// Result of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// Bytes moved.
    pub moved: u64,
    /// State after a call.
    pub outcome: Outcome,
}

enum Received {
    Bytes(usize),
    Nothing,
    End,
    Broken,
}

/// Moves at most `limit` bytes from a connection to another one.
pub fn forward(from: BorrowedFd<'_>, to: BorrowedFd<'_>, limit: u64, buffer: &mut Vec<u8>) -> Step {
    step(from, limit, buffer, |bytes| match send(to, bytes) {
        Ok(accepted) => Ok(accepted),
        Err(_) => Err(Sides {
            source: false,
            sink: true,
        }),
    })
}

/// Moves at most `limit` bytes from a connection into memory.
pub fn store(from: BorrowedFd<'_>, kept: &mut Vec<u8>, limit: u64, buffer: &mut Vec<u8>) -> Step {
    step(from, limit, buffer, |bytes| {
        kept.extend_from_slice(bytes);
        Ok(bytes.len())
    })
}

fn step(
    from: BorrowedFd<'_>,
    limit: u64,
    buffer: &mut Vec<u8>,
    mut accept: impl FnMut(&[u8]) -> Result<usize, Sides>,
) -> Step {
    buffer.resize(CHUNK_BYTES, 0);
    let mut moved = 0;
    for _ in 0..MAX_CHUNKS_PER_CALL {
        let end = |lost| Step {
            moved,
            outcome: Outcome::End(lost),
        };
        let stop = |outcome| Step { moved, outcome };
        let room =
            usize::try_from(limit - moved).map_or(CHUNK_BYTES, |limit| limit.min(CHUNK_BYTES));
        if room == 0 {
            return end(Sides::NONE);
        }
        let broken = Sides {
            source: true,
            sink: false,
        };
        let got = match receive(from, &mut buffer[..room], RecvFlags::PEEK) {
            Received::Bytes(got) => got,
            Received::Nothing => return stop(Outcome::Empty),
            Received::End => return end(Sides::NONE),
            Received::Broken => return end(broken),
        };
        let accepted = match accept(&buffer[..got]) {
            Ok(accepted) => accepted,
            Err(lost) => return end(lost),
        };
        // peeked just now, and the agent is the only reader
        let mut left = accepted;
        while left > 0 {
            match receive(from, &mut buffer[..left], RecvFlags::TRUNC) {
                Received::Bytes(gone) => left -= gone,
                _ => return end(broken),
            }
        }
        moved += accepted as u64;
        if accepted < got {
            return Step {
                moved,
                outcome: Outcome::Blocked,
            };
        }
    }
    let outcome = Outcome::Blocked;
    Step { moved, outcome }
}

/// Receives without blocking. `PEEK` leaves the bytes in the queue, `TRUNC` discards them.
fn receive(from: BorrowedFd<'_>, into: &mut [u8], how: RecvFlags) -> Received {
    match retry_on_intr(|| recv(from, &mut *into, how | RecvFlags::DONTWAIT)) {
        Ok((_, 0)) => Received::End,
        Ok((_, got)) => Received::Bytes(got),
        Err(Errno::AGAIN) => Received::Nothing,
        Err(_) => Received::Broken,
    }
}

/// Sends as much as the socket's buffer takes.
fn send(to: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, Errno> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match retry_on_intr(|| rustix::net::send(to, bytes, flags)) {
        Err(Errno::AGAIN) => Ok(0),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    /// Waits until `count` bytes have arrived.
    fn wait_for_bytes(stream: &TcpStream, count: u64) {
        while rustix::io::ioctl_fionread(stream).unwrap() < count {
            std::thread::yield_now();
        }
    }

    #[test]
    fn bytes_that_the_sink_does_not_accept_stay_in_the_source() {
        let (mut far, from) = pair();
        let (to, mut near) = pair();
        rustix::net::sockopt::set_socket_send_buffer_size(&to, 1).unwrap();
        let bytes: Vec<u8> = (0..30_000_u32).map(|i| (i % 251) as u8).collect();
        far.set_nonblocking(true).unwrap();
        let wrote = far.write(&bytes).unwrap();
        wait_for_bytes(&from, wrote as u64);
        // the sink is full, and its peer does not read
        while send(to.as_fd(), &[0; 4096]).unwrap() > 0 {}
        let mut buffer = Vec::new();
        let step = forward(from.as_fd(), to.as_fd(), u64::MAX, &mut buffer);
        assert_eq!((step.moved, step.outcome), (0, Outcome::Blocked));
        assert_eq!(rustix::io::ioctl_fionread(&from).unwrap(), wrote as u64);
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            near.read_to_end(&mut all).unwrap();
            all
        });
        let mut moved = 0;
        loop {
            let step = forward(from.as_fd(), to.as_fd(), u64::MAX, &mut buffer);
            moved += step.moved;
            if step.outcome == Outcome::Empty {
                break;
            }
        }
        assert_eq!(moved, wrote as u64);
        drop(to);
        let all = reader.join().unwrap();
        assert!(all.ends_with(&bytes[..wrote]), "other bytes");
    }

    #[test]
    fn no_more_than_the_limit_is_moved_and_the_end_is_seen() {
        let (mut far, mut from) = pair();
        far.write_all(b"upload and more").unwrap();
        wait_for_bytes(&from, 15);
        let (mut kept, mut buffer) = (Vec::new(), Vec::new());
        let step = store(from.as_fd(), &mut kept, 6, &mut buffer);
        let outcome = Outcome::End(Sides::NONE);
        assert_eq!(
            (kept.as_slice(), step),
            (&b"upload"[..], Step { moved: 6, outcome })
        );
        let mut more = [0; 9];
        from.read_exact(&mut more).unwrap();
        assert_eq!(&more, b" and more");
        let empty = store(from.as_fd(), &mut kept, 6, &mut buffer);
        assert_eq!(empty.outcome, Outcome::Empty);
        far.shutdown(Shutdown::Write).unwrap();
        while store(from.as_fd(), &mut kept, 6, &mut buffer).outcome == Outcome::Empty {}
        assert_eq!(
            store(from.as_fd(), &mut kept, 6, &mut buffer).outcome,
            outcome
        );
    }

    #[test]
    fn a_broken_side_is_identified() {
        let (far, from) = pair();
        let (to, near) = pair();
        let linger = Some(std::time::Duration::ZERO);
        let mut buffer = Vec::new();
        rustix::net::sockopt::set_socket_linger(&near, linger).unwrap();
        drop(near);
        while send(to.as_fd(), b"x").is_ok() {}
        (&far).write_all(b"bytes").unwrap();
        wait_for_bytes(&from, 5);
        let (source, sink) = (false, true);
        let outcome = Outcome::End(Sides { source, sink });
        assert_eq!(
            forward(from.as_fd(), to.as_fd(), 9, &mut buffer).outcome,
            outcome
        );
        rustix::net::sockopt::set_socket_linger(&far, linger).unwrap();
        drop(far);
        let (source, sink) = (true, false);
        let outcome = Outcome::End(Sides { source, sink });
        loop {
            let step = store(from.as_fd(), &mut Vec::new(), 99, &mut buffer);
            if step.outcome != Outcome::Empty {
                assert_eq!(step.outcome, outcome);
                break;
            }
        }
    }
}
