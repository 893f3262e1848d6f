// SPDX-License-Identifier: Apache-2.0
//! Moves received bytes of a socket to another socket.

use std::io;
use std::os::fd::BorrowedFd;

use super::splice_pipe::SplicePipe;
use super::{StepOutcome, TransferError};

/// A transfer from one socket to another.
#[derive(Debug)]
pub struct SocketToSocket {
    pipe: SplicePipe,
    /// Bytes still to be taken from the source.
    wanted: u64,
    moved: u64,
}

impl SocketToSocket {
    /// A transfer of `length` bytes, or up to the source's end where that comes first.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(length: u64) -> io::Result<Self> {
        Ok(Self {
            pipe: SplicePipe::new()?,
            wanted: length,
            moved: 0,
        })
    }

    /// Bytes that the sink has accepted.
    pub fn moved(&self) -> u64 {
        self.moved
    }

    /// Bytes that the sink has not accepted yet.
    pub fn left(&self) -> u64 {
        self.wanted + self.pipe.len()
    }

    /// Whether it has bytes that the source gave and the sink has not accepted yet.
    pub fn has_buffered(&self) -> bool {
        self.pipe.len() > 0
    }

    /// Takes no more bytes from the source.
    pub fn stop(&mut self) {
        self.wanted = 0;
    }

    /// Moves up to `budget` bytes between non-blocking sockets.
    ///
    /// # Errors
    /// Of one of the connections.
    pub fn step(
        &mut self,
        source: BorrowedFd<'_>,
        sink: BorrowedFd<'_>,
        budget: u64,
    ) -> Result<StepOutcome, TransferError> {
        let begun = self.moved;
        loop {
            while self.pipe.len() > 0 {
                match self.pipe.drain_to_socket(sink) {
                    Ok(gone) => self.moved += gone,
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                        return Ok(StepOutcome::SinkFull);
                    }
                    Err(e) => return Err(TransferError::Sink(e)),
                }
            }
            if self.wanted == 0 {
                return Ok(StepOutcome::Done);
            }
            if self.moved - begun >= budget {
                return Ok(StepOutcome::BudgetUsed);
            }
            match self.pipe.fill(source, self.wanted) {
                Ok(0) => return Ok(StepOutcome::SourceEnded),
                Ok(got) => self.wanted -= got,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(StepOutcome::SourceEmpty);
                }
                Err(e) => return Err(TransferError::Source(e)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::fd::AsFd;

    /// Two ends; the second one does not block.
    fn sockets() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (near, _) = listener.accept().unwrap();
        near.set_nonblocking(true).unwrap();
        (far, near)
    }

    fn run(
        relaying: &mut SocketToSocket,
        source: &TcpStream,
        sink: &TcpStream,
    ) -> Result<StepOutcome, TransferError> {
        loop {
            match relaying.step(source.as_fd(), sink.as_fd(), 1 << 20)? {
                StepOutcome::SinkFull | StepOutcome::SourceEmpty => std::thread::yield_now(),
                StepOutcome::BudgetUsed => {}
                over => return Ok(over),
            }
        }
    }

    fn bytes(size: usize) -> Vec<u8> {
        (0..size).map(|at| (at * 7 / 5) as u8).collect()
    }

    #[test]
    fn bytes_beyond_the_length_stay_in_the_source() {
        let ((mut from, source), (mut to, sink)) = (sockets(), sockets());
        let all = bytes(5_000_100);
        let sent = all.clone();
        let writer = std::thread::spawn(move || {
            from.write_all(&sent).unwrap();
            from
        });
        let reader = std::thread::spawn(move || {
            let mut got = Vec::new();
            to.read_to_end(&mut got).unwrap();
            got
        });
        let mut relaying = SocketToSocket::new(5_000_000).unwrap();
        assert_eq!(
            run(&mut relaying, &source, &sink).unwrap(),
            StepOutcome::Done
        );
        assert_eq!((relaying.moved(), relaying.left()), (5_000_000, 0));
        drop(sink);
        assert!(reader.join().unwrap() == all[..5_000_000]);
        let _from = writer.join().unwrap();
        let mut rest = [0; 100];
        source.set_nonblocking(false).unwrap();
        (&source).read_exact(&mut rest).unwrap();
        assert_eq!(rest, all[5_000_000..]);
    }

    #[test]
    fn an_ended_source_and_a_stop_leave_no_bytes_in_the_pipe() {
        let ((mut from, source), (mut to, sink)) = (sockets(), sockets());
        from.write_all(b"all there is").unwrap();
        from.shutdown(Shutdown::Write).unwrap();
        let mut relaying = SocketToSocket::new(u64::MAX).unwrap();
        assert_eq!(
            run(&mut relaying, &source, &sink).unwrap(),
            StepOutcome::SourceEnded
        );
        assert_eq!(relaying.moved(), 12);
        let mut got = [0; 12];
        to.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"all there is");

        // a sink that does not read: what is on the way is brought there when it does
        let ((mut from, source), (mut to, sink)) = (sockets(), sockets());
        let all = bytes(32 << 20);
        let sent = all.clone();
        std::thread::spawn(move || from.write_all(&sent));
        let mut relaying = SocketToSocket::new(u64::MAX).unwrap();
        let mut full = 0;
        while full < 100 {
            let turn = relaying.step(source.as_fd(), sink.as_fd(), u64::MAX);
            full += u32::from(turn.unwrap() == StepOutcome::SinkFull);
            std::thread::yield_now();
        }
        relaying.stop();
        assert!(relaying.left() > 0);
        let reader = std::thread::spawn(move || {
            let mut got = Vec::new();
            to.read_to_end(&mut got).unwrap();
            got
        });
        assert_eq!(
            run(&mut relaying, &source, &sink).unwrap(),
            StepOutcome::Done
        );
        drop(sink);
        let got = reader.join().unwrap();
        assert_eq!(got.len() as u64, relaying.moved());
        assert!(got == all[..got.len()]);
    }

    #[test]
    fn an_error_names_the_failed_end() {
        let ((_from, source), (to, sink)) = (sockets(), sockets());
        rustix::net::sockopt::set_socket_linger(&to, Some(std::time::Duration::ZERO)).unwrap();
        drop(to);
        (&_from).write_all(&[7; 1000]).unwrap();
        let mut relaying = SocketToSocket::new(1000).unwrap();
        let fault = run(&mut relaying, &source, &sink).unwrap_err();
        assert!(matches!(fault, TransferError::Sink(_)), "{fault}");

        let ((from, source), (_to, sink)) = (sockets(), sockets());
        rustix::net::sockopt::set_socket_linger(&from, Some(std::time::Duration::ZERO)).unwrap();
        drop(from);
        let mut relaying = SocketToSocket::new(1000).unwrap();
        let fault = run(&mut relaying, &source, &sink).unwrap_err();
        assert!(matches!(fault, TransferError::Source(_)), "{fault}");
    }
}
