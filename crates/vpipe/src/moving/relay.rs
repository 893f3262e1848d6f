// SPDX-License-Identifier: Apache-2.0
//! What a connection brings, down another one.

use std::io;
use std::os::fd::BorrowedFd;

use super::tube::Tube;
use super::{Fault, Turn};

/// Bytes on their way from one socket to another.
#[derive(Debug)]
pub struct Relaying {
    tube: Tube,
    /// To be taken from the source.
    wanted: u64,
    moved: u64,
}

impl Relaying {
    /// `length` bytes, or those up to the source's end where that comes first.
    ///
    /// # Errors
    /// That there is no descriptor left.
    pub fn new(length: u64) -> io::Result<Self> {
        Ok(Self {
            tube: Tube::new()?,
            wanted: length,
            moved: 0,
        })
    }

    /// Bytes that are in the sink's hands.
    pub fn moved(&self) -> u64 {
        self.moved
    }

    /// Bytes that are still to be given to the sink.
    pub fn left(&self) -> u64 {
        self.wanted + self.tube.held()
    }

    /// Whether it has bytes that the source gave and the sink did not take yet.
    pub fn holds(&self) -> bool {
        self.tube.held() > 0
    }

    /// Takes no more from the source than it has given already.
    pub fn stop(&mut self) {
        self.wanted = 0;
    }

    /// Moves up to `budget` bytes between sockets that do not block.
    ///
    /// # Errors
    /// Of one of the connections.
    pub fn turn(
        &mut self,
        source: BorrowedFd<'_>,
        sink: BorrowedFd<'_>,
        budget: u64,
    ) -> Result<Turn, Fault> {
        let begun = self.moved;
        loop {
            while self.tube.held() > 0 {
                match self.tube.empty(sink) {
                    Ok(gone) => self.moved += gone,
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Turn::Full),
                    Err(e) => return Err(Fault::Sink(e)),
                }
            }
            if self.wanted == 0 {
                return Ok(Turn::Done);
            }
            if self.moved - begun >= budget {
                return Ok(Turn::More);
            }
            match self.tube.fill(source, self.wanted) {
                Ok(0) => return Ok(Turn::Ended),
                Ok(got) => self.wanted -= got,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Turn::Empty),
                Err(e) => return Err(Fault::Source(e)),
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

    fn run(relaying: &mut Relaying, source: &TcpStream, sink: &TcpStream) -> Result<Turn, Fault> {
        loop {
            match relaying.turn(source.as_fd(), sink.as_fd(), 1 << 20)? {
                Turn::Full | Turn::Empty => std::thread::yield_now(),
                Turn::More => {}
                over => return Ok(over),
            }
        }
    }

    fn bytes(size: usize) -> Vec<u8> {
        (0..size).map(|at| (at * 7 / 5) as u8).collect()
    }

    #[test]
    fn exactly_so_many_bytes_go_and_the_rest_stays_with_the_source() {
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
        let mut relaying = Relaying::new(5_000_000).unwrap();
        assert_eq!(run(&mut relaying, &source, &sink).unwrap(), Turn::Done);
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
    fn the_end_of_the_source_and_a_stop_leave_nothing_on_the_way() {
        let ((mut from, source), (mut to, sink)) = (sockets(), sockets());
        from.write_all(b"all there is").unwrap();
        from.shutdown(Shutdown::Write).unwrap();
        let mut relaying = Relaying::new(u64::MAX).unwrap();
        assert_eq!(run(&mut relaying, &source, &sink).unwrap(), Turn::Ended);
        assert_eq!(relaying.moved(), 12);
        let mut got = [0; 12];
        to.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"all there is");

        // a sink that does not read: what is on the way is brought there when it does
        let ((mut from, source), (mut to, sink)) = (sockets(), sockets());
        let all = bytes(32 << 20);
        let sent = all.clone();
        std::thread::spawn(move || from.write_all(&sent));
        let mut relaying = Relaying::new(u64::MAX).unwrap();
        let mut full = 0;
        while full < 100 {
            let turn = relaying.turn(source.as_fd(), sink.as_fd(), u64::MAX);
            full += u32::from(turn.unwrap() == Turn::Full);
            std::thread::yield_now();
        }
        relaying.stop();
        assert!(relaying.left() > 0);
        let reader = std::thread::spawn(move || {
            let mut got = Vec::new();
            to.read_to_end(&mut got).unwrap();
            got
        });
        assert_eq!(run(&mut relaying, &source, &sink).unwrap(), Turn::Done);
        drop(sink);
        let got = reader.join().unwrap();
        assert_eq!(got.len() as u64, relaying.moved());
        assert!(got == all[..got.len()]);
    }

    #[test]
    fn it_is_known_which_end_has_failed() {
        let ((_from, source), (to, sink)) = (sockets(), sockets());
        rustix::net::sockopt::set_socket_linger(&to, Some(std::time::Duration::ZERO)).unwrap();
        drop(to);
        (&_from).write_all(&[7; 1000]).unwrap();
        let mut relaying = Relaying::new(1000).unwrap();
        let fault = run(&mut relaying, &source, &sink).unwrap_err();
        assert!(matches!(fault, Fault::Sink(_)), "{fault}");

        let ((from, source), (_to, sink)) = (sockets(), sockets());
        rustix::net::sockopt::set_socket_linger(&from, Some(std::time::Duration::ZERO)).unwrap();
        drop(from);
        let mut relaying = Relaying::new(1000).unwrap();
        let fault = run(&mut relaying, &source, &sink).unwrap_err();
        assert!(matches!(fault, Fault::Source(_)), "{fault}");
    }
}
