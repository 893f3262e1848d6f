// SPDX-License-Identifier: Apache-2.0
//! Registrations of descriptors in the program's epoll sets, and whether the kernel has them now.
//!
//! The entry of a closed descriptor stays here. [`Descriptor::remove_from_sets`] drops each
//! registration that the kernel does not have any more.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use vpipe::engine::{FdSlots, PerProcess, marks, run_unlock_hook};

/// A registration of a descriptor in an epoll set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Registration {
    /// Descriptor of the set.
    pub set: RawFd,
    /// `events` of `struct epoll_event`.
    pub events: u32,
    /// `data` of `struct epoll_event`.
    pub data: u64,
    /// Whether the kernel's set has it now.
    pub in_kernel: bool,
}

/// State of a descriptor.
#[derive(Debug, Default)]
pub struct Descriptor {
    registrations: Vec<Registration>,
}

#[derive(Default)]
struct Descriptors(FdSlots<Mutex<Descriptor>>);

static DESCRIPTORS: PerProcess<Descriptors> = PerProcess::new();

/// The locked state of a descriptor. Unlocking it does the deferred work.
pub struct DescriptorGuard(ManuallyDrop<MutexGuard<'static, Descriptor>>);

impl DescriptorGuard {
    /// Unlocks it and leaves deferred work to the caller.
    pub fn unlock_quietly(self) {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither used nor dropped after this.
        unsafe { ManuallyDrop::drop(&mut this.0) };
    }
}

impl Deref for DescriptorGuard {
    type Target = Descriptor;

    fn deref(&self) -> &Descriptor {
        &self.0
    }
}

impl DerefMut for DescriptorGuard {
    fn deref_mut(&mut self) -> &mut Descriptor {
        &mut self.0
    }
}

impl Drop for DescriptorGuard {
    fn drop(&mut self) {
        // SAFETY: it is not used after this.
        unsafe { ManuallyDrop::drop(&mut self.0) };
        run_unlock_hook();
    }
}

/// Locks the state of a descriptor. Lock the engine's table first if you need both. Not for signal handlers.
pub fn descriptor(fd: RawFd) -> Option<DescriptorGuard> {
    let all = DESCRIPTORS.peek().unwrap_or_else(|| DESCRIPTORS.get());
    let descriptor = all.0.get_or_make(fd)?;
    let descriptor = descriptor.lock().unwrap_or_else(PoisonError::into_inner);
    Some(DescriptorGuard(ManuallyDrop::new(descriptor)))
}

/// What [`try_descriptor`] found.
pub enum Try {
    /// The descriptor has no state.
    None,
    /// Another thread has it, or this one below a signal handler.
    Busy,
    /// It is locked.
    Locked(DescriptorGuard),
}

/// Locks the state of a descriptor if it has one and it is free. Neither waits nor allocates memory.
pub fn try_descriptor(fd: RawFd) -> Try {
    let Some(descriptor) = DESCRIPTORS.peek().and_then(|all| all.0.get(fd)) else {
        return Try::None;
    };
    fence(Ordering::SeqCst); // after work was deferred: see `run_unlock_hook`
    let descriptor = match descriptor.try_lock() {
        Ok(descriptor) => descriptor,
        Err(TryLockError::Poisoned(descriptor)) => descriptor.into_inner(),
        Err(TryLockError::WouldBlock) => return Try::Busy,
    };
    Try::Locked(DescriptorGuard(ManuallyDrop::new(descriptor)))
}

/// As [`Descriptor::add_to_sets`], now or when the thread that has the descriptor unlocks it. The caller has locked the
/// table, and may be a signal handler.
pub fn add_to_sets(fd: RawFd, report_again: bool) {
    match try_descriptor(fd) {
        Try::None => (),
        Try::Locked(mut descriptor) => {
            descriptor.add_to_sets(fd, report_again);
            descriptor.unlock_quietly();
        }
        Try::Busy if report_again => marks::defer(fd, marks::ADD_AGAIN),
        Try::Busy => marks::defer(fd, marks::ADD),
    }
}

#[derive(Clone, Copy)]
enum Call {
    Add,
    Change,
    Delete,
}

fn call(what: Call, at: &Registration, fd: RawFd) -> Result<(), Errno> {
    // SAFETY: descriptors of the program; the call closes neither, and the kernel reports one that is not open.
    let (set, fd) = unsafe { (BorrowedFd::borrow_raw(at.set), BorrowedFd::borrow_raw(fd)) };
    let data = EventData::new_u64(at.data);
    let events = EventFlags::from_bits_retain(at.events);
    match what {
        Call::Add => epoll::add(set, fd, data, events),
        Call::Change => epoll::modify(set, fd, data, events),
        Call::Delete => epoll::delete(set, fd),
    }
}

impl Descriptor {
    /// The registration in a set.
    pub fn registration(&mut self, set: RawFd) -> Option<&mut Registration> {
        self.registrations.iter_mut().find(|r| r.set == set)
    }

    /// Records a registration.
    pub fn set_registration(&mut self, new: Registration) {
        match self.registration(new.set) {
            Some(old) => *old = new,
            None => self.registrations.push(new),
        }
    }

    /// Removes a registration.
    pub fn remove_registration(&mut self, set: RawFd) {
        self.registrations.retain(|r| r.set != set);
    }

    /// The event that a set reports for a writable socket at each wait; `None` for edge-triggered and one-shot
    /// registrations, and for a descriptor that is not in the set.
    pub fn writable_event(&mut self, set: RawFd) -> Option<libc::epoll_event> {
        let at = self.registration(set).filter(|at| at.in_kernel)?;
        let (out, once) = (
            libc::EPOLLOUT as u32,
            (libc::EPOLLET | libc::EPOLLONESHOT) as u32,
        );
        (at.events & out != 0 && at.events & once == 0).then_some(libc::epoll_event {
            events: out,
            u64: at.data,
        })
    }

    /// Removes the descriptor from the kernel's sets and keeps the registrations. Returns whether there are any.
    pub fn remove_from_sets(&mut self, fd: RawFd) -> bool {
        self.registrations.retain_mut(|at| {
            if at.in_kernel {
                at.in_kernel = false;
                return call(Call::Delete, at, fd).is_ok();
            }
            true
        });
        !self.registrations.is_empty()
    }

    /// Adds the descriptor to the kernel's sets again. With `report_again`, sets that still have it
    /// also report again what is ready.
    pub fn add_to_sets(&mut self, fd: RawFd, report_again: bool) {
        for at in &mut self.registrations {
            let done = match at.in_kernel {
                false => call(Call::Add, at, fd),
                true if report_again => call(Call::Change, at, fd),
                true => Ok(()),
            };
            at.in_kernel = match done {
                Ok(()) | Err(Errno::EXIST) => true,
                // an exclusive registration cannot be changed, and is in the set
                Err(Errno::INVAL) => at.in_kernel,
                Err(_) => false,
            };
        }
        self.registrations.retain(|at| at.in_kernel);
    }

    /// Removes the descriptor from all sets for good: a duplicate at the agent would keep it there after a close.
    pub fn forget(&mut self, fd: RawFd) {
        self.remove_from_sets(fd);
        self.registrations.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use rustix::event::epoll::{CreateFlags, Event, create};
    use rustix::event::{EventfdFlags, Timespec, eventfd};

    use super::*;

    #[test]
    fn a_descriptor_returns_to_its_set_with_the_programs_events() {
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
        let mut descriptor = Descriptor::default();
        let wanted = Registration {
            set: set.as_raw_fd(),
            events: edges.bits(),
            data: 42,
            in_kernel: true,
        };
        descriptor.set_registration(wanted);
        // of a descriptor that had the number before
        let before = other.as_raw_fd();
        descriptor.set_registration(Registration {
            set: before,
            ..wanted
        });
        let number = fd.as_raw_fd();
        assert!(descriptor.remove_from_sets(number));
        assert_eq!(descriptor.registrations.len(), 1);
        descriptor.set_registration(Registration {
            data: 43,
            in_kernel: false,
            ..wanted
        });
        descriptor.add_to_sets(number, false);
        assert_eq!((events(), events()), (vec![43], vec![]));
        descriptor.add_to_sets(number, false);
        assert_eq!(events(), [0; 0]);
        descriptor.add_to_sets(number, true);
        assert_eq!(events(), [43]);
        // readers and edges hear of nothing in between
        assert!(descriptor.writable_event(set.as_raw_fd()).is_none());
        descriptor.registration(set.as_raw_fd()).unwrap().events =
            (EventFlags::IN | EventFlags::OUT).bits();
        let event = descriptor.writable_event(set.as_raw_fd()).unwrap();
        let (is, data) = (event.events, event.u64);
        assert_eq!((is, data), (EventFlags::OUT.bits(), 43));
        assert!(descriptor.writable_event(before).is_none());
        descriptor.forget(number);
        assert_eq!(epoll::delete(&set, &fd), Err(Errno::NOENT));
        assert!(!descriptor.remove_from_sets(number));
    }
}
