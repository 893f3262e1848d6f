// SPDX-License-Identifier: Apache-2.0
//! The messages between a reader worker and this host's peer worker: datagrams of a `SOCK_SEQPACKET` pair.
//!
//! A datagram consists of the number of the other host (2 bytes), the number of a slot of the shared memory (2), and
//! a frame as between hosts ([`super::wire`]). The reader sends *find* (to all hosts) and *read* (to the host that
//! answered *found*, into a slot that the reader owns until the answer has come). The bytes of a block do not come
//! with *data*: they are in the slot already.

use std::io;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::wire::{Cursor, HEADER, Header, Message, ProtocolError};

/// Maximum length of a datagram, bytes.
const MAX_DATAGRAM_BYTES: usize = 1024;

/// A datagram.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Datagram {
    /// Number of the other host.
    pub(crate) host: u16,
    /// Number of the slot.
    pub(crate) slot: u16,
    /// Number of the request.
    pub(crate) id: u64,
    /// The message.
    pub(crate) message: Message,
}

impl Datagram {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(256);
        bytes.extend_from_slice(&self.host.to_le_bytes());
        bytes.extend_from_slice(&self.slot.to_le_bytes());
        self.message.encode(self.id, &mut bytes);
        bytes
    }

    fn parse(bytes: &[u8]) -> Result<Self, ProtocolError> {
        let mut rest = Cursor(bytes);
        let host = u16::from_le_bytes(rest.take()?);
        let slot = u16::from_le_bytes(rest.take()?);
        let head = Header::parse(&rest.take::<HEADER>()?)?;
        if !head.is_data() && head.length != rest.0.len() {
            return Err(ProtocolError("a datagram of the wrong length"));
        }
        Ok(Self {
            host,
            slot,
            id: head.id,
            message: head.message(rest.0)?,
        })
    }

    /// Sends the datagram without waiting.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when the socket is full, other errors when the other side has closed it.
    pub(crate) fn send(&self, socket: impl AsFd) -> io::Result<()> {
        let bytes = self.bytes();
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        rustix::io::retry_on_intr(|| send(&socket, &bytes, flags))?;
        Ok(())
    }

    /// Receives a datagram; `None` when none is pending.
    ///
    /// # Errors
    /// When the other side has closed the socket or violated the protocol.
    pub(crate) fn receive(socket: impl AsFd) -> io::Result<Option<Self>> {
        let mut bytes = [0; MAX_DATAGRAM_BYTES];
        let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
        match rustix::io::retry_on_intr(|| recv(&socket, &mut bytes, flags)) {
            Ok((_, 0)) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((_, length)) if length > MAX_DATAGRAM_BYTES => Err(io::Error::other(ProtocolError(
                "a datagram that is too long",
            ))),
            Ok((_, length)) => Self::parse(&bytes[..length])
                .map(Some)
                .map_err(io::Error::other),
            Err(Errno::AGAIN) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }
}

/// Parses any bytes, for tests and fuzzing.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn parse(bytes: &[u8]) -> bool {
    Datagram::parse(bytes).is_ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use viola_proto::agent::BlockKey;

    use super::*;

    proptest! {
        #[test]
        fn any_datagram_is_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            parse(&bytes);
        }

        #[test]
        fn it_is_read_back(host: u16, slot: u16, id: u64, block: i64, offset: u32, length in 1u32..=1 << 20) {
            let key = BlockKey::new("BP-1-x", block, 7).unwrap();
            for message in [
                Message::Find { key: key.clone() },
                Message::Read { key, meta: true, offset: offset.into(), length },
                Message::Data { length },
                Message::Failed(super::super::wire::ErrorCode::Gone),
            ] {
                let datagram = Datagram { host, slot, id, message };
                prop_assert_eq!(Datagram::parse(&datagram.bytes()), Ok(datagram));
            }
        }
    }
}
