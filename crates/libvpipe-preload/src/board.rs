// SPDX-License-Identifier: Apache-2.0
//! What the program wants to hear of each descriptor, and whether its epoll sets have it now.
//!
//! A descriptor that is closed stays here: that it is in a set is only believed when the kernel takes it out.

use std::os::fd::{BorrowedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use vpipe::engine::PerProcess;
use vpipe::engine::marks::Slots;

use crate::head::Body;

/// A descriptor in an epoll set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Registration {
    /// The set.
    pub set: RawFd,
    /// `events` and `data` of `struct epoll_event`.
    pub events: u32,
    /// See above.
    pub data: u64,
    /// Whether the set really has it.
    pub real: bool,
}

/// What is known of a descriptor.
#[derive(Debug, Default)]
pub struct Slot {
    registrations: Vec<Registration>,
    /// What follows the head that was written last.
    pub head: Option<Body>,
}

#[derive(Default)]
struct Board(Slots<Mutex<Slot>>);

static BOARD: PerProcess<Board> = PerProcess::new();

/// A descriptor's slot, locked. After the engine's table, never before.
pub fn slot(fd: RawFd) -> Option<MutexGuard<'static, Slot>> {
    let board = BOARD.peek().unwrap_or_else(|| BOARD.get());
    let slot = board.0.make(fd)?;
    Some(slot.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Whether the calling process may change what is here: not a child of vfork.
pub fn is_own() -> bool {
    BOARD.own().is_some()
}

#[derive(Clone, Copy)]
enum Call {
    Add,
    Change,
    Delete,
}

fn call(what: Call, at: &Registration, fd: RawFd) -> Result<(), Errno> {
    // SAFETY: numbers of the program's; the call closes neither, and the kernel says when one is not open.
    let (set, fd) = unsafe { (BorrowedFd::borrow_raw(at.set), BorrowedFd::borrow_raw(fd)) };
    let data = EventData::new_u64(at.data);
    let events = EventFlags::from_bits_retain(at.events);
    match what {
        Call::Add => epoll::add(set, fd, data, events),
        Call::Change => epoll::modify(set, fd, data, events),
        Call::Delete => epoll::delete(set, fd),
    }
}

impl Slot {
    /// In which set, and how.
    pub fn find(&mut self, set: RawFd) -> Option<&mut Registration> {
        self.registrations.iter_mut().find(|r| r.set == set)
    }

    /// The program wants it there, with this.
    pub fn put(&mut self, new: Registration) {
        match self.find(new.set) {
            Some(old) => *old = new,
            None => self.registrations.push(new),
        }
    }

    /// The program wants it there no more.
    pub fn remove(&mut self, set: RawFd) {
        self.registrations.retain(|r| r.set != set);
    }

    /// What this set reports of a socket that takes more, each time that it is asked; nothing where it is told once only, or not there.
    pub fn takes_more(&mut self, set: RawFd) -> Option<libc::epoll_event> {
        let at = self.find(set).filter(|at| at.real)?;
        let (out, once) = (
            libc::EPOLLOUT as u32,
            (libc::EPOLLET | libc::EPOLLONESHOT) as u32,
        );
        (at.events & out != 0 && at.events & once == 0).then_some(libc::epoll_event {
            events: out,
            u64: at.data,
        })
    }

    /// Takes it out of all sets, which stay noted; whether there are any.
    pub fn park(&mut self, fd: RawFd) -> bool {
        self.registrations.retain_mut(|at| {
            if at.real {
                at.real = false;
                return call(Call::Delete, at, fd).is_ok();
            }
            true
        });
        !self.registrations.is_empty()
    }

    /// Puts it back into all sets. With `anew` those that have it report again what is ready.
    pub fn unpark(&mut self, fd: RawFd, anew: bool) {
        for at in &mut self.registrations {
            let done = match at.real {
                false => call(Call::Add, at, fd),
                true if anew => call(Call::Change, at, fd),
                true => Ok(()),
            };
            at.real = match done {
                Ok(()) | Err(Errno::EXIST) => true,
                // an exclusive one cannot be changed, and is there
                Err(Errno::INVAL) => at.real,
                Err(_) => false,
            };
        }
        self.registrations.retain(|at| at.real);
    }

    /// Takes it out of all sets, for good: the agent may have a duplicate, which would keep it there when it is closed.
    pub fn leave(&mut self, fd: RawFd) {
        self.park(fd);
        self.registrations.clear();
        self.head = None;
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use rustix::event::epoll::{CreateFlags, Event, create};
    use rustix::event::{EventfdFlags, Timespec, eventfd};

    use super::*;

    #[test]
    fn a_descriptor_leaves_its_set_and_comes_back_with_what_was_wanted() {
        let set = create(CreateFlags::CLOEXEC).unwrap();
        let other = create(CreateFlags::CLOEXEC).unwrap();
        let fd = eventfd(1, EventfdFlags::CLOEXEC).unwrap();
        let edges = EventFlags::IN | EventFlags::ET;
        epoll::add(&set, &fd, EventData::new_u64(42), edges).unwrap();
        let events = || {
            let mut events: Vec<Event> = Vec::with_capacity(4);
            let now = Timespec::default();
            let room = rustix::buffer::spare_capacity(&mut events);
            epoll::wait(&set, room, Some(&now)).unwrap();
            let data = events.iter().map(|event| event.data.u64());
            data.collect::<Vec<_>>()
        };
        assert_eq!(events(), [42]);
        let mut slot = Slot::default();
        let wanted = Registration {
            set: set.as_raw_fd(),
            events: edges.bits(),
            data: 42,
            real: true,
        };
        slot.put(wanted);
        // of a descriptor that had the number before
        let before = other.as_raw_fd();
        slot.put(Registration {
            set: before,
            ..wanted
        });
        let number = fd.as_raw_fd();
        assert!(slot.park(number));
        assert_eq!(slot.registrations.len(), 1);
        slot.put(Registration {
            data: 43,
            real: false,
            ..wanted
        });
        slot.unpark(number, false);
        assert_eq!((events(), events()), (vec![43], vec![]));
        slot.unpark(number, false);
        assert_eq!(events(), [0; 0]);
        slot.unpark(number, true);
        assert_eq!(events(), [43]);
        // readers and edges hear of nothing in between
        assert!(slot.takes_more(set.as_raw_fd()).is_none());
        slot.find(set.as_raw_fd()).unwrap().events = (EventFlags::IN | EventFlags::OUT).bits();
        let event = slot.takes_more(set.as_raw_fd()).unwrap();
        let (is, data) = (event.events, event.u64);
        assert_eq!((is, data), (EventFlags::OUT.bits(), 43));
        assert!(slot.takes_more(before).is_none());
        slot.leave(number);
        assert_eq!(epoll::delete(&set, &fd), Err(Errno::NOENT));
        assert!(!slot.park(number));
    }
}
