// SPDX-License-Identifier: Apache-2.0
//! `splice` between two connections: the host relays large responses of a proxy.
//!
//! A proxy splices from one connection into a kernel pipe, and from there into the other connection. If it knows the
//! length it asks for all of it, and each time for the rest. When a program counts down like that and its pipe is
//! empty, the host relays the rest. From then on the pipe is empty in the kernel, while the program believes that it
//! has bytes: `splice` reports bytes that the host has moved, first out of the source and then into the sink.
//!
//! While the host has nothing new, at least one byte stays in that pipe, so the program waits for room in the sink
//! and epoll wakes it there.
//!
//! A request for the largest possible count does not tell a length, and goes to the kernel: such a connection may
//! wait for its other side.

mod connections;

use std::ffi::{c_int, c_uint};
use std::ptr::null_mut;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Instant;

use libc::{size_t, ssize_t};
use rustix::fs::{FileType, fstat};
use rustix::io::ioctl_fionread;
use vpipe::engine::{Engine, TableGuard, marks};
use vpipe::{FileId, file_id, settings};

use crate::bypass::{self, UNBOUNDED_BYTES};
use crate::epoll_sets;
use crate::guard::{borrow, catch_panic, must_fail_with_eagain};
use crate::real::{self, set_errno};
use crate::sendfile::{MAX_IDLE_POLLS, MAX_NEWS_WAIT};
use connections::{CONNECTIONS, Connections, ENTRIES, SMALL_CALLS, SWEEP_INTERVAL_CALLS};

enum Reply {
    Bytes(u64),
    Errno(c_int),
}

impl Reply {
    fn into_result(self) -> ssize_t {
        match self {
            Self::Bytes(n) => n as ssize_t,
            Self::Errno(errno) => {
                set_errno(errno);
                -1
            }
        }
    }
}

/// `splice(2)` without offsets; `None` when the kernel must do it.
pub fn splice(from: c_int, to: c_int, count: size_t, flags: c_uint) -> Option<ssize_t> {
    let call = Call {
        from,
        to,
        count,
        flags,
    };
    if (marks::of(from) | marks::of(to)) & (marks::PIPE | marks::ALIAS) == 0 {
        let many = count as u64;
        if many < settings().min_relay_bytes {
            return call.small();
        }
        if bypass::is_bypassed(from, many) {
            let reply = call.real();
            if let Reply::Bytes(n) = reply {
                catch_panic((), || bypass::count_bytes(from, many, n));
            }
            return Some(reply.into_result());
        }
    }
    let reply = catch_panic(Some(Reply::Errno(libc::EIO)), || call.answer())?;
    Some(reply.into_result())
}

struct Call {
    from: c_int,
    to: c_int,
    count: size_t,
    flags: c_uint,
}

fn look(fd: c_int) -> Option<(FileType, FileId)> {
    let stat = fstat(borrow(fd)?).ok()?;
    let id = FileId {
        device: stat.st_dev,
        inode: stat.st_ino,
    };
    Some((FileType::from_raw_mode(stat.st_mode), id))
}

impl Call {
    /// Answers a call that is too small for a relay, between connections that the host does not
    /// have. `None` when the kernel must do it, as for all connections that the table does not
    /// have.
    fn small(&self) -> Option<ssize_t> {
        if ENTRIES.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let reply = catch_panic(Some(Reply::Errno(libc::EIO)), || {
            let Some(known) = CONNECTIONS.peek() else {
                ENTRIES.store(0, Ordering::Relaxed); // the entries are the parent's
                return None;
            };
            let from = file_id(borrow(self.from)?).ok()?;
            {
                let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
                if SMALL_CALLS.fetch_add(1, Ordering::Relaxed) % SWEEP_INTERVAL_CALLS
                    == SWEEP_INTERVAL_CALLS - 1
                {
                    known.sweep();
                }
                if !known.sources.contains_key(&from) && !known.pipes.contains_key(&from) {
                    return None;
                }
            }
            self.answer()
        });
        Some(reply?.into_result())
    }

    fn answer(&self) -> Option<Reply> {
        let ((from_kind, from), (to_kind, to)) = (look(self.from)?, look(self.to)?);
        match (from_kind, to_kind) {
            (FileType::Socket, FileType::Fifo) => self.take(from, to),
            (FileType::Fifo, FileType::Socket) => self.give(from),
            _ => None,
        }
    }

    fn real(&self) -> Reply {
        // SAFETY: no offsets; the kernel reports a descriptor that is not open.
        let n = unsafe {
            real::splice(
                self.from,
                null_mut(),
                self.to,
                null_mut(),
                self.count,
                self.flags,
            )
        };
        match u64::try_from(n) {
            Ok(n) => Reply::Bytes(n),
            Err(_) => Reply::Errno(real::errno()),
        }
    }

    /// From a connection into a pipe.
    fn take(&self, source: FileId, pipe: FileId) -> Option<Reply> {
        {
            let mut table = Engine::get().lock();
            let mut known = Connections::lock();
            if let Some(at) = known.sources.get_mut(&source)
                && at.relay.is_some()
                && let Some(reply) = at.report_relayed(&mut table, self.count as u64)
            {
                if let Reply::Bytes(_) = reply {
                    known.pipes.insert(pipe, source);
                    known.count();
                }
                return Some(reply);
            }
        }
        if must_fail_with_eagain(self.from, waiting(self.flags)) {
            return Some(Reply::Errno(libc::EAGAIN));
        }
        let (count, minimum) = (self.count as u64, settings().min_relay_bytes);
        let unbounded = count >= UNBOUNDED_BYTES || bypass::is_unbounded(self.from, count);
        let reply = self.real();
        let mut known = Connections::lock();
        match reply {
            Reply::Bytes(0) => {
                known.sources.remove(&source);
            }
            Reply::Bytes(n) if count >= minimum || known.is_relayed(&source) => {
                known.room();
                let before = known.pipes.insert(pipe, source);
                let at = known.sources.entry(source).or_default();
                at.fd = self.from;
                let counting = at.expected == count;
                at.unbounded = unbounded || counting && at.unbounded;
                at.expected = count.saturating_sub(n);
                at.rest = if counting && !at.unbounded {
                    at.expected
                } else {
                    0
                };
                let more = before == Some(source);
                at.inside = if more { at.inside + n } else { n };
            }
            // the rest is too small for a relay
            Reply::Bytes(_) => {
                known.sources.remove(&source);
                known.pipes.remove(&pipe);
            }
            Reply::Errno(_) => (),
        }
        known.count();
        Some(reply)
    }

    /// From a pipe into a connection.
    fn give(&self, pipe: FileId) -> Option<Reply> {
        let engine = Engine::get();
        let mut table = engine.lock();
        let mut known = Connections::lock();
        let Some(&source) = known.pipes.get(&pipe) else {
            drop((known, table));
            let held = must_fail_with_eagain(self.to, waiting(self.flags));
            return held.then_some(Reply::Errno(libc::EAGAIN));
        };
        let Some(at) = known.sources.get_mut(&source) else {
            known.pipes.remove(&pipe);
            known.count();
            return None;
        };
        if at.owed > 0 {
            let reply = at.report_leaving(&mut table, self.count as u64);
            let (owed, relay, expected) = (at.owed, at.relay, at.expected);
            if owed == 0 {
                known.pipes.remove(&pipe);
                // all bytes are reported, and the rest is too small
                if relay.is_none() && expected < settings().min_relay_bytes {
                    known.sources.remove(&source);
                }
                known.count();
            }
            drop(known);
            let Some(n) = reply else {
                self.wait(engine, table, relay);
                return Some(Reply::Errno(libc::EAGAIN));
            };
            return Some(Reply::Bytes(n));
        }
        drop((known, table));
        if must_fail_with_eagain(self.to, waiting(self.flags)) {
            return Some(Reply::Errno(libc::EAGAIN));
        }
        let reply = self.real();
        let Reply::Bytes(n) = reply else {
            return Some(reply);
        };
        let empty = borrow(self.from).is_some_and(|fd| ioctl_fionread(fd) == Ok(0));
        let mut table = engine.lock();
        let mut known = Connections::lock();
        let begun = known.sources.get_mut(&source).is_some_and(|at| {
            // bytes of another source say nothing about this one
            let theirs = n > 0 && n <= at.inside;
            at.inside = at.inside.saturating_sub(n);
            if !theirs || !empty || at.inside > 0 {
                return false;
            }
            let wanted = at.rest >= settings().min_relay_bytes;
            let begun = at.begin(engine, &mut table, source, self.to).is_some();
            if wanted && !begun {
                bypass::bypass(at.fd, at.expected);
            }
            begun
        });
        if !begun {
            if known.sources.get(&source).is_some_and(|at| {
                !at.is_relayed() && empty && bypass::is_bypassed(at.fd, at.expected)
            }) {
                known.sources.remove(&source);
                known.count();
            }
            if empty {
                known.pipes.remove(&pipe);
                known.count();
            }
            return Some(reply);
        }
        // the last byte stays in the pipe
        match n {
            1 => Some(Reply::Errno(libc::EAGAIN)),
            n => Some(Reply::Bytes(n - 1)),
        }
    }

    /// Nothing is new: makes the program wait for news in epoll, or here if it polls.
    fn wait(&self, engine: &Engine, mut table: TableGuard<'_>, relay: Option<u64>) {
        let Some(record) = relay.and_then(|id| table.pipe(id)) else {
            return;
        };
        let id = record.id;
        let in_sets = epoll_sets::descriptor(self.to)
            .is_some_and(|mut descriptor| descriptor.remove_from_sets(self.to));
        let max_idle_polls = if in_sets { MAX_IDLE_POLLS } else { 0 };
        let restless = record.idle_polls > max_idle_polls;
        record.idle_polls = record.idle_polls.saturating_add(1);
        if restless {
            drop(engine.wait(table, id, Some(Instant::now() + MAX_NEWS_WAIT)));
        }
    }
}

/// The flags of `recv` and `send` for the same behaviour.
fn waiting(flags: c_uint) -> c_int {
    match flags & libc::SPLICE_F_NONBLOCK {
        0 => 0,
        _ => libc::MSG_DONTWAIT,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    /// A connection with received bytes, and its other end.
    fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (near, _) = listener.accept().unwrap();
        far.write_all(&[7; 3000]).unwrap();
        (near, far)
    }

    #[test]
    fn finished_and_closed_connections_leave_the_table() {
        let (out, into) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let (near, _far) = connection();
        let take = |from: &TcpStream, count| {
            splice(from.as_raw_fd(), into.as_raw_fd(), count, 0).map(|n| n > 0)
        };
        let large = settings().min_relay_bytes as usize + 3000;
        assert_eq!(take(&near, 1000), None);
        assert_eq!(take(&near, large), Some(true));
        assert!(ENTRIES.load(Ordering::Relaxed) > 0);
        (&_far).write_all(&[7; 3000]).unwrap();
        assert_eq!(take(&near, 1000), Some(true));
        assert_eq!(ENTRIES.load(Ordering::Relaxed), 0);
        // one that is closed in the middle is found out by others' calls
        let (closed, _other) = connection();
        assert_eq!(take(&closed, large), Some(true));
        drop(closed);
        assert!(ENTRIES.load(Ordering::Relaxed) > 0);
        let mut looks = 0;
        while ENTRIES.load(Ordering::Relaxed) > 0 {
            looks += 1;
            assert!(looks <= 2 * SWEEP_INTERVAL_CALLS, "it is never forgotten");
            // not a connection: looked at, and left to the kernel
            assert_eq!(splice(out.as_raw_fd(), out.as_raw_fd(), 10, 0), None);
        }
        assert_eq!(take(&near, 1000), None);
    }
}
