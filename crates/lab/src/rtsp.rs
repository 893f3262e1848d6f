// SPDX-License-Identifier: Apache-2.0
//! The part of RTSP (RFC 2326) that the guest's `media` workload and its client use: text requests
//! and answers, and interleaved packets in frames that begin with `$`.

use std::io::{self, BufRead, Read, Write};

/// Longest body in bytes.
const MAX_BODY_BYTES: usize = 32 << 20;

/// An item on a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// A request or an answer.
    Message(Message),
    /// A packet of a stream: channel and content.
    Frame(u8, Vec<u8>),
}

/// A request or an answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message {
    /// Its first line.
    pub first: String,
    /// Headers: name in lower case, and value.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Vec<u8>,
}

impl Message {
    /// A message with this first line.
    pub fn new(first: impl Into<String>) -> Self {
        Self {
            first: first.into(),
            ..Self::default()
        }
    }

    /// Adds a header; its name in lower case.
    pub fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.headers.push((name.into(), value.to_string()));
        self
    }

    /// Value of a header.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, value)| value.as_str())
    }

    /// Its sequence number (`CSeq`).
    pub fn cseq(&self) -> Option<u32> {
        self.get("cseq")?.parse().ok()
    }

    /// Whether it is an answer with status 200.
    pub fn is_ok(&self) -> bool {
        self.first.starts_with("RTSP/1.0 200")
    }

    /// Sends the message.
    ///
    /// # Errors
    /// Errors of the connection.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let mut data = format!("{}\r\n", self.first).into_bytes();
        for (name, value) in &self.headers {
            data.extend(format!("{name}: {value}\r\n").into_bytes());
        }
        if !self.body.is_empty() {
            data.extend(format!("content-length: {}\r\n", self.body.len()).into_bytes());
        }
        data.extend(b"\r\n");
        data.extend(&self.body);
        to.write_all(&data)
    }
}

/// Sends a packet as an interleaved frame (RFC 2326, section 10.12).
///
/// # Errors
/// Errors of the connection; [`io::ErrorKind::InvalidInput`] for a packet above 65,535 bytes.
pub fn write_frame(to: &mut impl Write, channel: u8, packet: &[u8]) -> io::Result<()> {
    let length = u16::try_from(packet.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut data = vec![b'$', channel];
    data.extend(length.to_be_bytes());
    data.extend(packet);
    to.write_all(&data)
}

/// Reads the next item; `None` at the end of the connection.
///
/// # Errors
/// Errors of the connection; [`io::ErrorKind::InvalidData`] or `UnexpectedEof` if the data is not
/// RTSP.
pub fn read(from: &mut impl BufRead) -> io::Result<Option<Item>> {
    let Some(&first) = from.fill_buf()?.first() else {
        return Ok(None);
    };
    if first == b'$' {
        let mut head = [0; 4];
        from.read_exact(&mut head)?;
        let mut packet = vec![0; u16::from_be_bytes([head[2], head[3]]).into()];
        from.read_exact(&mut packet)?;
        return Ok(Some(Item::Frame(head[1], packet)));
    }
    let mut message = Message::new(line(from)?);
    loop {
        let text = line(from)?;
        if text.is_empty() {
            break;
        }
        let (name, value) = text.split_once(':').ok_or(io::ErrorKind::InvalidData)?;
        let header = (name.trim().to_lowercase(), value.trim().to_owned());
        message.headers.push(header);
        if message.headers.len() > 32 {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
    if let Some(length) = message.get("content-length") {
        let length = length.parse().ok().filter(|l| *l <= MAX_BODY_BYTES);
        message.body = vec![0; length.ok_or(io::ErrorKind::InvalidData)?];
        from.read_exact(&mut message.body)?;
    }
    Ok(Some(Item::Message(message)))
}

fn line(from: &mut impl BufRead) -> io::Result<String> {
    let mut data = Vec::new();
    from.take(4096).read_until(b'\n', &mut data)?;
    match data.pop() {
        Some(b'\n') => Ok(String::from_utf8_lossy(&data).trim_end().to_owned()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_and_frames_are_read_as_written() {
        let mut ask = Message::new("PLAY rtsp://web/voice RTSP/1.0").with("cseq", 4);
        ask.body = b"x\r\n\r\n$".to_vec();
        let mut sent = Vec::new();
        ask.write(&mut sent).unwrap();
        write_frame(&mut sent, 2, &[0x80, 1, 2]).unwrap();
        Message::new("RTSP/1.0 200 OK")
            .with("cseq", 4)
            .write(&mut sent)
            .unwrap();
        let mut from = sent.as_slice();
        let Some(Item::Message(got)) = read(&mut from).unwrap() else {
            panic!("no message");
        };
        assert_eq!(
            (got.cseq(), &got.body, &got.first),
            (Some(4), &ask.body, &ask.first)
        );
        let frame = read(&mut from).unwrap();
        assert_eq!(frame, Some(Item::Frame(2, vec![0x80, 1, 2])));
        let Some(Item::Message(answer)) = read(&mut from).unwrap() else {
            panic!("no answer");
        };
        assert!(answer.is_ok() && !ask.is_ok());
        assert_eq!(read(&mut from).unwrap(), None);
    }

    #[test]
    fn truncated_or_invalid_items_are_errors() {
        for bad in [
            &b"PLAY"[..],
            b"PLAY\r\n",
            b"$\x01\x00\x09abc",
            b"PLAY\r\nno colon\r\n\r\n",
            b"PLAY\r\ncontent-length: 99999999999\r\n\r\n",
        ] {
            assert!(
                read(&mut &*bad).is_err(),
                "{}",
                String::from_utf8_lossy(bad)
            );
        }
    }
}
