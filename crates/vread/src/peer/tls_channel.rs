// SPDX-License-Identifier: Apache-2.0
//! A non-blocking TLS connection.
//!
//! Bytes are encrypted from their buffer directly into the send buffer, in records of 16 KiB and system calls of up
//! to 256 KiB; received bytes are decrypted in place.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};

use super::tls::{Fingerprint, fingerprint_of};
use super::wire::ProtocolError;

/// Size of the receive buffer, bytes.
const RECEIVE_BUFFER_BYTES: usize = 512 << 10;
/// Size of the send buffer, bytes.
const SEND_BUFFER_BYTES: usize = 320 << 10;
/// Plain bytes encrypted at once.
const MAX_ENCRYPT_BYTES: usize = 64 << 10;
/// Maximum that encryption adds to [`MAX_ENCRYPT_BYTES`], and room for a handshake message.
const ENCRYPT_OVERHEAD_BYTES: usize = 32 << 10;
/// Bytes received in one call, before other work has its turn.
const MAX_RECEIVE_BYTES: usize = 2 << 20;
/// Maximum number of buffers kept for reuse.
const MAX_SPARE_BUFFERS: usize = 8;

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The other side closed it.
    #[error("the other host closed the connection")]
    Closed,
    /// A network error.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The handshake failed, or bytes were altered.
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// The other side violated the protocol.
    #[error(transparent)]
    ProtocolError(#[from] ProtocolError),
}

enum TlsConnection {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// One end of a connection.
pub struct TlsChannel {
    socket: TcpStream,
    connection: TlsConnection,
    incoming: Vec<u8>,
    /// The part of `incoming` that was not processed yet.
    received: std::ops::Range<usize>,
    outgoing: Vec<u8>,
    /// The part of `outgoing` that was not sent yet.
    unsent: std::ops::Range<usize>,
    queue: VecDeque<Vec<u8>>,
    /// Encrypted bytes of the first buffer in the queue.
    encrypted: usize,
    queued: usize,
    ready: bool,
    spare: Vec<Vec<u8>>,
    /// Whether bytes were received since the last call of [`TlsChannel::take_received`].
    received_any: bool,
}

impl std::fmt::Debug for TlsChannel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsChannel")
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}

impl AsFd for TlsChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// How to continue after a step of TLS.
enum Next {
    Again,
    Wait,
}

impl TlsChannel {
    /// The client side. The socket is connected or connecting, and non-blocking.
    pub fn client(socket: TcpStream, connection: UnbufferedClientConnection) -> Self {
        Self::new(socket, TlsConnection::Client(connection))
    }

    /// The server side.
    pub fn server(socket: TcpStream, connection: UnbufferedServerConnection) -> Self {
        Self::new(socket, TlsConnection::Server(connection))
    }

    fn new(socket: TcpStream, connection: TlsConnection) -> Self {
        Self {
            socket,
            connection,
            incoming: vec![0; RECEIVE_BUFFER_BYTES],
            received: 0..0,
            outgoing: vec![0; SEND_BUFFER_BYTES],
            unsent: 0..0,
            queue: VecDeque::new(),
            encrypted: 0,
            queued: 0,
            ready: false,
            spare: Vec::new(),
            received_any: false,
        }
    }

    /// Fingerprint of the other side's certificate, after the handshake.
    pub fn peer(&self) -> Option<Fingerprint> {
        fingerprint_of(match &self.connection {
            TlsConnection::Client(connection) => connection.peer_certificates(),
            TlsConnection::Server(connection) => connection.peer_certificates(),
        })
    }

    /// Whether bytes were received since the last call.
    pub fn take_received(&mut self) -> bool {
        std::mem::take(&mut self.received_any)
    }

    /// An empty buffer, reused if possible.
    pub fn buffer(&mut self) -> Vec<u8> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.clear();
        buffer
    }

    /// Queues bytes for sending.
    pub fn send(&mut self, bytes: Vec<u8>) {
        self.queued += bytes.len();
        self.queue.push_back(bytes);
    }

    /// Bytes that were not sent yet.
    pub fn queued(&self) -> usize {
        self.queued + self.unsent.len()
    }

    /// Whether to poll for room in the socket.
    pub fn wants_write(&self) -> bool {
        !self.unsent.is_empty() || (self.ready && self.queued > 0)
    }

    /// Receives at most [`MAX_RECEIVE_BYTES`] without waiting and passes the plain bytes to `take`.
    ///
    /// # Errors
    /// [`ChannelError`].
    pub fn receive(
        &mut self,
        take: &mut dyn FnMut(&[u8]) -> Result<(), ProtocolError>,
    ) -> Result<(), ChannelError> {
        let mut turn = 0;
        while turn < MAX_RECEIVE_BYTES {
            if self.received.end == RECEIVE_BUFFER_BYTES {
                self.incoming.copy_within(self.received.clone(), 0);
                self.received = 0..self.received.len();
            }
            if self.received.len() == RECEIVE_BUFFER_BYTES {
                return Err(ProtocolError("a TLS record that is too long").into());
            }
            let read = match self.socket.read(&mut self.incoming[self.received.end..]) {
                Ok(0) => return Err(ChannelError::Closed),
                Ok(read) => read,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) if would_block(&e) => return Ok(()),
                Err(e) => return Err(e.into()),
            };
            self.received_any = true;
            turn += read;
            self.received.end += read;
            self.work(take)?;
        }
        Ok(())
    }

    /// Encrypts and sends queued bytes, as far as the socket has room.
    ///
    /// # Errors
    /// [`ChannelError`].
    pub fn flush(&mut self) -> Result<(), ChannelError> {
        loop {
            if self.unsent.is_empty()
                || (self.unsent.end < SEND_BUFFER_BYTES / 2 && self.queued > 0)
            {
                // This call receives nothing.
                self.work(&mut |_| Ok(()))?;
            }
            if self.unsent.is_empty() {
                return Ok(());
            }
            match self.socket.write(&self.outgoing[self.unsent.clone()]) {
                Ok(0) => return Err(ChannelError::Closed),
                Ok(written) => self.unsent.start += written,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if would_block(&e) => return Ok(()),
                Err(e) => return Err(e.into()),
            }
            if self.unsent.is_empty() {
                self.unsent = 0..0;
            }
        }
    }

    /// Runs TLS until it needs more bytes or more room.
    fn work(
        &mut self,
        take: &mut dyn FnMut(&[u8]) -> Result<(), ProtocolError>,
    ) -> Result<(), ChannelError> {
        loop {
            if self.unsent.is_empty() {
                self.unsent = 0..0;
            }
            let got = &mut self.incoming[self.received.clone()];
            let mut out = Outgoing {
                room: &mut self.outgoing,
                unsent: &mut self.unsent,
                queue: &mut self.queue,
                encrypted: &mut self.encrypted,
                queued: &mut self.queued,
                ready: &mut self.ready,
                spare: &mut self.spare,
            };
            let (discard, next) = match &mut self.connection {
                TlsConnection::Client(c) => step(c.process_tls_records(got), &mut out, take),
                TlsConnection::Server(c) => step(c.process_tls_records(got), &mut out, take),
            };
            self.received.start += discard;
            if self.received.is_empty() {
                self.received = 0..0;
            }
            match next {
                Ok(Next::Again) => {}
                Ok(Next::Wait) => return Ok(()),
                Err(broken) => {
                    self.send_alert();
                    return Err(broken);
                }
            }
        }
    }

    /// Sends the TLS alert with the reason, if that is possible without waiting.
    fn send_alert(&mut self) {
        let mut nothing = Vec::new();
        let mut out = Outgoing {
            room: &mut self.outgoing,
            unsent: &mut self.unsent,
            queue: &mut VecDeque::new(),
            encrypted: &mut 0,
            queued: &mut 0,
            ready: &mut false,
            spare: &mut nothing,
        };
        let _ = match &mut self.connection {
            TlsConnection::Client(c) => {
                step(c.process_tls_records(&mut []), &mut out, &mut |_| Ok(()))
            }
            TlsConnection::Server(c) => {
                step(c.process_tls_records(&mut []), &mut out, &mut |_| Ok(()))
            }
        };
        let _ = self.socket.write(&self.outgoing[self.unsent.clone()]);
        self.unsent = 0..0;
    }
}

fn would_block(e: &io::Error) -> bool {
    // A connecting socket reports NotConnected.
    e.kind() == ErrorKind::WouldBlock || e.kind() == ErrorKind::NotConnected
}

/// The sending half of a channel, for [`step`].
struct Outgoing<'a> {
    room: &'a mut Vec<u8>,
    unsent: &'a mut std::ops::Range<usize>,
    queue: &'a mut VecDeque<Vec<u8>>,
    encrypted: &'a mut usize,
    queued: &'a mut usize,
    ready: &'a mut bool,
    spare: &'a mut Vec<Vec<u8>>,
}

/// Runs one step of TLS. Returns the number of received bytes that are done with, and how to continue.
fn step<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    out: &mut Outgoing<'_>,
    take: &mut dyn FnMut(&[u8]) -> Result<(), ProtocolError>,
) -> (usize, Result<Next, ChannelError>) {
    let mut discard = status.discard;
    let next = match status.state {
        Err(e) => Err(e.into()),
        Ok(ConnectionState::ReadTraffic(mut traffic)) => loop {
            match traffic.next_record() {
                None => break Ok(Next::Again),
                Some(Err(e)) => break Err(e.into()),
                Some(Ok(record)) => {
                    discard += record.discard;
                    if let Err(bad) = take(record.payload) {
                        break Err(bad.into());
                    }
                }
            }
        },
        Ok(ConnectionState::EncodeTlsData(mut data)) => {
            match data.encode(&mut out.room[out.unsent.end..]) {
                Ok(more) => {
                    out.unsent.end += more;
                    Ok(Next::Again)
                }
                // Handshake messages are far smaller than the send buffer, which is empty at the start.
                Err(EncodeError::InsufficientSize(_) | EncodeError::AlreadyEncoded) => {
                    Err(ProtocolError("a handshake message that is too long").into())
                }
            }
        }
        Ok(ConnectionState::TransmitTlsData(data)) => {
            data.done();
            Ok(Next::Again)
        }
        Ok(ConnectionState::WriteTraffic(mut traffic)) => {
            *out.ready = true;
            loop {
                let Some(first) = out.queue.front() else {
                    break Ok(Next::Wait);
                };
                if out.unsent.end + MAX_ENCRYPT_BYTES + ENCRYPT_OVERHEAD_BYTES > out.room.len() {
                    break Ok(Next::Wait);
                }
                let part = &first[*out.encrypted..];
                let part = &part[..part.len().min(MAX_ENCRYPT_BYTES)];
                match traffic.encrypt(part, &mut out.room[out.unsent.end..]) {
                    Ok(more) => out.unsent.end += more,
                    Err(EncryptError::InsufficientSize(_)) => break Ok(Next::Wait),
                    Err(EncryptError::EncryptExhausted) => {
                        break Err(rustls::Error::EncryptError.into());
                    }
                }
                *out.encrypted += part.len();
                *out.queued -= part.len();
                if *out.encrypted == first.len() {
                    *out.encrypted = 0;
                    if let Some(used) = out.queue.pop_front()
                        && out.spare.len() < MAX_SPARE_BUFFERS
                    {
                        out.spare.push(used);
                    }
                }
            }
        }
        Ok(ConnectionState::BlockedHandshake) => Ok(Next::Wait),
        Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => Err(ChannelError::Closed),
        Ok(_) => Err(ProtocolError("early data").into()),
    };
    (discard, next)
}
