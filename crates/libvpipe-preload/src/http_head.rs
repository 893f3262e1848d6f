// SPDX-License-Identifier: Apache-2.0
//! Parses heads of HTTP responses: which bytes of a file certainly follow.
//!
//! A head that the parser does not understand counts as none: then the library pipes each part by
//! itself.

use std::ffi::c_int;

/// Longest head that is parsed, in bytes.
pub const MAX_HEAD: usize = 16 << 10;
/// First bytes of a head.
pub const BEGIN: &[u8; 7] = b"HTTP/1.";

/// The body that a head announces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Body {
    /// A complete resource.
    Whole {
        /// Size in bytes.
        length: u64,
    },
    /// A range of a resource.
    Range {
        /// Offset of its first byte in the resource.
        first: u64,
        /// Length in bytes.
        length: u64,
        /// Size of the resource in bytes.
        size: u64,
    },
}

impl Body {
    /// Length of the body in bytes.
    pub fn length(&self) -> u64 {
        match *self {
            Self::Whole { length } | Self::Range { length, .. } => length,
        }
    }

    /// Bytes of a file of this size that certainly follow, if the body begins with the file's bytes at `offset`.
    pub fn of_file(&self, file_size: u64, offset: u64) -> Option<u64> {
        let fits = match *self {
            Self::Whole { length } => offset == 0 && length == file_size,
            Self::Range { first, size, .. } => offset == first && size == file_size,
        };
        fits.then_some(self.length())
    }
}

/// Position of the first newline. memchr(3) is fast, and this runs for each head.
fn newline(bytes: &[u8]) -> Option<usize> {
    let begin = bytes.as_ptr();
    // SAFETY: it reads no more than these bytes.
    let at = unsafe { libc::memchr(begin.cast(), c_int::from(b'\n'), bytes.len()) };
    (!at.is_null()).then(|| at as usize - begin as usize)
}

/// The first `Content-Length` of a head, in bytes, without any other check: [`parse`] finds no
/// larger one.
pub fn announced(bytes: &[u8]) -> Option<u64> {
    const NAME: &[u8] = b"content-length:";
    let mut rest = bytes;
    loop {
        let line = newline(rest)?;
        rest = rest.get(line + 1..)?;
        match rest.first()? {
            b'\r' | b'\n' => return None, // a body
            b'C' | b'c' if begins(rest, NAME) => break,
            _ => (),
        }
    }
    let value = rest.get(NAME.len()..)?.trim_ascii_start();
    let mut digits = value.iter().take_while(|b| b.is_ascii_digit());
    digits.try_fold(0_u64, |sum, &b| {
        sum.checked_mul(10)?.checked_add(u64::from(b - b'0'))
    })
}

/// Parses a complete head without body bytes; `None` unless one part of known length follows.
pub fn parse(bytes: &[u8]) -> Option<Body> {
    let lines = bytes.strip_suffix(b"\r\n\r\n")?;
    let mut lines = lines
        .split(|&b| b == b'\n')
        .map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    let status = status(lines.next()?)?;
    let mut length = None;
    let mut range = None;
    for line in lines {
        let colon = line.iter().position(|&b| b == b':')?; // an empty line ends the head: body bytes follow
        let (name, value) = (line.get(..colon)?, line.get(colon + 1..)?.trim_ascii());
        if name.is_empty() || name.iter().any(u8::is_ascii_whitespace) {
            return None;
        }
        let is = |known: &str| name.eq_ignore_ascii_case(known.as_bytes());
        let unclear = is("transfer-encoding")
            || is("content-type") && begins(value, b"multipart/")
            || is("content-length") && length.replace(number(value)?).is_some()
            || is("content-range") && range.replace(self::range(value)?).is_some();
        if unclear {
            return None;
        }
    }
    let length = length?;
    match (status, range) {
        (200, None) => Some(Body::Whole { length }),
        (206, Some((first, last, size))) => {
            let fits = first <= last && last < size && last - first == length.checked_sub(1)?;
            fits.then_some(Body::Range {
                first,
                length,
                size,
            })
        }
        _ => None,
    }
}

fn status(line: &[u8]) -> Option<u64> {
    let rest = line.strip_prefix(BEGIN)?;
    let rest = rest
        .strip_prefix(b"0 ")
        .or_else(|| rest.strip_prefix(b"1 "))?;
    match rest.get(3) {
        None | Some(b' ') => number(rest.get(..3)?),
        Some(_) => None,
    }
}

fn begins(value: &[u8], with: &[u8]) -> bool {
    value
        .get(..with.len())
        .is_some_and(|start| start.eq_ignore_ascii_case(with))
}

fn number(text: &[u8]) -> Option<u64> {
    if text.is_empty() || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// `bytes FIRST-LAST/SIZE`
fn range(value: &[u8]) -> Option<(u64, u64, u64)> {
    let rest = begins(value, b"bytes ").then(|| value.get(6..))??;
    let dash = rest.iter().position(|&b| b == b'-')?;
    let slash = rest.iter().position(|&b| b == b'/')?;
    Some((
        number(rest.get(..dash)?)?,
        number(rest.get(dash + 1..slash)?)?,
        number(rest.get(slash + 1..)?)?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head(lines: &str) -> Option<Body> {
        parse(format!("{}\r\n\r\n", lines.replace('\n', "\r\n")).as_bytes())
    }

    #[test]
    fn a_whole_file_follows() {
        let body = head("HTTP/1.1 200 OK\nServer: x\ncontent-length: 10\nConnection: close");
        assert_eq!(body, Some(Body::Whole { length: 10 }));
        let body = body.unwrap();
        assert_eq!(body.of_file(10, 0), Some(10));
        assert_eq!((body.of_file(11, 0), body.of_file(10, 1)), (None, None));
        let old = head("HTTP/1.0 200 OK\nContent-Length: 10");
        assert_eq!(old, Some(Body::Whole { length: 10 }));
    }

    #[test]
    fn a_range_of_a_file_follows() {
        let text =
            "HTTP/1.1 206 Partial Content\nContent-Range: bytes 5-14/100\nContent-Length: 10";
        let body = head(text).unwrap();
        assert_eq!(body.of_file(100, 5), Some(10));
        assert_eq!((body.of_file(100, 0), body.of_file(99, 5)), (None, None));
        for wrong in [
            "5-15/100",
            "5-14/*",
            "*/100",
            "14-5/100",
            "95-104/100",
            "5-/100",
            "a",
        ] {
            assert_eq!(head(&text.replace("5-14/100", wrong)), None, "{wrong}");
        }
        let empty = text.replace("Length: 10", "Length: 0");
        assert_eq!(head(&empty.replace("5-14", "5-4")), None);
    }

    #[test]
    fn uncertain_heads_announce_no_body() {
        for text in [
            "HTTP/1.1 200 OK",
            "HTTP/1.1 304 Not Modified\nContent-Length: 10",
            "HTTP/1.1 206 Partial\nContent-Length: 10",
            "HTTP/1.1 200 OK\nContent-Length: 10\nContent-Length: 10",
            "HTTP/1.1 200 OK\nContent-Length: 10\nTransfer-Encoding: chunked",
            "HTTP/1.1 200 OK\nContent-Length: 10\n folded: 1",
            "HTTP/1.1 200 OK\nContent-Length: +10",
            "HTTP/1.1 200 OK\nContent-Length: 99999999999999999999",
            "HTTP/1.1 2000 OK\nContent-Length: 10",
            "HTTP/1.2 200 OK\nContent-Length: 10",
            "HTTP/1.1 200 OK\nContent-Length: 10\n\nbody",
            "HTTP/1.1 100 Continue\n\nHTTP/1.1 200 OK\nContent-Length: 10",
            "HTTP/1.1 206 Partial\nContent-Type: Multipart/byteranges; boundary=x\nContent-Length: 10\nContent-Range: bytes 0-9/10",
        ] {
            assert_eq!(head(text), None, "{text}");
        }
        assert_eq!(parse(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n"), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
            let mut head = b"HTTP/1.1 206 x\r\nContent-Range: bytes ".to_vec();
            head.extend(bytes);
            head.extend(b"\r\n\r\n");
            let _ = parse(&head);
        }

        #[test]
        fn the_announced_length_is_the_parsed_length(length: u64, name in "[A-Za-z-]{1,15}: ?[ -~]{0,20}", end in "[ -~]{0,3}") {
            let text = format!("HTTP/1.1 200 x\r\n{name}\r\ncontent-LENGTH: {length}{end}\r\n\r\n");
            if let Some(body) = parse(text.as_bytes()) {
                prop_assert_eq!(announced(text.as_bytes()), Some(body.length()));
            }
            for cut in 0..text.len() {
                let _ = announced(&text.as_bytes()[..cut]);
            }
        }

        #[test]
        fn any_range_is_parsed(first: u32, more: u32, after: u32, name in "[A-Za-z-]{1,12}: [ -~]{0,20}") {
            prop_assume!(!name.to_ascii_lowercase().starts_with("content") && !name.to_ascii_lowercase().starts_with("transfer"));
            let (first, length) = (u64::from(first), u64::from(more) + 1);
            let size = first + length + u64::from(after);
            let last = first + length - 1;
            let text = format!("HTTP/1.1 206 x\r\n{name}\r\nContent-Length:{length}\r\nContent-Range: bytes {first}-{last}/{size}\r\n\r\n");
            prop_assert_eq!(parse(text.as_bytes()), Some(Body::Range { first, length, size }));
        }
    }
}
