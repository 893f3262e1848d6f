// SPDX-License-Identifier: Apache-2.0
//! A read without a token, to find out whether the DataNode allows that.
//!
//! No configuration file tells it for sure: the NameNode decides, and the DataNode hears of it when it registers. So it
//! is asked for one byte of a block as any client does (`OP_READ_BLOCK` of Hadoop's DataTransferProtocol, version 28;
//! `datatransfer.proto` and `hdfs.proto` of Hadoop 3), without a token.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use viola_proto::agent::BlockKey;

use crate::core::door::Answer;

/// Longest wait for all of an answer.
const PATIENCE: Duration = Duration::from_secs(5);
const VERSION: [u8; 2] = 28_u16.to_be_bytes();
const READ_BLOCK: u8 = 81;
/// `Status` in datatransfer.proto.
const SUCCESS: u64 = 0;
const ERROR_ACCESS_TOKEN: u64 = 5;
/// Longest answer, in bytes: a status, checksums' kind, a sentence.
const LONGEST: u64 = 4 << 10;
/// Most bytes that are read after it; a byte of a block comes with some tens.
const REST: u64 = 64 << 10;

/// Asks the DataNode that listens there (`HOST:PORT`) for a byte of this block. Takes five seconds at most, and what the
/// resolver takes when HOST is a name.
pub fn ask(address: &str, block: &BlockKey) -> Answer {
    ask_within(address, block, PATIENCE)
}

fn ask_within(address: &str, block: &BlockKey, patience: Duration) -> Answer {
    match try_ask(address, block, patience) {
        Ok(answer) => answer,
        Err(e) => Answer::Unknown(format!(
            "the DataNode at {address} does not answer ({e}); `datanode` in the agent's configuration says where it \
             listens"
        )),
    }
}

fn try_ask(address: &str, block: &BlockKey, patience: Duration) -> Result<Answer> {
    let mut talk = Talk::open(address, patience)?;
    let status = match talk.ask(block) {
        Ok(status) => status,
        Err(e) if is_end(&e) => return Ok(Answer::HungUp),
        Err(e) => return Err(e),
    };
    Ok(match status {
        SUCCESS => {
            talk.leave();
            Answer::Open
        }
        ERROR_ACCESS_TOKEN => Answer::Tokens,
        // the block may have gone, or the DataNode is not ready
        other => Answer::Unknown(format!(
            "the DataNode at {address} answers a read with status {other}"
        )),
    })
}

/// Whether the other side has ended the conversation.
fn is_end(e: &Error) -> bool {
    matches!(
        e.kind(),
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
    )
}

/// A connection that ends at a time, however slowly the other side speaks.
struct Talk {
    stream: TcpStream,
    end: Instant,
}

impl Talk {
    fn open(address: &str, patience: Duration) -> Result<Self> {
        let end = Instant::now() + patience;
        let mut failed = Error::other("it has no address");
        for place in address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&place, left(end)?) {
                Ok(stream) => return Ok(Self { stream, end }),
                Err(e) => failed = e,
            }
        }
        Err(failed)
    }

    /// The status of the DataNode's answer.
    fn ask(&mut self, block: &BlockKey) -> Result<u64> {
        self.stream.set_write_timeout(Some(left(self.end)?))?;
        self.stream.write_all(&request(block))?;
        let length = read_varint(self)?;
        if length > LONGEST {
            return Err(odd());
        }
        let mut answer = vec![0; length as usize];
        self.read_exact(&mut answer)?;
        // from here on an end is an answer that makes no sense
        status(&answer).ok_or_else(odd)
    }

    /// Reads the rest: a DataNode whose words are thrown away writes of it in its log.
    fn leave(mut self) {
        let mut rest = Vec::new();
        let _ = self.stream.shutdown(Shutdown::Write);
        let _ = (&mut self).take(REST).read_to_end(&mut rest);
    }
}

impl Read for Talk {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        self.stream.set_read_timeout(Some(left(self.end)?))?;
        self.stream.read(buffer)
    }
}

/// Time until then; none is an error.
fn left(end: Instant) -> Result<Duration> {
    match end.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(ErrorKind::TimedOut.into()),
        some => Ok(some),
    }
}

fn odd() -> Error {
    Error::other("its answer is none of a DataNode's")
}

/// The question, and with it what a client says when it has read all: the DataNode need not wait for it.
fn request(block: &BlockKey) -> Vec<u8> {
    let mut extended = Vec::new();
    bytes(&mut extended, 1, block.pool().as_bytes());
    number(&mut extended, 2, block.id().cast_unsigned());
    number(&mut extended, 3, block.stamp());
    let mut base = Vec::new();
    bytes(&mut base, 1, &extended);
    let mut header = Vec::new();
    bytes(&mut header, 1, &base);
    bytes(&mut header, 2, b"viola-agent");
    let mut read = Vec::new();
    bytes(&mut read, 1, &header);
    number(&mut read, 2, 0); // offset
    number(&mut read, 3, 1); // length
    number(&mut read, 4, 0); // no checksums
    let mut all = VERSION.to_vec();
    all.push(READ_BLOCK);
    varint(&mut all, read.len() as u64);
    all.extend(read);
    let mut end = Vec::new();
    number(&mut end, 1, SUCCESS);
    varint(&mut all, end.len() as u64);
    all.extend(end);
    all
}

/// The status in a `BlockOpResponseProto`, its first field. A good one is followed by the kind of checksums
/// (`readOpChecksumInfo`), in the answer to a read.
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
    Err(odd())
}

fn varint(to: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        to.push(value as u8 | 0x80);
        value >>= 7;
    }
    to.push(value as u8);
}

fn number(to: &mut Vec<u8>, field: u64, value: u64) {
    varint(to, field << 3);
    varint(to, value);
}

fn bytes(to: &mut Vec<u8>, field: u64, value: &[u8]) {
    varint(to, field << 3 | 2);
    varint(to, value.len() as u64);
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

    /// Asks somebody who does this with the connection once the whole question has come.
    fn asked(patience: Duration, then: impl FnOnce(TcpStream) + Send + 'static) -> Answer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let other = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut question = vec![0; request(&block()).len()];
            stream.read_exact(&mut question).unwrap();
            then(stream);
            question
        });
        let answer = ask_within(&address, &block(), patience);
        assert_eq!(other.join().unwrap(), request(&block()));
        answer
    }

    /// Asks somebody who answers these bytes and hangs up.
    fn answered(bytes: &'static [u8]) -> Answer {
        asked(Duration::from_secs(60), |mut stream| {
            stream.write_all(bytes).unwrap();
        })
    }

    #[test]
    fn the_question_is_that_of_a_client() {
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
    fn its_answer_decides() {
        assert_eq!(answered(&GIVEN), Answer::Open);
        assert_eq!(answered(&[2, 8, 5]), Answer::Tokens);
        assert_eq!(answered(&[5, 8, 5, 0x2a, 1, b'x']), Answer::Tokens);
        assert_eq!(answered(&[]), Answer::HungUp);
        assert_eq!(answered(&[4, 8, 0]), Answer::HungUp);
    }

    #[test]
    fn garbage_and_other_errors_tell_nothing() {
        for (odd, says) in [
            (&[2, 8, 1][..], "status 1"),
            (&[2, 16, 0], "none of a DataNode's"),
            (&[0], "none of a DataNode's"),
            // a success that is not about a read
            (&[2, 8, 0], "none of a DataNode's"),
            (&[4, 8, 0, 0x12, 0], "none of a DataNode's"),
            // cut within its own length, too long, without an end
            (&[1, 8, 0, 0], "none of a DataNode's"),
            (&[0x81, 0x20, 8, 0], "none of a DataNode's"),
            (&[0xff; 20], "none of a DataNode's"),
            (b"HTTP/1.1 400 Bad Request\r\n\r\nwhat is this, and why would anybody send it here at all?",
             "none of a DataNode's"),
        ] {
            let Answer::Unknown(why) = answered(odd) else {
                panic!("{odd:?}");
            };
            assert!(why.contains(says), "{odd:?}: {why}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_answer_is_harmless(answer in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..64)) {
            // only what begins like the answer to a read can be taken for a gift
            if status(&answer) == Some(SUCCESS) {
                proptest::prop_assert_eq!(answer[0] & 0x7f, 8);
                proptest::prop_assert!(answer.iter().any(|byte| byte & 0x7f == 0x22));
            }
        }
    }

    #[test]
    fn nobody_silence_and_drops_are_not_waited_for() {
        let begun = Instant::now();
        let says = |answer, says: &str| match answer {
            Answer::Unknown(why) => {
                assert!(
                    why.contains("`datanode` in the agent's configuration"),
                    "{why}"
                );
                assert!(why.contains(says), "{why}");
            }
            other => panic!("{other:?}"),
        };
        says(ask("127.0.0.1:1", &block()), "refused");
        // it keeps the connection until the question is given up
        let patience = Duration::from_millis(300);
        let silent = asked(patience, |mut stream| {
            assert_eq!(stream.read(&mut [0]).unwrap_or_default(), 0);
        });
        says(silent, "does not answer");
        // a byte now and then, for ever
        let drops = asked(patience, |mut stream| {
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
        assert_eq!(flood, Answer::Open);
    }
}
