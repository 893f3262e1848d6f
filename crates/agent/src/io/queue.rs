// SPDX-License-Identifier: Apache-2.0
//! A queue between threads whose receiver can be polled.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

/// The sending end. Clones send to the same receiver.
#[derive(Debug)]
pub struct Sender<T> {
    queue: mpsc::Sender<T>,
    wake: Arc<OwnedFd>,
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self {
            queue: self.queue.clone(),
            wake: Arc::clone(&self.wake),
        }
    }
}

impl<T> Sender<T> {
    /// Sends an item and wakes the receiver; `false` when the receiver is gone.
    pub fn send(&self, item: T) -> bool {
        let sent = self.queue.send(item).is_ok();
        // a full counter is readable anyway
        let _ = rustix::io::write(&*self.wake, &1_u64.to_ne_bytes());
        sent
    }
}

/// The receiving end. Its descriptor is readable after a send, until [`Receiver::clear`].
#[derive(Debug)]
pub struct Receiver<T> {
    queue: mpsc::Receiver<T>,
    wake: Arc<OwnedFd>,
}

impl<T> Receiver<T> {
    /// Makes the descriptor unreadable until the next send.
    pub fn clear(&self) {
        let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
    }

    /// The next item, if there is one.
    pub fn try_recv(&self) -> Option<T> {
        self.queue.try_recv().ok()
    }

    /// The next item; `None` when `timeout` has passed or all senders are gone.
    pub fn recv_timeout(&self, timeout: Duration) -> Option<T> {
        self.queue.recv_timeout(timeout).ok()
    }
}

impl<T> AsFd for Receiver<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// Makes a queue.
///
/// # Errors
/// The kernel's, when there is no descriptor for the eventfd.
pub fn queue<T>() -> io::Result<(Sender<T>, Receiver<T>)> {
    let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let (sender, receiver) = mpsc::channel();
    let sender = Sender {
        queue: sender,
        wake: Arc::clone(&wake),
    };
    Ok((
        sender,
        Receiver {
            queue: receiver,
            wake,
        },
    ))
}
