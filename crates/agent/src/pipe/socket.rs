// SPDX-License-Identifier: Apache-2.0
//! A program's connected socket: whether its connection can be given away, out of it, and into it again.
//!
//! A socket in repair mode still takes what comes from the network, and acknowledges it: such bytes would be lost to the
//! host. So it gets a filter that lets nothing in for as long as the connection is elsewhere, and the peer sends again.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use viola_handover::{
    Buffers, drop_quietly, drop_with_reset, ends, from_wire, outstanding, peeks_from_the_beginning,
    put_back, resume, take_between, to_wire,
};
use viola_proto::pipe::Connection;

use super::reason::Reason;

// include/uapi/asm-generic/socket.h
const SO_ATTACH_FILTER: i32 = 26;
const SO_DETACH_FILTER: i32 = 27;
const SO_GET_FILTER: i32 = SO_ATTACH_FILTER;
const SO_PROTOCOL: i32 = 38;
/// Since Linux 5.14.
const SO_NETNS_COOKIE: i32 = 71;
// include/uapi/linux/tcp.h
const TCP_ULP: i32 = 31;
// include/uapi/linux/sockios.h
const SIOCGSKNS: u64 = 0x894c;

/// A connection's socket.
#[derive(Debug)]
pub struct Stream {
    socket: OwnedFd,
    left: Option<Left>,
}

/// What is left in a socket whose connection was taken out.
#[derive(Debug)]
struct Left {
    /// Both ends as the socket has them: over IPv6 it may have addresses of IPv4.
    ends: Ends,
    buffers: Buffers,
}

/// This end of a connection, and the other one.
pub type Ends = (SocketAddr, SocketAddr);

/// The ends as they are in the packets.
fn plain(end: SocketAddr) -> SocketAddr {
    match end.ip().to_canonical() {
        ip @ IpAddr::V4(_) => SocketAddr::new(ip, end.port()),
        IpAddr::V6(_) => end,
    }
}

impl Stream {
    /// A socket that a program has given.
    ///
    /// # Errors
    /// [`Reason::Socket`] when it is none of TCP in this network namespace, or does more with the bytes than to send
    /// them (TLS in the kernel, filters).
    pub fn new(socket: OwnedFd) -> Result<Self, Reason> {
        let fd = socket.as_fd();
        let tcp = option(fd, libc::SOL_SOCKET, SO_PROTOCOL) == Ok(Some(libc::IPPROTO_TCP));
        let bare = length(fd, libc::IPPROTO_TCP, TCP_ULP) == Ok(0);
        let open = length(fd, libc::SOL_SOCKET, SO_GET_FILTER) == Ok(0);
        match tcp && bare && open && is_here(fd).unwrap_or(false) {
            true => Ok(Self { socket, left: None }),
            false => Err(Reason::Socket),
        }
    }

    /// One that bytes are to be read from: a look at what is there has to begin at the first byte.
    ///
    /// # Errors
    /// As of [`Stream::new`].
    pub fn source(socket: OwnedFd) -> Result<Self, Reason> {
        let stream = Self::new(socket)?;
        match peeks_from_the_beginning(stream.fd()) {
            Ok(true) => Ok(stream),
            _ => Err(Reason::Socket),
        }
    }

    /// The socket itself.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether both are one socket.
    pub fn is_same(&self, other: &Self) -> bool {
        let number = |stream: &Self| rustix::fs::fstat(&stream.socket).map(|stat| stat.st_ino);
        match (number(self), number(other)) {
            (Ok(one), Ok(two)) => one == two,
            _ => true,
        }
    }

    /// Bytes that were written and are not acknowledged.
    ///
    /// # Errors
    /// [`Reason::Socket`]
    pub fn written(&self) -> Result<usize, Reason> {
        outstanding(self.socket.as_fd()).map_err(|_| Reason::Socket)
    }

    /// This end and the other, as they are in the packets.
    ///
    /// # Errors
    /// [`Reason::Socket`] when it is not connected.
    pub fn ends(&self) -> Result<Ends, Reason> {
        self.own_ends()
            .map(|(local, peer)| (plain(local), plain(peer)))
    }

    /// The same as the socket has them.
    fn own_ends(&self) -> Result<Ends, Reason> {
        ends(self.socket.as_fd()).map_err(|_| Reason::Socket)
    }

    /// Takes the connection out; from now on the socket neither says nor hears anything. Only if what `ask` wants to know of its
    /// ends, as they are in the packets, is to be had.
    ///
    /// # Errors
    /// The socket is as it was then.
    pub fn take<T>(
        &mut self,
        ask: impl FnOnce(Ends) -> Result<T, Reason>,
    ) -> Result<(Connection, T), Reason> {
        let ends = self.own_ends()?;
        let known = ask((plain(ends.0), plain(ends.1)))?;
        let fd = self.socket.as_fd();
        deafen(fd).map_err(|_| Reason::Socket)?;
        let mut buffers = Buffers::default();
        let connection = match take_between(fd, ends) {
            Ok(taken) => {
                let state = taken.keep();
                buffers = state.buffers;
                to_wire(state).map_err(|_| {
                    let _ = resume(fd);
                    Reason::Queue
                })
            }
            Err(_) => Err(Reason::Socket),
        };
        if connection.is_err() {
            let _ = hear(fd);
        }
        let mut connection = connection?;
        self.left = Some(Left { ends, buffers });
        connection.local = plain(connection.local);
        connection.peer = plain(connection.peer);
        Ok((connection, known))
    }

    /// Goes on as if nothing had happened.
    pub fn resume(&self) {
        // a socket that cannot be let go is as good as closed
        let _ = hear(self.socket.as_fd());
        let _ = resume(self.socket.as_fd());
    }

    /// Ends the connection without a word; whoever has the socket sees that it is not connected.
    pub fn kill(&self) {
        let _ = drop_quietly(self.socket.as_fd());
        let _ = hear(self.socket.as_fd());
    }

    /// Ends the connection with a reset: the host, which had it, may not be there any more to say so. What it has said beyond
    /// this end's knowledge makes the peer ask once, and it gets its answer then.
    pub fn reset(&self) {
        let _ = hear(self.socket.as_fd());
        let _ = drop_with_reset(self.socket.as_fd());
    }

    /// Puts a connection that came back into the socket. When it fails the socket has none.
    ///
    /// The end that the peer has sent meanwhile is told by a shutdown for reading: a read gives what is there, then the
    /// end of file, and writing goes on.
    pub fn restore(&self, mut connection: Connection) -> io::Result<()> {
        let fd = self.socket.as_fd();
        let left = self.left.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let (local, peer) = left.ends;
        if (connection.local, connection.peer) != (plain(local), plain(peer)) {
            return Err(io::Error::other("the host gives back another connection"));
        }
        (connection.local, connection.peer) = (local, peer);
        let state = from_wire(connection);
        let ready = put_back(fd, &state, left.buffers).map_err(io::Error::other)?;
        hear(fd)?;
        ready.go().map_err(io::Error::other)?;
        if state.peer_finished {
            rustix::net::shutdown(fd, rustix::net::Shutdown::Read)?;
        }
        Ok(())
    }
}

/// Lets nothing in.
fn deafen(fd: BorrowedFd<'_>) -> io::Result<()> {
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
    let size = size_of_val(&program) as libc::socklen_t;
    let from = (&raw const program).cast();
    // SAFETY: the kernel reads a struct sock_fprog and the one instruction that it points to.
    match unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_ATTACH_FILTER,
            from,
            size,
        )
    } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Lets all in again.
fn hear(fd: BorrowedFd<'_>) -> io::Result<()> {
    let none: i32 = 0;
    let (from, size) = (
        (&raw const none).cast(),
        size_of_val(&none) as libc::socklen_t,
    );
    // SAFETY: the kernel reads one int, which means nothing to it.
    match unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_DETACH_FILTER,
            from,
            size,
        )
    } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// An option of one int.
fn option(fd: BorrowedFd<'_>, level: i32, name: i32) -> Result<Option<i32>, i32> {
    let mut value: i32 = 0;
    let mut size = size_of_val(&value) as libc::socklen_t;
    let (to, length) = ((&raw mut value).cast(), &raw mut size);
    // SAFETY: the kernel writes at most one int to `value`, and to `size` how much of it.
    match unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, to, length) } {
        0 => Ok((size == 4).then_some(value)),
        _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(0)),
    }
}

/// How long the value of an option is. (Of a filter: how many instructions.)
fn length(fd: BorrowedFd<'_>, level: i32, name: i32) -> Result<u32, i32> {
    let mut bytes = [0_u8; 16];
    // a filter is counted when no room is given, a name only when there is some
    let mut size = match name {
        SO_GET_FILTER => 0,
        _ => bytes.len() as libc::socklen_t,
    };
    let (to, length) = (bytes.as_mut_ptr().cast(), &raw mut size);
    // SAFETY: the kernel writes at most `size` bytes to `bytes`, and to `size` how many there are.
    match unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, to, length) } {
        0 => Ok(size),
        _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(0)),
    }
}

/// Whether a socket is in this program's network namespace: the host has the addresses of that one.
fn is_here(fd: BorrowedFd<'_>) -> io::Result<bool> {
    thread_local! {
        static HERE: Option<u64> = own_cookie();
    }
    match (HERE.with(|here| *here), cookie(fd)) {
        (Some(here), Some(there)) => Ok(here == there),
        _ => is_inode_of_here(fd),
    }
}

/// The number of a socket's network namespace, which no other one ever has; none of kernels that do not tell.
fn cookie(fd: BorrowedFd<'_>) -> Option<u64> {
    let mut value = 0_u64;
    let mut size = size_of_val(&value) as libc::socklen_t;
    let (to, length) = ((&raw mut value).cast(), &raw mut size);
    // SAFETY: the kernel writes at most the eight bytes of `value`, and to `size` how many.
    let done = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            to,
            length,
        )
    };
    (done == 0 && size == 8).then_some(value)
}

/// That of the calling thread's.
fn own_cookie() -> Option<u64> {
    let socket = std::os::unix::net::UnixDatagram::unbound().ok()?;
    cookie(socket.as_fd())
}

/// As [`is_here`], by a descriptor of the namespace.
fn is_inode_of_here(fd: BorrowedFd<'_>) -> io::Result<bool> {
    // SAFETY: this request takes nothing and gives a new descriptor, which is checked.
    let raw = unsafe { libc::ioctl(fd.as_raw_fd(), SIOCGSKNS as _) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and is nobody else's.
    let theirs: std::fs::File = unsafe { OwnedFd::from_raw_fd(raw) }.into();
    let ours = std::fs::metadata("/proc/thread-self/ns/net")?;
    Ok(theirs.metadata()?.ino() == ours.ino())
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
    fn only_plain_tcp_is_taken() {
        let (client, server) = pair("127.0.0.1:0", "127.0.0.1");
        assert!(Stream::new(server.try_clone().unwrap().into()).is_ok());
        deafen(client.as_fd()).unwrap();
        assert_eq!(Stream::new(client.into()).unwrap_err(), Reason::Socket);
        let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(Stream::new(udp.into()).unwrap_err(), Reason::Socket);
        let (unix, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(Stream::new(unix.into()).unwrap_err(), Reason::Socket);
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(Stream::new(null.into()).unwrap_err(), Reason::Socket);
        drop(server);
    }

    #[test]
    fn a_socket_of_another_network_namespace_is_not_here() {
        let other = viola_netdev::Netns::new().unwrap();
        let there = other.tcp_socket([127, 0, 0, 1].into()).unwrap();
        let here = TcpListener::bind("127.0.0.1:0").unwrap();
        for is in [is_here, is_inode_of_here] {
            assert!(is(here.as_fd()).unwrap());
            assert!(!is(there.as_fd()).unwrap());
        }
    }

    #[test]
    fn one_that_is_looked_at_elsewhere_is_no_source() {
        let (mut client, server) = pair("127.0.0.1:0", "127.0.0.1");
        let five: i32 = 5;
        let (from, size) = ((&raw const five).cast(), 4);
        // SAFETY: the kernel reads one int.
        let done =
            unsafe { libc::setsockopt(server.as_raw_fd(), libc::SOL_SOCKET, 42, from, size) };
        let again = |stream: &TcpStream| stream.try_clone().unwrap().into();
        if done != 0 {
            return; // Linux 6.8 has no such option
        }
        assert_eq!(Stream::source(again(&server)).unwrap_err(), Reason::Socket);
        // down such a one bytes may be sent, if nothing is to be read from it
        let mut stream = Stream::new(again(&server)).unwrap();
        assert!(stream.take(|_| Ok(())).is_ok());
        stream.resume();
        client.write_all(b"request").unwrap();
        while rustix::io::ioctl_fionread(&server).unwrap() < 7 {
            std::thread::yield_now();
        }
        assert_eq!(stream.take(|_| Ok(())).unwrap_err(), Reason::Socket);
    }

    #[test]
    fn what_is_not_known_of_its_ends_leaves_it_as_it_was() {
        let (mut client, mut server) = pair("127.0.0.1:0", "127.0.0.1");
        let mut stream = Stream::new(server.try_clone().unwrap().into()).unwrap();
        let refused = stream.take(|_| Err::<(), _>(Reason::Hop));
        assert_eq!(refused.unwrap_err(), Reason::Hop);
        client.write_all(b"x").unwrap();
        server.read_exact(&mut [0]).unwrap();
    }

    #[test]
    fn bytes_that_come_while_it_is_taken_are_not_lost() {
        let (mut client, mut server) = pair("[::]:0", "127.0.0.1");
        let mut stream = Stream::new(server.try_clone().unwrap().into()).unwrap();
        let mut connection = stream.take(|_| Ok(())).unwrap().0;
        // what the loopback device has is more than any network, and than the kernel restores
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
    fn the_end_that_the_peer_has_sent_is_read() {
        let (mut client, mut server) = pair("127.0.0.1:0", "127.0.0.1");
        let mut stream = Stream::new(server.try_clone().unwrap().into()).unwrap();
        client.write_all(b"last").unwrap();
        let mut connection = stream.take(|_| Ok(())).unwrap().0;
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
    fn another_connection_is_not_put_back() {
        let (_client, server) = pair("127.0.0.1:0", "127.0.0.1");
        let mut stream = Stream::new(server.into()).unwrap();
        let mut connection = stream.take(|_| Ok(())).unwrap().0;
        connection.peer.set_port(1);
        assert!(stream.restore(connection).is_err());
        stream.kill();
    }
}
