// SPDX-License-Identifier: Apache-2.0
//! Probes whether the DataNode serves a read without a block access token.
//!
//! No configuration file says for sure: the NameNode decides, and the DataNode learns it at registration. So the
//! agent reads one byte of a block without a token, as a client does (`OP_READ_BLOCK` of Hadoop's
//! DataTransferProtocol, version 28; `datatransfer.proto` and `hdfs.proto` of Hadoop 3).

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use viola_proto::agent::BlockKey;

use crate::blocks::access::Probe;

/// Time limit for a whole probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
const TRANSFER_VERSION: [u8; 2] = 28_u16.to_be_bytes();
const OP_READ_BLOCK: u8 = 81;
/// `Status` in datatransfer.proto.
const SUCCESS: u64 = 0;
const ERROR_ACCESS_TOKEN: u64 = 5;
/// Maximum bytes of a response: a status, the kind of checksums, a message.
const MAX_RESPONSE_BYTES: u64 = 4 << 10;
/// Maximum bytes read after the response; one byte of a block comes in a packet of some tens of bytes.
const MAX_DRAIN_BYTES: u64 = 64 << 10;

/// Reads one byte of `block` from the DataNode at `address` (`HOST:PORT`). Takes five seconds at most, plus the
/// resolver's time when HOST is a name.
pub fn probe(address: &str, block: &BlockKey) -> Probe {
    probe_within(address, block, PROBE_TIMEOUT)
}

fn probe_within(address: &str, block: &BlockKey, timeout: Duration) -> Probe {
    match try_probe(address, block, timeout) {
        Ok(answer) => answer,
        Err(e) => Probe::Unknown(format!(
            "the DataNode at {address} does not answer ({e}); `datanode` in the agent's configuration says where it \
             listens"
        )),
    }
}

fn try_probe(address: &str, block: &BlockKey, timeout: Duration) -> Result<Probe> {
    let mut connection = Connection::open(address, timeout)?;
    let answer = connection
        .ask(block)
        .and_then(|()| read_answer(&mut connection));
    let probe = judge(address, answer)?;
    if probe == Probe::Granted {
        connection.drain();
    }
    Ok(probe)
}

/// What the status of the DataNode's response says, or the failure to read it.
fn judge(address: &str, answer: Result<u64>) -> Result<Probe> {
    Ok(match answer {
        Ok(SUCCESS) => Probe::Granted,
        Ok(ERROR_ACCESS_TOKEN) => Probe::TokenRequired,
        // the block may be gone, or the DataNode is not ready
        Ok(other) => Probe::Unknown(format!(
            "the DataNode at {address} answers a read with status {other}"
        )),
        Err(e) if is_end(&e) => Probe::HungUp,
        Err(e) => return Err(e),
    })
}

/// Reads the response and returns its status.
fn read_answer(from: &mut impl Read) -> Result<u64> {
    let length = read_varint(from)?;
    if length > MAX_RESPONSE_BYTES {
        return Err(malformed());
    }
    let mut answer = vec![0; length as usize];
    from.read_exact(&mut answer)?;
    // an end of file within the response is a malformed response
    status(&answer).ok_or_else(malformed)
}

/// What a DataNode that sends these bytes and hangs up says; `None` for a malformed response.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn probe_of(mut response: &[u8]) -> Option<Probe> {
    let answer = read_answer(&mut response);
    judge("dn1:9866", answer).ok()
}

/// Whether the DataNode has closed the connection.
fn is_end(e: &Error) -> bool {
    matches!(
        e.kind(),
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
    )
}

/// A connection with a deadline for the whole conversation, however slowly the peer sends.
struct Connection {
    stream: TcpStream,
    end: Instant,
}

impl Connection {
    fn open(address: &str, timeout: Duration) -> Result<Self> {
        let end = Instant::now() + timeout;
        let mut failed = Error::other("it has no address");
        for place in address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&place, time_left(end)?) {
                Ok(stream) => return Ok(Self { stream, end }),
                Err(e) => failed = e,
            }
        }
        Err(failed)
    }

    /// Sends the request.
    fn ask(&mut self, block: &BlockKey) -> Result<()> {
        self.stream.set_write_timeout(Some(time_left(self.end)?))?;
        self.stream.write_all(&request(block))
    }

    /// Reads the rest of the response: a DataNode logs a warning when a client closes before it has read all.
    fn drain(mut self) {
        let mut rest = Vec::new();
        let _ = self.stream.shutdown(Shutdown::Write);
        let _ = (&mut self).take(MAX_DRAIN_BYTES).read_to_end(&mut rest);
    }
}

impl Read for Connection {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        self.stream.set_read_timeout(Some(time_left(self.end)?))?;
        self.stream.read(buffer)
    }
}

/// Time until the deadline; an error when it has passed.
fn time_left(end: Instant) -> Result<Duration> {
    match end.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(ErrorKind::TimedOut.into()),
        some => Ok(some),
    }
}

fn malformed() -> Error {
    Error::other("it sent a malformed response")
}

/// The request, followed by the client's final status, so that the DataNode does not wait for it.
fn request(block: &BlockKey) -> Vec<u8> {
    let mut extended = Vec::new();
    write_bytes(&mut extended, 1, block.pool().as_bytes());
    write_number(&mut extended, 2, block.id().cast_unsigned());
    write_number(&mut extended, 3, block.stamp());
    let mut base = Vec::new();
    write_bytes(&mut base, 1, &extended);
    let mut header = Vec::new();
    write_bytes(&mut header, 1, &base);
    write_bytes(&mut header, 2, b"viola-agent");
    let mut read = Vec::new();
    write_bytes(&mut read, 1, &header);
    write_number(&mut read, 2, 0); // offset
    write_number(&mut read, 3, 1); // length
    write_number(&mut read, 4, 0); // no checksums
    let mut all = TRANSFER_VERSION.to_vec();
    all.push(OP_READ_BLOCK);
    write_varint(&mut all, read.len() as u64);
    all.extend(read);
    let mut end = Vec::new();
    write_number(&mut end, 1, SUCCESS);
    write_varint(&mut all, end.len() as u64);
    all.extend(end);
    all
}

/// Parses the first field of a `BlockOpResponseProto`. In the response to a read, a success is followed by the kind
/// of checksums (`readOpChecksumInfo`).
fn status(mut answer: &[u8]) -> Option<u64> {
    let answer = &mut answer;
    if read_varint(answer).ok()? != 1 << 3 {
        return None;
    }
    let status = read_varint(answer).ok()?;
    if status == SUCCESS && read_varint(answer).ok()? != (4 << 3 | 2) {
        return None;
    }
    Some(status)
}

fn read_varint(from: &mut impl Read) -> Result<u64> {
    let mut value = 0;
    for shift in (0..63).step_by(7) {
        let mut byte = [0];
        from.read_exact(&mut byte)?;
        value |= u64::from(byte[0] & 0x7f) << shift;
        if byte[0] < 0x80 {
            return Ok(value);
        }
    }
    Err(malformed())
}

fn write_varint(to: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        to.push(value as u8 | 0x80);
        value >>= 7;
    }
    to.push(value as u8);
}

fn write_number(to: &mut Vec<u8>, field: u64, value: u64) {
    write_varint(to, field << 3);
    write_varint(to, value);
}

fn write_bytes(to: &mut Vec<u8>, field: u64, value: &[u8]) {
    write_varint(to, field << 3 | 2);
    write_varint(to, value.len() as u64);
    to.extend_from_slice(value);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    const GIVEN: [u8; 5] = [4, 8, 0, 0x22, 0];

    fn block() -> BlockKey {
        BlockKey::new("BP-1-10.0.0.1-2", 1 << 30, 1001).unwrap()
    }

    /// Probes a peer that calls `then` once the whole request has arrived.
    fn asked(timeout: Duration, then: impl FnOnce(TcpStream) + Send + 'static) -> Probe {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let other = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut question = vec![0; request(&block()).len()];
            stream.read_exact(&mut question).unwrap();
            then(stream);
            question
        });
        let answer = probe_within(&address, &block(), timeout);
        assert_eq!(other.join().unwrap(), request(&block()));
        answer
    }

    /// Probes a peer that answers these bytes and hangs up.
    fn answered(write_bytes: &'static [u8]) -> Probe {
        asked(Duration::from_secs(60), |mut stream| {
            stream.write_all(write_bytes).unwrap();
        })
    }

    #[test]
    fn the_request_is_that_of_an_hdfs_client() {
        assert_eq!(
            request(&BlockKey::new("BP-1", 300, 7).unwrap()),
            [
                &[0, 28, 81, 36][..],
                &[0x0a, 28],      // header
                &[0x0a, 13],      // base header
                &[0x0a, 11],      // block
                b"\x0a\x04BP-1",  // pool
                &[0x10, 0xac, 2], // id
                &[0x18, 7],       // stamp
                b"\x12\x0bviola-agent",
                &[0x10, 0, 0x18, 1, 0x20, 0],
                &[2, 8, 0],
            ]
            .concat()
        );
    }

    #[test]
    fn the_status_of_the_response_decides() {
        assert_eq!(answered(&GIVEN), Probe::Granted);
        assert_eq!(answered(&[2, 8, 5]), Probe::TokenRequired);
        assert_eq!(answered(&[5, 8, 5, 0x2a, 1, b'x']), Probe::TokenRequired);
        assert_eq!(answered(&[]), Probe::HungUp);
        assert_eq!(answered(&[4, 8, 0]), Probe::HungUp);
    }

    #[test]
    fn malformed_responses_and_other_errors_are_inconclusive() {
        for (malformed, says) in [
            (&[2, 8, 1][..], "status 1"),
            (&[2, 16, 0], "malformed response"),
            (&[0], "malformed response"),
            // a success without readOpChecksumInfo
            (&[2, 8, 0], "malformed response"),
            (&[4, 8, 0, 0x12, 0], "malformed response"),
            // shorter than its length says, too long, endless varint
            (&[1, 8, 0, 0], "malformed response"),
            (&[0x81, 0x20, 8, 0], "malformed response"),
            (&[0xff; 20], "malformed response"),
            (b"HTTP/1.1 400 Bad Request\r\n\r\nwhat is this, and why would anybody send it here at all?",
             "malformed response"),
        ] {
            let Probe::Unknown(why) = answered(malformed) else {
                panic!("{malformed:?}");
            };
            assert!(why.contains(says), "{malformed:?}: {why}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_response_makes_the_parser_panic(answer in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..64)) {
            // only bytes that begin like the response to a read count as granted
            if status(&answer) == Some(SUCCESS) {
                proptest::prop_assert_eq!(answer[0] & 0x7f, 8);
                proptest::prop_assert!(answer.iter().any(|byte| byte & 0x7f == 0x22));
            }
        }
    }

    #[test]
    fn a_refused_silent_or_slow_datanode_times_out() {
        let begun = Instant::now();
        let says = |answer, says: &str| match answer {
            Probe::Unknown(why) => {
                assert!(
                    why.contains("`datanode` in the agent's configuration"),
                    "{why}"
                );
                assert!(why.contains(says), "{why}");
            }
            other => panic!("{other:?}"),
        };
        says(probe("127.0.0.1:1", &block()), "refused");
        // the peer keeps the connection open until the probe gives up
        let timeout = Duration::from_millis(300);
        let silent = asked(timeout, |mut stream| {
            assert_eq!(stream.read(&mut [0]).unwrap_or_default(), 0);
        });
        says(silent, "does not answer");
        // the peer sends one byte now and then, for ever
        let drops = asked(timeout, |mut stream| {
            while stream.write_all(&[100]).is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        says(drops, "does not answer");
        assert!(begun.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn a_flood_after_the_answer_ends_at_a_bound() {
        let flood = asked(Duration::from_secs(60), |mut stream| {
            stream.write_all(&GIVEN).unwrap();
            while stream.write_all(&[7; 4096]).is_ok() {}
        });
        assert_eq!(flood, Probe::Granted);
    }
}
