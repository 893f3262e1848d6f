// SPDX-License-Identifier: Apache-2.0
//! Sends and receives datagrams: one JSON value each, with descriptors, never split.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    accept_with, bind, connect, recvmsg, sendmsg, socket_with, socketpair,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Order, Report};
use crate::poll;

/// Maximum length of a datagram, bytes.
pub const MAX_DATAGRAM: usize = 64 << 10;
/// Maximum descriptors in a datagram.
pub const MAX_FDS: usize = 64;
/// Maximum connections of a worker: the daemon's, and that of a restarted daemon.
const MAX_CONNECTIONS: usize = 4;

/// Why an order or its report failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The socket failed.
    #[error("the worker's control socket failed: {0}")]
    Io(#[from] io::Error),
    /// The other side is gone.
    #[error("the worker has closed its control socket")]
    Gone,
    /// No answer came in time.
    #[error("the worker did not answer within {} ms", .0.as_millis())]
    Timeout(Duration),
    /// A datagram is invalid.
    #[error("invalid control message: {0}")]
    Garbage(String),
}

impl From<Errno> for ControlError {
    fn from(e: Errno) -> Self {
        Self::Io(e.into())
    }
}

/// A received datagram.
#[derive(Debug)]
pub struct Received<T> {
    /// The message.
    pub message: T,
    /// The descriptors, in the order in which they were sent.
    pub fds: Vec<OwnedFd>,
}

/// Creates a worker's listening socket for this user only, and replaces an existing one: the caller has checked that
/// nobody answers on it.
///
/// # Errors
/// Errors of the system calls.
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let fd = socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    // The umask keeps others from connecting before the mode is set.
    let before = rustix::process::umask(Mode::from_raw_mode(0o177));
    let bound = bind(&fd, &SocketAddrUnix::new(path)?);
    rustix::process::umask(before);
    bound?;
    rustix::net::listen(&fd, MAX_CONNECTIONS as i32)?;
    Ok(fd)
}

/// Creates a pair of connected `SOCK_SEQPACKET` sockets.
///
/// # Errors
/// Errors of the system call.
pub fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    Ok(socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

/// Either end of a control connection.
#[derive(Debug)]
pub struct Control {
    fd: OwnedFd,
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Control {
    /// Connects to a worker's socket without waiting.
    ///
    /// # Errors
    /// When no worker listens on it.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let fd = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )?;
        connect(&fd, &SocketAddrUnix::new(path)?)?;
        Ok(Self { fd })
    }

    /// Uses one end of a socket pair or an accepted connection.
    #[must_use]
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Sends an order and waits for the report.
    ///
    /// # Errors
    /// [`ControlError`]. After [`ControlError::Timeout`] wait again or close the connection, since the report may
    /// still come.
    pub fn order(
        &self,
        order: &Order,
        fds: &[BorrowedFd<'_>],
        timeout: Duration,
    ) -> Result<Report, ControlError> {
        debug_assert_eq!(order.descriptors(), fds.len());
        self.send(order, fds, Instant::now() + timeout, timeout)?;
        self.receive_within::<Report>(timeout)
            .map(|received| received.message)
    }

    /// Waits again for the report to an order, after [`ControlError::Timeout`].
    ///
    /// # Errors
    /// [`ControlError`]; after another [`ControlError::Timeout`] the connection must be closed.
    pub fn wait_for_report(&self, timeout: Duration) -> Result<Report, ControlError> {
        self.receive_within::<Report>(timeout)
            .map(|received| received.message)
    }

    /// Sends a datagram that has no answer.
    pub(super) fn send_message<T: Serialize>(
        &self,
        message: &T,
        fds: &[BorrowedFd<'_>],
        timeout: Duration,
    ) -> Result<(), ControlError> {
        self.send(message, fds, Instant::now() + timeout, timeout)
    }

    /// Waits for a datagram, at most for `timeout`.
    pub(super) fn receive_within<T: DeserializeOwned>(
        &self,
        timeout: Duration,
    ) -> Result<Received<T>, ControlError> {
        let until = Instant::now() + timeout;
        loop {
            if let Some(received) = self.receive::<T>()? {
                return Ok(received);
            }
            self.wait(PollFlags::IN, until, timeout)?;
        }
    }

    fn send<T: Serialize>(
        &self,
        message: &T,
        fds: &[BorrowedFd<'_>],
        until: Instant,
        timeout: Duration,
    ) -> Result<(), ControlError> {
        let bytes =
            serde_json::to_vec(message).map_err(|e| ControlError::Garbage(e.to_string()))?;
        if bytes.len() > MAX_DATAGRAM || fds.len() > MAX_FDS {
            return Err(ControlError::Garbage(format!(
                "{} bytes and {} descriptors exceed the limits",
                bytes.len(),
                fds.len()
            )));
        }
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(ControlError::Garbage("too many descriptors".into()));
            }
            match sendmsg(
                &self.fd,
                &[IoSlice::new(&bytes)],
                &mut ancillary,
                SendFlags::NOSIGNAL,
            ) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, until, timeout)?,
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(ControlError::Gone),
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Returns the next datagram without waiting.
    ///
    /// # Errors
    /// [`ControlError::Gone`] at the end of the connection, [`ControlError::Garbage`] for an
    /// invalid datagram, [`ControlError::Io`] for errors of the system call.
    pub fn receive<T: DeserializeOwned>(&self) -> Result<Option<Received<T>>, ControlError> {
        let mut bytes = vec![0u8; MAX_DATAGRAM];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let got = loop {
            match recvmsg(
                &self.fd,
                &mut [IoSliceMut::new(&mut bytes)],
                &mut ancillary,
                RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC,
            ) {
                Ok(got) => break got,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::CONNRESET | Errno::PIPE) => return Err(ControlError::Gone),
                Err(e) => return Err(e.into()),
            }
        };
        let fds: Vec<OwnedFd> = ancillary
            .drain()
            .filter_map(|m| match m {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .collect();
        if got.bytes == 0 {
            return Err(ControlError::Gone);
        }
        if got
            .flags
            .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
        {
            return Err(ControlError::Garbage(
                "a datagram exceeds the limits".into(),
            ));
        }
        let message = serde_json::from_slice(&bytes[..got.bytes])
            .map_err(|e| ControlError::Garbage(e.to_string()))?;
        Ok(Some(Received { message, fds }))
    }

    fn wait(&self, what: PollFlags, until: Instant, timeout: Duration) -> Result<(), ControlError> {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ControlError::Timeout(timeout));
        }
        Ok(poll::wait(&mut [PollFd::new(&self.fd, what)], Some(left))?)
    }
}

/// The worker's side: the listening socket and its connections.
#[derive(Debug)]
pub struct Inbox {
    listener: Option<OwnedFd>,
    connections: Vec<Control>,
}

impl Inbox {
    /// Uses this listening socket.
    #[must_use]
    pub fn new(listener: OwnedFd) -> Self {
        Self {
            listener: Some(listener),
            connections: Vec::new(),
        }
    }

    /// Uses only this connection, for tests.
    #[must_use]
    pub fn single(connection: Control) -> Self {
        Self {
            listener: None,
            connections: vec![connection],
        }
    }

    /// The descriptors to poll before [`Inbox::next`].
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.listener
            .iter()
            .map(AsFd::as_fd)
            .chain(self.connections.iter().map(AsFd::as_fd))
    }

    /// Returns the next order and the index of its connection, without waiting. A connection that breaks or sends an
    /// invalid order is closed; the others stay.
    #[allow(
        clippy::should_implement_trait,
        reason = "an order has to be answered before the next one is taken"
    )]
    pub fn next(&mut self) -> Option<(Received<Order>, usize)> {
        self.accept();
        let mut i = 0;
        while i < self.connections.len() {
            match self.connections[i].receive::<Order>() {
                Ok(Some(received)) => {
                    if received.fds.len() == received.message.descriptors() {
                        return Some((received, i));
                    }
                    self.connections.remove(i);
                }
                Ok(None) => i += 1,
                Err(_) => {
                    self.connections.remove(i);
                }
            }
        }
        None
    }

    /// Answers an order that [`Inbox::next`] returned, before the next call of it.
    pub fn answer(&mut self, to: usize, report: &Report) {
        let timeout = Duration::from_secs(1);
        let Some(connection) = self.connections.get(to) else {
            return;
        };
        if connection
            .send(report, &[], Instant::now() + timeout, timeout)
            .is_err()
        {
            self.connections.remove(to);
        }
    }

    /// Handles orders until [`Order::Quit`], for a worker whose other threads do the rest.
    ///
    /// # Errors
    /// When `poll` fails.
    pub fn serve(&mut self, mut obey: impl FnMut(Order, Vec<OwnedFd>) -> Report) -> io::Result<()> {
        loop {
            while let Some((received, from)) = self.next() {
                let quit = matches!(received.message, Order::Quit { .. });
                let report = obey(received.message, received.fds);
                self.answer(from, &report);
                if quit {
                    return Ok(());
                }
            }
            let mut sockets: Vec<PollFd<'_>> = self
                .fds()
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
                .collect();
            poll::wait(&mut sockets, None)?;
        }
    }

    fn accept(&mut self) {
        let Some(listener) = &self.listener else {
            return;
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        while let Ok(fd) = accept_with(listener, flags) {
            if self.connections.len() == MAX_CONNECTIONS {
                // The oldest connection usually belongs to a daemon that has ended.
                self.connections.remove(0);
            }
            self.connections.push(Control::from_fd(fd));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};

    const REPORT_TIMEOUT: Duration = Duration::from_secs(5);

    #[test]
    fn descriptors_come_in_their_order_and_the_report_goes_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.sock");
        let mut inbox = Inbox::new(listen(&path).unwrap());
        let worker = std::thread::spawn(move || {
            loop {
                if let Some((mut got, to)) = inbox.next() {
                    let mut text = String::new();
                    for fd in got.fds.drain(..) {
                        let mut file = std::fs::File::from(fd);
                        file.rewind().unwrap();
                        file.read_to_string(&mut text).unwrap();
                    }
                    inbox.answer(to, &Report::Failed { why: text });
                    return got.message;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let file = |text: &str| {
            let mut f = tempfile::tempfile().unwrap();
            f.write_all(text.as_bytes()).unwrap();
            f
        };
        let (a, b) = (file("a"), file("b"));
        let control = Control::connect(&path).unwrap();
        let order = Order::Datanode { name: "dn1".into() };
        let report = control
            .order(&order, &[a.as_fd(), b.as_fd()], REPORT_TIMEOUT)
            .unwrap();
        assert_eq!(report, Report::Failed { why: "ab".into() });
        assert_eq!(worker.join().unwrap(), order);
    }

    #[test]
    fn the_socket_is_for_its_owner_alone() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.sock");
        let _listener = listen(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_worker_that_hangs_or_is_gone_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.sock");
        let listener = listen(&path).unwrap();
        let control = Control::connect(&path).unwrap();
        let hangs = control.order(&Order::Stat, &[], Duration::from_millis(20));
        assert!(matches!(hangs, Err(ControlError::Timeout(_))), "{hangs:?}");
        drop(listener);
        let gone = control.order(&Order::Stat, &[], REPORT_TIMEOUT);
        assert!(gone.is_err());
        assert!(Control::connect(&path).is_err());
    }

    #[test]
    fn an_invalid_order_closes_only_its_connection() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.sock");
        let mut inbox = Inbox::new(listen(&path).unwrap());
        let bad = Control::connect(&path).unwrap();
        let good = Control::connect(&path).unwrap();
        rustix::net::send(&bad.fd, b"{\"order\":\"fly\"}", SendFlags::NOSIGNAL).unwrap();
        good.send(&Order::Stat, &[], Instant::now(), REPORT_TIMEOUT)
            .unwrap();
        let (got, to) = inbox.next().unwrap();
        assert_eq!(got.message, Order::Stat);
        inbox.answer(to, &Report::Done);
        assert_eq!(
            good.receive::<Report>().unwrap().unwrap().message,
            Report::Done
        );
        assert!(matches!(bad.receive::<Report>(), Err(ControlError::Gone)));
    }

    #[test]
    fn an_order_without_its_descriptors_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.sock");
        let mut inbox = Inbox::new(listen(&path).unwrap());
        let control = Control::connect(&path).unwrap();
        control
            .send(&Order::Channel, &[], Instant::now(), REPORT_TIMEOUT)
            .unwrap();
        assert!(inbox.next().is_none());
    }
}
