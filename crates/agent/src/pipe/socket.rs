// SPDX-License-Identifier: Apache-2.0
//! A program's TCP socket: extracts its connection, and restores it into the same socket.
//!
//! A socket in repair mode still receives and acknowledges segments: such bytes would be lost to the host. So a
//! socket filter drops all input while the connection is elsewhere, and the peer retransmits.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;

use rustix::net::ipproto;
use rustix::net::sockopt::socket_protocol;
use viola_handover::{
    SocketBuffers, disconnect_silently, disconnect_with_reset, endpoints, extract_between,
    from_wire, get_option, leave_repair_mode, peeks_from_start, restore_in_place, set_option,
    to_wire, unacknowledged_bytes,
};
use viola_proto::pipe::Connection;

use super::reason::Reason;

// include/uapi/asm-generic/socket.h
const SO_ATTACH_FILTER: i32 = 26;
const SO_DETACH_FILTER: i32 = 27;
const SO_GET_FILTER: i32 = SO_ATTACH_FILTER;
/// Since Linux 5.14; extracting a connection needs 5.15.
const SO_NETNS_COOKIE: i32 = 71;
// include/uapi/linux/tcp.h
const TCP_ULP: i32 = 31;

/// A program's TCP socket.
#[derive(Debug)]
pub struct Stream {
    socket: OwnedFd,
    extracted: Option<Extracted>,
}

/// What is needed to restore the connection later.
#[derive(Debug)]
struct Extracted {
    /// Local and peer address as the socket has them: on an IPv6 socket, IPv4 addresses are mapped.
    ends: Ends,
    buffers: SocketBuffers,
}

/// Local and peer address.
pub type Ends = (SocketAddr, SocketAddr);

/// The address as it is in the packets.
fn canonical(end: SocketAddr) -> SocketAddr {
    match end.ip().to_canonical() {
        ip @ IpAddr::V4(_) => SocketAddr::new(ip, end.port()),
        IpAddr::V6(_) => end,
    }
}

impl Stream {
    /// Takes a socket from a program.
    ///
    /// # Errors
    /// [`Reason::BadSocket`] when it is not a TCP socket in this network namespace, or has an upper-layer
    /// protocol (kernel TLS) or a filter.
    pub fn new(socket: OwnedFd) -> Result<Self, Reason> {
        let fd = socket.as_fd();
        let tcp = socket_protocol(fd) == Ok(Some(ipproto::TCP));
        // TCP_ULP needs room for the name; SO_GET_FILTER returns the number of instructions when there is no room
        let bare = get_option(fd, libc::IPPROTO_TCP, TCP_ULP, &mut [0_u8; 16]);
        let open = get_option::<u8>(fd, libc::SOL_SOCKET, SO_GET_FILTER, &mut []);
        let plain = bare.is_ok_and(|name| name == 0) && open.is_ok_and(|filter| filter == 0);
        match tcp && plain && is_in_own_netns(fd) {
            true => Ok(Self {
                socket,
                extracted: None,
            }),
            false => Err(Reason::BadSocket),
        }
    }

    /// Takes a socket from which bytes are to be read. Its peek offset must be off, so that MSG_PEEK starts at
    /// the first byte.
    ///
    /// # Errors
    /// As of [`Stream::new`].
    pub fn source(socket: OwnedFd) -> Result<Self, Reason> {
        let stream = Self::new(socket)?;
        match peeks_from_start(stream.fd()) {
            Ok(true) => Ok(stream),
            _ => Err(Reason::BadSocket),
        }
    }

    /// The socket.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether both are the same socket.
    pub fn is_same(&self, other: &Self) -> bool {
        let number = |stream: &Self| rustix::fs::fstat(&stream.socket).map(|stat| stat.st_ino);
        match (number(self), number(other)) {
            (Ok(one), Ok(two)) => one == two,
            _ => true,
        }
    }

    /// Bytes written and not yet acknowledged.
    ///
    /// # Errors
    /// [`Reason::BadSocket`]
    pub fn unacked_bytes(&self) -> Result<usize, Reason> {
        unacknowledged_bytes(self.socket.as_fd()).map_err(|_| Reason::BadSocket)
    }

    /// Local and peer address, as they are in the packets.
    ///
    /// # Errors
    /// [`Reason::BadSocket`] when it is not connected.
    pub fn ends(&self) -> Result<Ends, Reason> {
        self.socket_ends()
            .map(|(local, peer)| (canonical(local), canonical(peer)))
    }

    /// The same, as the socket has them.
    fn socket_ends(&self) -> Result<Ends, Reason> {
        endpoints(self.socket.as_fd()).map_err(|_| Reason::BadSocket)
    }

    /// Extracts the connection if `query` succeeds for its addresses. The socket then neither sends nor receives.
    ///
    /// # Errors
    /// The error of `query`, [`Reason::BadSocket`] or [`Reason::QueueTooLong`]. The socket is as it
    /// was.
    pub fn extract<T>(
        &mut self,
        query: impl FnOnce(Ends) -> Result<T, Reason>,
    ) -> Result<(Connection, T), Reason> {
        let ends = self.socket_ends()?;
        let answer = query((canonical(ends.0), canonical(ends.1)))?;
        let fd = self.socket.as_fd();
        block_input(fd).map_err(|_| Reason::BadSocket)?;
        let mut buffers = SocketBuffers::default();
        let connection = match extract_between(fd, ends) {
            Ok(taken) => {
                let state = taken.detach();
                buffers = state.buffers;
                to_wire(state).map_err(|_| {
                    let _ = leave_repair_mode(fd);
                    Reason::QueueTooLong
                })
            }
            Err(_) => Err(Reason::BadSocket),
        };
        if connection.is_err() {
            let _ = unblock_input(fd);
        }
        let mut connection = connection?;
        self.extracted = Some(Extracted { ends, buffers });
        connection.local = canonical(connection.local);
        connection.peer = canonical(connection.peer);
        Ok((connection, answer))
    }

    /// Lets an extracted connection continue in its socket.
    pub fn resume(&self) {
        // a socket that cannot be resumed is as good as closed
        let _ = unblock_input(self.socket.as_fd());
        let _ = leave_repair_mode(self.socket.as_fd());
    }

    /// Drops the connection without a packet; the program's socket becomes unconnected.
    pub fn drop_connection(&self) {
        let _ = disconnect_silently(self.socket.as_fd());
        let _ = unblock_input(self.socket.as_fd());
    }

    /// Resets the connection: the host, which had it, may be gone. When the host had sent more than this end
    /// knows, the peer asks once and is answered with a reset.
    pub fn reset(&self) {
        let _ = unblock_input(self.socket.as_fd());
        let _ = disconnect_with_reset(self.socket.as_fd());
    }

    /// Restores a connection that the host returned.
    ///
    /// When the peer has closed its direction meanwhile, the socket is shut down for reading: a read returns what
    /// is there, then the end of file, and writing still works.
    ///
    /// # Errors
    /// The kernel's error, or when the host returned another connection; the program then has no
    /// connection.
    pub fn restore(&self, mut connection: Connection) -> io::Result<()> {
        let fd = self.socket.as_fd();
        let extracted = self.extracted.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let (local, peer) = extracted.ends;
        if (connection.local, connection.peer) != (canonical(local), canonical(peer)) {
            return Err(io::Error::other("the host returned another connection"));
        }
        (connection.local, connection.peer) = (local, peer);
        let state = from_wire(connection);
        let ready = restore_in_place(fd, &state, extracted.buffers).map_err(io::Error::other)?;
        unblock_input(fd)?;
        ready.activate().map_err(io::Error::other)?;
        if state.peer_finished {
            rustix::net::shutdown(fd, rustix::net::Shutdown::Read)?;
        }
        Ok(())
    }
}

/// Attaches a filter that drops all input.
fn block_input(fd: BorrowedFd<'_>) -> io::Result<()> {
    // one instruction: return, keep 0 bytes
    let mut nothing = libc::sock_filter {
        code: (libc::BPF_RET | libc::BPF_K) as u16,
        jt: 0,
        jf: 0,
        k: 0,
    };
    let program = libc::sock_fprog {
        len: 1,
        filter: &raw mut nothing,
    };
    set_option(fd, libc::SOL_SOCKET, SO_ATTACH_FILTER, &[program])
}

/// Detaches the filter.
fn unblock_input(fd: BorrowedFd<'_>) -> io::Result<()> {
    set_option(fd, libc::SOL_SOCKET, SO_DETACH_FILTER, &[0_i32])
}

/// Whether a socket is in the agent's network namespace, whose addresses the host has.
fn is_in_own_netns(fd: BorrowedFd<'_>) -> bool {
    thread_local! {
        static HERE: Option<u64> = UnixDatagram::unbound().ok().and_then(|s| netns_cookie(s.as_fd()));
    }
    netns_cookie(fd).is_some_and(|there| HERE.with(|here| *here) == Some(there))
}

/// The cookie of a socket's network namespace, which is never reused.
fn netns_cookie(fd: BorrowedFd<'_>) -> Option<u64> {
    let mut cookie = [0_u64];
    let size = get_option(fd, libc::SOL_SOCKET, SO_NETNS_COOKIE, &mut cookie).ok()?;
    (size == 8).then_some(cookie[0])
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn pair(address: &str, to: &str) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(address).unwrap();
        let to = SocketAddr::new(to.parse().unwrap(), listener.local_addr().unwrap().port());
        let client = TcpStream::connect(to).unwrap();
        let server = listener.accept().unwrap().0;
        (client, server)
    }

    #[test]
    fn only_plain_tcp_sockets_are_accepted() {
        let (client, server) = pair("127.0.0.1:0", "127.0.0.1");
        assert!(Stream::new(server.try_clone().unwrap().into()).is_ok());
        block_input(client.as_fd()).unwrap();
        assert_eq!(Stream::new(client.into()).unwrap_err(), Reason::BadSocket);
        let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(Stream::new(udp.into()).unwrap_err(), Reason::BadSocket);
        let (unix, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(Stream::new(unix.into()).unwrap_err(), Reason::BadSocket);
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(Stream::new(null.into()).unwrap_err(), Reason::BadSocket);
        drop(server);
    }

    #[test]
    fn a_socket_of_another_network_namespace_is_recognised() {
        let other = viola_netdev::Netns::new().unwrap();
        let there = other.tcp_socket([127, 0, 0, 1].into()).unwrap();
        let here = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(is_in_own_netns(here.as_fd()));
        assert!(!is_in_own_netns(there.as_fd()));
    }

    #[test]
    fn a_socket_with_a_peek_offset_is_no_source() {
        let (mut client, server) = pair("127.0.0.1:0", "127.0.0.1");
        let five: i32 = 5;
        let done = set_option(&server, libc::SOL_SOCKET, 42, &[five]);
        let again = |stream: &TcpStream| stream.try_clone().unwrap().into();
        if done.is_err() {
            return; // Linux 6.8 has no such option
        }
        assert_eq!(
            Stream::source(again(&server)).unwrap_err(),
            Reason::BadSocket
        );
        // sending is possible as long as nothing has to be read from it
        let mut stream = Stream::new(again(&server)).unwrap();
        assert!(stream.extract(|_| Ok(())).is_ok());
        stream.resume();
        client.write_all(b"request").unwrap();
        while rustix::io::ioctl_fionread(&server).unwrap() < 7 {
            std::thread::yield_now();
        }
        assert_eq!(stream.extract(|_| Ok(())).unwrap_err(), Reason::BadSocket);
    }

    #[test]
    fn a_failed_query_leaves_the_socket_as_it_was() {
        let (mut client, mut server) = pair("127.0.0.1:0", "127.0.0.1");
        let mut stream = Stream::new(server.try_clone().unwrap().into()).unwrap();
        let refused = stream.extract(|_| Err::<(), _>(Reason::NoNextHop));
        assert_eq!(refused.unwrap_err(), Reason::NoNextHop);
        client.write_all(b"x").unwrap();
        server.read_exact(&mut [0]).unwrap();
    }

    #[test]
    fn bytes_that_arrive_while_the_connection_is_extracted_are_not_lost() {
        let (mut client, mut server) = pair("[::]:0", "127.0.0.1");
        let mut stream = Stream::new(server.try_clone().unwrap().into()).unwrap();
        let mut connection = stream.extract(|_| Ok(())).unwrap().0;
        // the loopback device's segment size is larger than the kernel restores
        connection.mss = 1400;
        assert!(connection.local.is_ipv4() && connection.peer.is_ipv4());
        client.write_all(b"request").unwrap();
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(server.read(&mut [0; 1]).is_err(), "it is silent");
        stream.restore(connection).unwrap();
        let mut seven = [0; 7];
        server.read_exact(&mut seven).unwrap();
        assert_eq!(&seven, b"request");
        server.write_all(b"answer!").unwrap();
        client.read_exact(&mut seven).unwrap();
        assert_eq!(&seven, b"answer!");
    }

    #[test]
    fn a_restored_socket_reads_the_end_of_file_that_the_peer_has_sent() {
        let (mut client, mut server) = pair("127.0.0.1:0", "127.0.0.1");
        let mut stream = Stream::new(server.try_clone().unwrap().into()).unwrap();
        client.write_all(b"last").unwrap();
        let mut connection = stream.extract(|_| Ok(())).unwrap().0;
        (connection.mss, connection.peer_finished) = (1400, true);
        stream.restore(connection).unwrap();
        let mut all = Vec::new();
        server.read_to_end(&mut all).unwrap();
        assert_eq!(all, b"last");
        server.write_all(b"still").unwrap();
        let mut five = [0; 5];
        client.read_exact(&mut five).unwrap();
        assert_eq!(&five, b"still");
    }

    #[test]
    fn another_connection_is_not_restored() {
        let (_client, server) = pair("127.0.0.1:0", "127.0.0.1");
        let mut stream = Stream::new(server.into()).unwrap();
        let mut connection = stream.extract(|_| Ok(())).unwrap().0;
        connection.peer.set_port(1);
        assert!(stream.restore(connection).is_err());
        stream.drop_connection();
    }
}
