// SPDX-License-Identifier: Apache-2.0
//! The host end of a guest's agent line: a unix socket in the guest's management folder.
//!
//! The guest has a serial line, which knows no connections: what the guest sends while no client is
//! connected is lost. One client at a time is served; the next one after it has closed.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Name of the socket.
pub(crate) const SOCKET: &str = "agent";

/// Bytes buffered in each direction.
const BUFFER_BYTES: usize = 64 << 10;

/// A relay between a line and its socket. Dropping it ends the relay.
pub(crate) struct Relay {
    line: UnixStream,
    up: UnixStream,
}

impl Relay {
    /// Starts to relay between `line` and a socket in `folder`. The guest's kernel creates that
    /// folder when it boots, and empties it when it ends or reboots; the handle of [`Relay::up`]
    /// makes the socket again.
    pub(crate) fn new(line: UnixStream, folder: &Path) -> std::io::Result<Self> {
        line.set_nonblocking(true)?;
        let (up, booted) = UnixStream::pair()?;
        booted.set_nonblocking(true)?;
        let task = Task {
            line: line.try_clone()?,
            booted,
            path: folder.join(SOCKET),
            listener: None,
            client: None,
            to_client: Vec::new(),
            to_line: Vec::new(),
        };
        std::thread::Builder::new()
            .name("viola-lab-agent".into())
            .spawn(move || task.run())?;
        Ok(Self { line, up })
    }

    /// A function to call whenever the guest has booted.
    pub(crate) fn up(&self) -> std::io::Result<impl Fn() + Send + 'static> {
        let up = self.up.try_clone()?;
        Ok(move || drop((&up).write(b"u")))
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.line.shutdown(std::net::Shutdown::Both);
        let _ = self.up.shutdown(std::net::Shutdown::Both);
    }
}

struct Task {
    line: UnixStream,
    booted: UnixStream,
    path: PathBuf,
    listener: Option<UnixListener>,
    client: Option<UnixStream>,
    to_client: Vec<u8>,
    to_line: Vec<u8>,
}

impl Task {
    fn run(mut self) {
        while self.step().is_ok() {}
        let _ = std::fs::remove_file(&self.path);
    }

    /// Waits for an event and handles it. An error ends the relay.
    fn step(&mut self) -> std::io::Result<()> {
        let when = |flag, condition| match condition {
            true => flag,
            false => PollFlags::empty(),
        };
        let (line_full, client_full) = (!self.to_line.is_empty(), !self.to_client.is_empty());
        let line = when(PollFlags::IN, !client_full) | when(PollFlags::OUT, line_full);
        let mut fds = vec![
            PollFd::new(&self.booted, PollFlags::IN),
            PollFd::new(&self.line, line),
        ];
        if let Some(listener) = &self.listener {
            fds.push(PollFd::new(listener, PollFlags::IN));
        }
        if let Some(client) = &self.client {
            let flags = when(PollFlags::IN, !line_full) | when(PollFlags::OUT, client_full);
            fds.push(PollFd::new(client, flags));
        }
        match poll(&mut fds, None::<&Timespec>) {
            Err(rustix::io::Errno::INTR) => return Ok(()),
            other => other?,
        };
        drop(fds);
        self.on_boot()?;
        self.read_client();
        self.accept();
        self.read_line()?;
        self.write()
    }

    /// Makes the socket if the guest has booted: its folder exists then.
    fn on_boot(&mut self) -> std::io::Result<()> {
        let mut bytes = [0; 16];
        match (&self.booted).read(&mut bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(_) => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(e) => return Err(e),
        }
        let there = std::fs::symlink_metadata(&self.path).is_ok_and(|m| m.file_type().is_socket());
        if self.listener.is_none() || !there {
            let _ = std::fs::remove_file(&self.path);
            self.listener = UnixListener::bind(&self.path).ok();
            if let Some(listener) = &self.listener {
                listener.set_nonblocking(true)?;
                std::fs::set_permissions(&self.path, PermissionsExt::from_mode(0o600))?;
            }
        }
        Ok(())
    }

    fn read_client(&mut self) {
        let Some(mut client) = self.client.as_ref() else {
            return;
        };
        if !self.to_line.is_empty() {
            return;
        }
        let mut bytes = vec![0; BUFFER_BYTES];
        match client.read(&mut bytes) {
            Ok(0) => self.hang_up(),
            Ok(count) => self.to_line.extend_from_slice(&bytes[..count]),
            Err(e) if would_block(&e) => {}
            Err(_) => self.hang_up(),
        }
    }

    fn accept(&mut self) {
        while let Some(Ok((client, _))) = self.listener.as_ref().map(UnixListener::accept) {
            // the client may have closed after this thread was woken
            if self.client.as_ref().is_some_and(hung_up) {
                self.hang_up();
            }
            if self.client.is_none() && client.set_nonblocking(true).is_ok() {
                self.client = Some(client);
            }
        }
    }

    fn read_line(&mut self) -> std::io::Result<()> {
        if !self.to_client.is_empty() {
            return Ok(());
        }
        let mut bytes = vec![0; BUFFER_BYTES];
        match (&self.line).read(&mut bytes) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                if self.client.is_some() {
                    self.to_client.extend_from_slice(&bytes[..count]);
                }
                Ok(())
            }
            Err(e) if would_block(&e) => Ok(()),
            Err(e) => Err(e),
        }
    }

    fn write(&mut self) -> std::io::Result<()> {
        write_some(&self.line, &mut self.to_line)?;
        if !self.to_client.is_empty() && hung_up(&self.line) {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        if let Some(client) = &self.client
            && (write_some(client, &mut self.to_client).is_err()
                || !self.to_line.is_empty() && hung_up(client))
        {
            self.hang_up();
        }
        Ok(())
    }

    fn hang_up(&mut self) {
        self.client = None;
        self.to_client.clear();
        self.to_line.clear();
    }
}

fn would_block(e: &std::io::Error) -> bool {
    matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn hung_up(client: &UnixStream) -> bool {
    let mut fds = [PollFd::new(client, PollFlags::empty())];
    let _ = poll(&mut fds, Some(&Timespec::default()));
    fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

/// Writes as much as the other side takes now.
fn write_some(mut to: &UnixStream, bytes: &mut Vec<u8>) -> std::io::Result<()> {
    while !bytes.is_empty() {
        match to.write(bytes) {
            Ok(count) => drop(bytes.drain(..count)),
            Err(e) if would_block(&e) => break,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    struct Wire {
        guest: UnixStream,
        relay: Relay,
        folder: tempfile::TempDir,
    }

    impl Wire {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let (line, guest) = UnixStream::pair().unwrap();
            guest
                .set_read_timeout(Some(Duration::from_secs(10)))
                .unwrap();
            let relay = Relay::new(line, folder.path()).unwrap();
            relay.up().unwrap()();
            Self {
                guest,
                relay,
                folder,
            }
        }

        fn connect(&self) -> UnixStream {
            let end = Instant::now() + Duration::from_secs(10);
            loop {
                match UnixStream::connect(self.folder.path().join(SOCKET)) {
                    Ok(client) => {
                        client
                            .set_read_timeout(Some(Duration::from_secs(10)))
                            .unwrap();
                        return client;
                    }
                    Err(e) => assert!(Instant::now() < end, "{e}"),
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }

        /// A client that the relay serves: its bytes reach the guest.
        fn served(&self) -> UnixStream {
            let client = self.connect();
            (&client).write_all(b"?").unwrap();
            assert_eq!(read_exact(&self.guest, 1), b"?");
            client
        }
    }

    fn read_exact(mut from: &UnixStream, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        from.read_exact(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn bytes_pass_both_ways_for_one_client_after_another() {
        let wire = Wire::new();
        for round in 0..20_u8 {
            let client = wire.served();
            (&wire.guest).write_all(&[b'a' + round]).unwrap();
            assert_eq!(read_exact(&client, 1), [b'a' + round]);
        }
    }

    #[test]
    fn a_second_client_is_refused() {
        let wire = Wire::new();
        let first = wire.served();
        let second = wire.connect();
        assert_eq!((&second).read(&mut [0; 1]).unwrap(), 0);
        (&wire.guest).write_all(b"x").unwrap();
        assert_eq!(read_exact(&first, 1), b"x");
    }

    #[test]
    fn earlier_bytes_are_dropped() {
        let wire = Wire::new();
        // more than all buffers hold
        (&wire.guest).write_all(&vec![b'o'; 2 << 20]).unwrap();
        let client = loop {
            let client = wire.served();
            (&wire.guest).write_all(b"n").unwrap();
            if read_exact(&client, 1) == b"n" {
                break client;
            }
        };
        drop(client);
    }

    #[test]
    fn a_slow_client_gets_all_bytes() {
        let wire = Wire::new();
        let client = wire.served();
        let sent: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 251) as u8).collect();
        let (guest, all) = (wire.guest.try_clone().unwrap(), sent.clone());
        let writer = std::thread::spawn(move || (&guest).write_all(&all).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        assert!(read_exact(&client, sent.len()) == sent);
        writer.join().unwrap();
    }

    #[test]
    fn a_client_can_close_while_the_guest_does_not_read() {
        let wire = Wire::new();
        let client = wire.served();
        client.set_nonblocking(true).unwrap();
        let mut quiet = 0;
        while quiet < 5 {
            match (&client).write_all(&[b'z'; 4096]) {
                Ok(_) => quiet = 0,
                Err(_) => {
                    quiet += 1;
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
        drop(client);
        let next = wire.connect();
        let mut line = &wire.guest;
        std::thread::sleep(Duration::from_millis(50));
        (&wire.guest).write_all(b"h").unwrap();
        assert_eq!(read_exact(&next, 1), b"h");
        (&next).write_all(b"!").unwrap();
        let mut byte = [b'z'];
        while byte[0] == b'z' {
            line.read_exact(&mut byte).unwrap();
        }
        assert_eq!(byte[0], b'!');
    }

    #[test]
    fn the_socket_is_made_again_after_a_reboot() {
        let wire = Wire::new();
        drop(wire.served());
        std::fs::remove_file(wire.folder.path().join(SOCKET)).unwrap();
        wire.relay.up().unwrap()();
        drop(wire.served());
    }
}
