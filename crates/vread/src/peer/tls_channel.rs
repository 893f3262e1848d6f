// SPDX-License-Identifier: Apache-2.0
//! A TLS connection that nobody waits for.
//!
//! Bytes to be sent are encrypted straight from their buffer into the one that goes to the socket, in records of
//! 16 KiB and system calls of up to 256 KiB; received ones are decrypted where they lie.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};

use super::tls::{Fingerprint, fingerprint_of};
use super::wire::ProtocolError;

/// Room for received records.
const RECEIVE_BUFFER_BYTES: usize = 512 << 10;
/// Room for encrypted records.
const SEND_BUFFER_BYTES: usize = 320 << 10;
/// Plain bytes encrypted in one go.
const MAX_ENCRYPT_BYTES: usize = 64 << 10;
/// What encryption adds to [`MAX_ENCRYPT_BYTES`] at most, and room for a message of the handshake.
const ENCRYPT_OVERHEAD_BYTES: usize = 32 << 10;
/// Bytes taken from the socket before others have their turn.
const MAX_RECEIVE_BYTES: usize = 2 << 20;
/// Buffers that are kept for later.
const MAX_SPARE_BUFFERS: usize = 8;

/// Why a connection is over.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The other side has ended it.
    #[error("the other host has hung up")]
    Closed,
    /// The network.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// No agreement on who is who, or altered bytes.
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// The frames are not as they should be.
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
    /// What of `incoming` was not looked at yet.
    received: std::ops::Range<usize>,
    outgoing: Vec<u8>,
    /// What of `outgoing` was not sent yet.
    unsent: std::ops::Range<usize>,
    queue: VecDeque<Vec<u8>>,
    /// Bytes of the first in the queue that are encrypted.
    encrypted: usize,
    queued: usize,
    ready: bool,
    spare: Vec<Vec<u8>>,
    /// Whether anything has come since this was last asked.
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

/// What to do next.
enum Next {
    Again,
    Wait,
}

impl TlsChannel {
    /// The asking end. The socket is connected, or about to be, and does not block.
    pub fn client(socket: TcpStream, connection: UnbufferedClientConnection) -> Self {
        Self::new(socket, TlsConnection::Client(connection))
    }

    /// The answering end.
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

    /// The other side's certificate, after the handshake.
    pub fn peer(&self) -> Option<Fingerprint> {
        fingerprint_of(match &self.connection {
            TlsConnection::Client(connection) => connection.peer_certificates(),
            TlsConnection::Server(connection) => connection.peer_certificates(),
        })
    }

    /// Whether anything has come since this was last asked.
    pub fn take_received(&mut self) -> bool {
        std::mem::take(&mut self.received_any)
    }

    /// An empty buffer, if possible one that has been used before.
    pub fn buffer(&mut self) -> Vec<u8> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.clear();
        buffer
    }

    /// Bytes to be sent when there is time.
    pub fn send(&mut self, bytes: Vec<u8>) {
        self.queued += bytes.len();
        self.queue.push_back(bytes);
    }

    /// Bytes that were not sent yet.
    pub fn queued(&self) -> usize {
        self.queued + self.unsent.len()
    }

    /// Whether to wait until the socket takes more.
    pub fn wants_write(&self) -> bool {
        !self.unsent.is_empty() || (self.ready && self.queued > 0)
    }

    /// Takes what has come, at most [`MAX_RECEIVE_BYTES`] bytes.
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
                return Err(ProtocolError("a record without end").into());
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

    /// Encrypts and sends what is to be sent, as far as the socket takes it.
    ///
    /// # Errors
    /// [`ChannelError`].
    pub fn flush(&mut self) -> Result<(), ChannelError> {
        loop {
            if self.unsent.is_empty()
                || (self.unsent.end < SEND_BUFFER_BYTES / 2 && self.queued > 0)
            {
                // Nothing is received here.
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

    /// Lets TLS go on until it needs more bytes, or more room.
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

    /// Sends the alert that tells the other side why, if it can be sent now.
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
    // A connection that is being made says the latter.
    e.kind() == ErrorKind::WouldBlock || e.kind() == ErrorKind::NotConnected
}

/// Where encrypted bytes go, and from where they come.
struct Outgoing<'a> {
    room: &'a mut Vec<u8>,
    unsent: &'a mut std::ops::Range<usize>,
    queue: &'a mut VecDeque<Vec<u8>>,
    encrypted: &'a mut usize,
    queued: &'a mut usize,
    ready: &'a mut bool,
    spare: &'a mut Vec<Vec<u8>>,
}

/// One step of TLS; how many received bytes are done with, and how to go on.
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
                // Messages of a handshake are far smaller than the room, which is empty at its begin.
                Err(EncodeError::InsufficientSize(_) | EncodeError::AlreadyEncoded) => {
                    Err(ProtocolError("a handshake that is too long").into())
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
