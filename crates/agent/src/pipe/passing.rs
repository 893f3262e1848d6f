// SPDX-License-Identifier: Apache-2.0
//! What a connection has received before the host has it, moved on here: down the other connection, or into memory.
//!
//! Nothing here waits. Bytes stay in the source's queue until the sink has taken them, so none is ever held in between.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::core::pipe::Sides;

/// Moved at a time.
const PIECE: usize = 64 << 10;
/// How often at a look: others wait.
const TIMES: usize = 32;

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// The source has nothing more now.
    Empty,
    /// There is more, or the sink takes no more now.
    Later,
    /// All that was wanted is moved, or the source has said that it has no more, or these are broken.
    End(Sides),
}

/// What was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// So many bytes were moved.
    pub moved: u64,
    /// How far it is.
    pub then: Then,
}

enum Heard {
    Bytes(usize),
    Nothing,
    End,
    Broken,
}

/// From a connection down another one, `rest` bytes at most.
pub fn pass(from: BorrowedFd<'_>, to: BorrowedFd<'_>, rest: u64, buffer: &mut Vec<u8>) -> Step {
    step(from, rest, buffer, |bytes| match send(to, bytes) {
        Ok(taken) => Ok(taken),
        Err(_) => Err(Sides {
            source: false,
            sink: true,
        }),
    })
}

/// From a connection into memory, `rest` bytes at most.
pub fn keep(from: BorrowedFd<'_>, kept: &mut Vec<u8>, rest: u64, buffer: &mut Vec<u8>) -> Step {
    step(from, rest, buffer, |bytes| {
        kept.extend_from_slice(bytes);
        Ok(bytes.len())
    })
}

fn step(
    from: BorrowedFd<'_>,
    rest: u64,
    buffer: &mut Vec<u8>,
    mut take: impl FnMut(&[u8]) -> Result<usize, Sides>,
) -> Step {
    buffer.resize(PIECE, 0);
    let mut moved = 0;
    for _ in 0..TIMES {
        let end = |lost| Step {
            moved,
            then: Then::End(lost),
        };
        let then = |then| Step { moved, then };
        let room = usize::try_from(rest - moved).map_or(PIECE, |rest| rest.min(PIECE));
        if room == 0 {
            return end(Sides::NONE);
        }
        let broken = Sides {
            source: true,
            sink: false,
        };
        let got = match receive(from, &mut buffer[..room], libc::MSG_PEEK) {
            Heard::Bytes(got) => got,
            Heard::Nothing => return then(Then::Empty),
            Heard::End => return end(Sides::NONE),
            Heard::Broken => return end(broken),
        };
        let taken = match take(&buffer[..got]) {
            Ok(taken) => taken,
            Err(lost) => return end(lost),
        };
        // seen a moment ago, and nobody else reads
        let mut left = taken;
        while left > 0 {
            match receive(from, &mut buffer[..left], libc::MSG_TRUNC) {
                Heard::Bytes(gone) => left -= gone,
                _ => return end(broken),
            }
        }
        moved += taken as u64;
        if taken < got {
            return Step {
                moved,
                then: Then::Later,
            };
        }
    }
    let then = Then::Later;
    Step { moved, then }
}

/// With `MSG_PEEK` bytes stay where they are, with `MSG_TRUNC` they are thrown away.
fn receive(from: BorrowedFd<'_>, into: &mut [u8], how: i32) -> Heard {
    let flags = how | libc::MSG_DONTWAIT;
    loop {
        // SAFETY: the kernel writes at most `into.len()` bytes to `into`.
        let got = unsafe {
            libc::recv(
                from.as_raw_fd(),
                into.as_mut_ptr().cast(),
                into.len(),
                flags,
            )
        };
        return match usize::try_from(got) {
            Ok(0) => Heard::End,
            Ok(got) => Heard::Bytes(got),
            Err(_) => match io::Error::last_os_error().kind() {
                io::ErrorKind::Interrupted => continue,
                io::ErrorKind::WouldBlock => Heard::Nothing,
                _ => Heard::Broken,
            },
        };
    }
}

/// Sends what there is room for.
fn send(to: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    loop {
        // SAFETY: the kernel reads `bytes.len()` bytes from `bytes`.
        let sent = unsafe { libc::send(to.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
        return match usize::try_from(sent) {
            Ok(sent) => Ok(sent),
            Err(_) => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => continue,
                e if e.kind() == io::ErrorKind::WouldBlock => Ok(0),
                e => Err(e),
            },
        };
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

    /// Waits until this many bytes have come.
    fn come(stream: &TcpStream, count: u64) {
        while rustix::io::ioctl_fionread(stream).unwrap() < count {
            std::thread::yield_now();
        }
    }

    #[test]
    fn what_the_sink_does_not_take_stays_with_the_source() {
        let (mut far, from) = pair();
        let (to, mut near) = pair();
        rustix::net::sockopt::set_socket_send_buffer_size(&to, 1).unwrap();
        let bytes: Vec<u8> = (0..30_000_u32).map(|i| (i % 251) as u8).collect();
        far.set_nonblocking(true).unwrap();
        let wrote = far.write(&bytes).unwrap();
        come(&from, wrote as u64);
        // the sink is full, and nobody reads there
        while send(to.as_fd(), &[0; 4096]).unwrap() > 0 {}
        let mut buffer = Vec::new();
        let step = pass(from.as_fd(), to.as_fd(), u64::MAX, &mut buffer);
        assert_eq!((step.moved, step.then), (0, Then::Later));
        assert_eq!(rustix::io::ioctl_fionread(&from).unwrap(), wrote as u64);
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            near.read_to_end(&mut all).unwrap();
            all
        });
        let mut moved = 0;
        loop {
            let step = pass(from.as_fd(), to.as_fd(), u64::MAX, &mut buffer);
            moved += step.moved;
            if step.then == Then::Empty {
                break;
            }
        }
        assert_eq!(moved, wrote as u64);
        drop(to);
        let all = reader.join().unwrap();
        assert!(all.ends_with(&bytes[..wrote]), "other bytes");
    }

    #[test]
    fn no_more_is_taken_than_wanted_and_the_end_is_seen() {
        let (mut far, mut from) = pair();
        far.write_all(b"upload and more").unwrap();
        come(&from, 15);
        let (mut kept, mut buffer) = (Vec::new(), Vec::new());
        let step = keep(from.as_fd(), &mut kept, 6, &mut buffer);
        let then = Then::End(Sides::NONE);
        assert_eq!(
            (kept.as_slice(), step),
            (&b"upload"[..], Step { moved: 6, then })
        );
        let mut more = [0; 9];
        from.read_exact(&mut more).unwrap();
        assert_eq!(&more, b" and more");
        let empty = keep(from.as_fd(), &mut kept, 6, &mut buffer);
        assert_eq!(empty.then, Then::Empty);
        far.shutdown(Shutdown::Write).unwrap();
        while keep(from.as_fd(), &mut kept, 6, &mut buffer).then == Then::Empty {}
        assert_eq!(keep(from.as_fd(), &mut kept, 6, &mut buffer).then, then);
    }

    #[test]
    fn what_is_broken_is_told_apart() {
        let (far, from) = pair();
        let (to, near) = pair();
        let linger = Some(std::time::Duration::ZERO);
        let mut buffer = Vec::new();
        rustix::net::sockopt::set_socket_linger(&near, linger).unwrap();
        drop(near);
        while send(to.as_fd(), b"x").is_ok() {}
        (&far).write_all(b"bytes").unwrap();
        come(&from, 5);
        let (source, sink) = (false, true);
        let then = Then::End(Sides { source, sink });
        assert_eq!(pass(from.as_fd(), to.as_fd(), 9, &mut buffer).then, then);
        rustix::net::sockopt::set_socket_linger(&far, linger).unwrap();
        drop(far);
        let (source, sink) = (true, false);
        let then = Then::End(Sides { source, sink });
        loop {
            let step = keep(from.as_fd(), &mut Vec::new(), 99, &mut buffer);
            if step.then != Then::Empty {
                assert_eq!(step.then, then);
                break;
            }
        }
    }
}
