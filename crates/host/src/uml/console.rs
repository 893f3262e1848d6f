// SPDX-License-Identifier: Apache-2.0
//! The management console of a UML guest: a datagram socket in its umid folder, on which its kernel takes `config` and
//! `remove` commands for devices (arch/um/drivers/mconsole_kern.c).
//!
//! The answer goes to an abstract socket name, so the caller must be in the network namespace of the guest's process.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, recv,
    sendto, socket_with,
};

/// First word of each request.
const MAGIC: u32 = 0xcafe_babe;
/// Version of the protocol.
const VERSION: u32 = 2;
/// Most bytes of text in a request or in one part of an answer, with the final zero.
const MAX_TEXT_BYTES: usize = 512;
/// Bytes before the text in a request and in an answer.
const HEADER_BYTES: usize = 12;
/// Most parts of one answer.
const MAX_PARTS: usize = 64;

/// A guest's console.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Console(PathBuf);

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum ConsoleError {
    /// The socket failed.
    #[error("the guest's console: {0}")]
    Socket(#[from] io::Error),
    /// The guest's kernel refused; its message.
    #[error("the guest's kernel: {0}")]
    Refused(String),
}

impl Console {
    /// The console in this umid folder ([`crate::sockets::uml_folder`]).
    #[must_use]
    pub fn of(folder: &Path) -> Self {
        Self(folder.join("mconsole"))
    }

    /// Sends a command; returns the socket to which the kernel answers.
    ///
    /// # Errors
    /// [`ConsoleError::Socket`].
    pub fn send(&self, text: &str) -> Result<OwnedFd, ConsoleError> {
        if text.len() >= MAX_TEXT_BYTES || text.contains(['\0', '\n']) {
            let what = "the command is too long or has a line end";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what).into());
        }
        // By a descriptor: the path may be too long for a socket address.
        let node = rustix::fs::open(&self.0, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .map_err(io::Error::from)?;
        let there = SocketAddrUnix::new(format!("/proc/self/fd/{}", node.as_raw_fd()))
            .map_err(io::Error::from)?;
        let socket = reply_socket().map_err(io::Error::from)?;
        let mut request = Vec::with_capacity(HEADER_BYTES + MAX_TEXT_BYTES);
        for word in [MAGIC, VERSION, text.len() as u32] {
            request.extend(word.to_ne_bytes());
        }
        request.extend(text.as_bytes());
        request.resize(HEADER_BYTES + MAX_TEXT_BYTES, 0);
        sendto(&socket, &request, SendFlags::empty(), &there).map_err(io::Error::from)?;
        Ok(socket)
    }
}

/// Reads the kernel's text. `timeout` is for each part of the answer.
///
/// # Errors
/// [`ConsoleError`]; [`io::ErrorKind::TimedOut`] when the guest's kernel does not answer in time.
pub fn read_answer(socket: BorrowedFd<'_>, timeout: Duration) -> Result<String, ConsoleError> {
    join(|| answer(socket, timeout))
}

/// Joins the parts of an answer.
fn join(
    mut next: impl FnMut() -> io::Result<(bool, bool, String)>,
) -> Result<String, ConsoleError> {
    let mut words = String::new();
    for _ in 0..MAX_PARTS {
        let (failed, more, part) = next()?;
        words.push_str(&part);
        match (failed, more) {
            (_, true) => {}
            (false, false) => return Ok(words),
            (true, false) => {
                return Err(ConsoleError::Refused(crate::vm::printable(words.trim())));
            }
        }
    }
    Err(io::Error::from(io::ErrorKind::InvalidData).into())
}

/// The answer in these datagrams.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn answer_of<'a>(
    mut datagrams: impl Iterator<Item = &'a [u8]>,
) -> Result<String, ConsoleError> {
    join(|| {
        let bytes = datagrams.next().ok_or(io::ErrorKind::TimedOut)?;
        read(bytes).ok_or_else(|| io::ErrorKind::InvalidData.into())
    })
}

/// A socket with an abstract name, to which the guest answers.
fn reply_socket() -> rustix::io::Result<OwnedFd> {
    let (kind, flags) = (SocketType::DGRAM, SocketFlags::CLOEXEC);
    let socket = socket_with(AddressFamily::UNIX, kind, flags, None)?;
    let name = format!(
        "viola-console-{}-{}",
        std::process::id(),
        socket.as_raw_fd()
    );
    bind(
        &socket,
        &SocketAddrUnix::new_abstract_name(name.as_bytes())?,
    )?;
    Ok(socket)
}

fn answer(socket: BorrowedFd<'_>, timeout: Duration) -> io::Result<(bool, bool, String)> {
    let wait = Timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: timeout.subsec_nanos().into(),
    };
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
    if poll(&mut fds, Some(&wait))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let mut bytes = [0; HEADER_BYTES + MAX_TEXT_BYTES];
    let (count, _) = recv(socket, &mut bytes, RecvFlags::empty())?;
    read(&bytes[..count]).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Whether the command failed, whether more parts follow, and the text.
fn read(bytes: &[u8]) -> Option<(bool, bool, String)> {
    let word = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let (failed, more, length) = (word(0)?, word(4)?, word(8)? as usize);
    let text = bytes.get(HEADER_BYTES..HEADER_BYTES + length.min(MAX_TEXT_BYTES))?;
    let text = text.split(|b| *b == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(text).into_owned();
    Some((failed != 0, more != 0, text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixDatagram;

    fn part(failed: u32, more: u32, text: &str) -> Vec<u8> {
        let mut bytes = Vec::new();
        for word in [failed, more, text.len() as u32 + 1] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(text.as_bytes());
        bytes.resize(HEADER_BYTES + MAX_TEXT_BYTES, 0);
        bytes
    }

    #[test]
    fn an_answer_is_joined_from_parts_and_a_refusal_has_the_kernels_text() {
        let folder = tempfile::tempdir().unwrap();
        let there = UnixDatagram::bind(folder.path().join("mconsole")).unwrap();
        let guest = std::thread::spawn(move || {
            for parts in [
                vec![part(0, 1, "a "), part(0, 0, "b")],
                vec![part(1, 0, "no\n")],
            ] {
                let mut asked = [0; HEADER_BYTES + MAX_TEXT_BYTES];
                let (count, from) = there.recv_from(&mut asked).unwrap();
                assert_eq!(count, HEADER_BYTES + MAX_TEXT_BYTES);
                assert_eq!(&asked[..4], &MAGIC.to_ne_bytes());
                assert_eq!(&asked[8..12], &7_u32.to_ne_bytes());
                assert_eq!(&asked[12..20], b"version\0");
                for part in parts {
                    there.send_to_addr(&part, &from).unwrap();
                }
            }
            there
        });
        let console = Console::of(folder.path());
        let command = |text: &str, timeout| {
            let socket = console.send(text)?;
            read_answer(socket.as_fd(), timeout)
        };
        let timeout = Duration::from_secs(20);
        assert_eq!(command("version", timeout).unwrap(), "a b");
        let error = command("version", timeout).unwrap_err();
        assert_eq!(error.to_string(), "the guest's kernel: no");
        let _there = guest.join().unwrap();
        let short = Duration::from_millis(20);
        let error = command("version", short).unwrap_err();
        assert!(matches!(error, ConsoleError::Socket(e) if e.kind() == io::ErrorKind::TimedOut));
        assert!(console.send(&"x".repeat(MAX_TEXT_BYTES)).is_err());
    }

    #[test]
    fn a_malformed_answer_is_refused() {
        assert_eq!(read(&[0; 11]), None);
        let mut long = part(0, 0, "x");
        long[8..12].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert_eq!(read(&long).unwrap().2, "x");
        assert_eq!(read(&long[..20]), None);
    }
}
