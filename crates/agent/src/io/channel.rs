// SPDX-License-Identifier: Apache-2.0
//! The byte stream to the host: a serial line, a virtio-serial port or a unix socket.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use rustix::fs::{Mode, OFlags};
use rustix::termios::{OptionalActions, isatty, tcgetattr, tcsetattr};
use viola_proto::agent::SERIAL_LINE_BYTES;

/// Address of the host's end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A serial line or a virtio-serial port.
    Device(PathBuf),
    /// A unix socket.
    Unix(PathBuf),
}

impl Address {
    /// Parses `/dev/...` or `unix:PATH`.
    ///
    /// # Errors
    /// One sentence that names the two forms.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (unix, path) = match text.strip_prefix("unix:") {
            Some(path) => (true, PathBuf::from(path)),
            None => (false, PathBuf::from(text)),
        };
        if !path.is_absolute() {
            return Err(format!(
                "`{text}` must be a device such as /dev/virtio-ports/org.viola.agent.0, or unix:PATH"
            ));
        }
        Ok(if unix {
            Self::Unix(path)
        } else {
            Self::Device(path)
        })
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Device(path) => path.display().fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// An open stream. Reads and writes never block.
#[derive(Debug)]
pub struct Channel {
    stream: File,
    is_line: bool,
}

impl Channel {
    /// Opens the stream. A port opens although the host has not opened its end.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn open(address: &Address) -> std::io::Result<Self> {
        let mut is_line = false;
        let fd: OwnedFd = match address {
            Address::Device(path) => {
                let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
                let fd = rustix::fs::open(path, flags, Mode::empty())?;
                is_line = isatty(&fd);
                if is_line {
                    let mut modes = tcgetattr(&fd)?;
                    modes.make_raw();
                    tcsetattr(&fd, OptionalActions::Now, &modes)?;
                }
                fd
            }
            Address::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_nonblocking(true)?;
                stream.into()
            }
        };
        Ok(Self {
            stream: fd.into(),
            is_line,
        })
    }

    /// How many bytes the host may send before the agent reads them; 0: no limit.
    pub fn window(&self) -> u32 {
        if self.is_line { SERIAL_LINE_BYTES } else { 0 }
    }
}

impl Read for Channel {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.stream.read(bytes)
    }
}

impl Write for Channel {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        // a serial line with a full buffer accepts 0 bytes
        match self.stream.write(bytes) {
            Ok(0) if !bytes.is_empty() => Err(ErrorKind::WouldBlock.into()),
            other => other,
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_by_kind() {
        assert_eq!(
            Address::parse("/dev/ttyS2").unwrap(),
            Address::Device("/dev/ttyS2".into())
        );
        assert_eq!(
            Address::parse("unix:/run/x").unwrap().to_string(),
            "unix:/run/x"
        );
        for bad in ["", "ttyS2", "vsock:2:5001", "unix:x"] {
            assert!(Address::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn only_a_serial_line_has_a_window() {
        // the terminal of a pseudoterminal stands for a serial line
        let open = rustix::pty::openpt(rustix::pty::OpenptFlags::RDWR).unwrap();
        rustix::pty::grantpt(&open).unwrap();
        rustix::pty::unlockpt(&open).unwrap();
        let name = rustix::pty::ptsname(&open, Vec::new()).unwrap();
        let address = Address::Device(name.into_string().unwrap().into());
        assert_eq!(Channel::open(&address).unwrap().window(), SERIAL_LINE_BYTES);
        let null = Address::Device("/dev/null".into());
        assert_eq!(Channel::open(&null).unwrap().window(), 0);
    }

    #[test]
    fn a_stream_without_data_does_not_block() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let mut channel = Channel::open(&Address::Unix(path)).unwrap();
        assert_eq!(
            channel.read(&mut [0; 8]).unwrap_err().kind(),
            ErrorKind::WouldBlock
        );
        let (mut host, _) = listener.accept().unwrap();
        host.write_all(b"x").unwrap();
        assert_eq!(channel.read(&mut [0; 8]).unwrap(), 1);
        drop(host);
        assert_eq!(channel.read(&mut [0; 8]).unwrap(), 0);
    }
}
