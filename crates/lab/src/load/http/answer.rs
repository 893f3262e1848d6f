// SPDX-License-Identifier: Apache-2.0
//! Reads an HTTP answer piece by piece. The body is counted, not kept.

/// Largest head of an answer in bytes.
const MAX_HEAD_BYTES: usize = 16 << 10;

/// An answer on its way.
#[derive(Debug)]
pub(super) struct Answer {
    /// Expected length of the body.
    expected: usize,
    head: Vec<u8>,
    body: Option<Body>,
}

/// What the head announces, and what has come.
#[derive(Debug)]
struct Body {
    /// `None`: the body ends with the connection.
    length: Option<usize>,
    closes: bool,
    received: usize,
}

impl Answer {
    /// An answer of which nothing has come yet.
    pub(super) fn new(expected: usize) -> Self {
        Self {
            expected,
            head: Vec::new(),
            body: None,
        }
    }

    /// Makes it ready for the next answer of the connection.
    pub(super) fn reset(&mut self) {
        self.head.clear();
        self.body = None;
    }

    /// Whether nothing has come yet.
    pub(super) fn is_empty(&self) -> bool {
        self.head.is_empty()
    }

    /// Whether the server closes the connection after this answer.
    pub(super) fn closes(&self) -> bool {
        self.body.as_ref().is_none_or(|body| body.closes)
    }

    /// Takes received bytes. Returns whether the answer is complete.
    pub(super) fn feed(&mut self, data: &[u8]) -> Result<bool, String> {
        let received = match &mut self.body {
            Some(_) => data.len(),
            None => {
                let seen = self.head.len().saturating_sub(3);
                self.head.extend_from_slice(data);
                let end = self.head[seen..].windows(4).position(|w| w == b"\r\n\r\n");
                let Some(end) = end.map(|at| seen + at) else {
                    return match self.head.len() > MAX_HEAD_BYTES {
                        true => Err("the answer's head does not end within 16 KiB".into()),
                        false => Ok(false),
                    };
                };
                self.body = Some(announced(&self.head[..end], self.expected)?);
                self.head.len() - end - 4
            }
        };
        let Some(body) = &mut self.body else {
            return Ok(false);
        };
        body.received += received;
        if body.received > self.expected {
            return Err(wrong_length(body.received, self.expected));
        }
        Ok(body.length == Some(body.received))
    }

    /// The connection has ended: checks that the answer is complete.
    pub(super) fn end(&self) -> Result<(), String> {
        match &self.body {
            None => Err("the answer's head is incomplete".into()),
            Some(body) if body.received == self.expected => Ok(()),
            Some(body) => Err(wrong_length(body.received, self.expected)),
        }
    }
}

fn wrong_length(found: usize, expected: usize) -> String {
    format!("a body of {found} bytes where {expected} were expected")
}

/// Reads a head: status 200, and a body of the expected length.
fn announced(head: &[u8], expected: usize) -> Result<Body, String> {
    let head = String::from_utf8_lossy(head);
    let mut lines = head.split("\r\n");
    let first = lines.next().unwrap_or_default();
    let status = first.split(' ').nth(1).unwrap_or_default();
    if status != "200" {
        return Err(format!("status {status}"));
    }
    let mut body = Body {
        length: None,
        closes: first.starts_with("HTTP/1.0"),
        received: 0,
    };
    for line in lines {
        let (name, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.trim();
        match name.to_ascii_lowercase().as_str() {
            "content-length" => {
                let length = value
                    .parse()
                    .map_err(|_| format!("Content-Length `{value}`"))?;
                body.length = Some(length);
            }
            "connection" if value.eq_ignore_ascii_case("close") => body.closes = true,
            "connection" if value.eq_ignore_ascii_case("keep-alive") => body.closes = false,
            "transfer-encoding" => return Err(format!("Transfer-Encoding `{value}`")),
            _ => {}
        }
    }
    // such a body ends with the connection
    body.closes |= body.length.is_none();
    match body.length {
        Some(length) if length != expected => Err(wrong_length(length, expected)),
        _ => Ok(body),
    }
}

#[cfg(test)]
mod tests {
    use super::Answer;

    fn whole(text: &str, bytes: usize) -> Result<bool, String> {
        Answer::new(bytes).feed(text.as_bytes())
    }

    #[test]
    fn an_answer_needs_status_200_and_the_right_length() {
        let good = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n12345";
        assert_eq!(whole(good, 5), Ok(true));
        assert!(whole(good, 4).unwrap_err().contains("5 bytes"));
        assert_eq!(
            whole("HTTP/1.1 404 Not Found\r\n\r\n12345", 5).unwrap_err(),
            "status 404"
        );
        let long = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n123456";
        assert!(whole(long, 5).unwrap_err().contains("6 bytes"));
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert!(whole(chunked, 5).is_err());
        assert!(whole(&"x".repeat(20_000), 5).is_err(), "no end of the head");
    }

    #[test]
    fn an_answer_may_come_byte_by_byte() {
        let text = "HTTP/1.1 200 OK\r\ncontent-LENGTH: 3\r\nConnection: Close\r\n\r\nabc";
        let mut answer = Answer::new(3);
        assert!(answer.is_empty());
        let (last, rest) = text.as_bytes().split_last().unwrap();
        for byte in rest {
            assert_eq!(answer.feed(&[*byte]), Ok(false));
        }
        assert!(answer.end().is_err(), "a byte is missing");
        assert_eq!(answer.feed(&[*last]), Ok(true));
        assert!(answer.closes());
        answer.reset();
        assert!(answer.is_empty());
        assert!(answer.end().is_err());
    }

    #[test]
    fn without_a_length_the_body_ends_with_the_connection() {
        let mut answer = Answer::new(5);
        assert_eq!(answer.feed(b"HTTP/1.0 200 OK\r\n\r\n1234"), Ok(false));
        assert!(answer.closes());
        assert!(answer.end().unwrap_err().contains("4 bytes"));
        assert_eq!(answer.feed(b"5"), Ok(false));
        assert_eq!(answer.end(), Ok(()));
        assert!(answer.feed(b"6").is_err());
    }

    #[test]
    fn http_1_1_keeps_the_connection_unless_it_says_close() {
        for (head, closes) in [
            ("HTTP/1.1 200 OK\r\n", false),
            ("HTTP/1.1 200 OK\r\nConnection: close\r\n", true),
            ("HTTP/1.0 200 OK\r\n", true),
            ("HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n", false),
        ] {
            let mut answer = Answer::new(0);
            let text = format!("{head}Content-Length: 0\r\n\r\n");
            assert_eq!(answer.feed(text.as_bytes()), Ok(true));
            assert_eq!(answer.closes(), closes, "{head}");
        }
    }
}
