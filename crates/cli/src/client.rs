// SPDX-License-Identifier: Apache-2.0
//! A blocking client for the daemon's control socket, and for the read socket beside it, which answers `GET` only.
//!
//! Each request has a connection of its own. It speaks HTTP/1.0, so the reply ends where the connection ends. An HTTP
//! library would bring an asynchronous runtime into commands that send one request and print one table.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::Failure;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Time in which the daemon has to accept a request, and to reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of a reply that the client reads at most.
const MAX_REPLY_BYTES: u64 = 64 << 20;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No daemon listens on the socket.
    #[error("no daemon on {} ({source}); start one with viola run", socket.display())]
    NoDaemon {
        /// Path of the socket.
        socket: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// This user may use neither the control socket nor, to look, the read socket beside it.
    #[error(
        "no permission to use {}: run as root, or join the daemon's group (viola; viola-read may only look)",
        socket.display()
    )]
    Denied {
        /// Path of the socket.
        socket: PathBuf,
    },
    /// The connection broke.
    #[error("the daemon on {} does not answer: {source}", socket.display())]
    Io {
        /// Path of the socket.
        socket: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The reply is not that of a viola daemon.
    #[error("the process on {} is not a viola daemon of this version: {what}", socket.display())]
    Protocol {
        /// Path of the socket.
        socket: PathBuf,
        /// What is wrong with the reply.
        what: String,
    },
    /// The daemon refused the request.
    #[error("{}", answer.error)]
    Refused {
        /// HTTP status.
        status: u16,
        /// The daemon's reason.
        answer: viola_proto::Error,
    },
}

impl From<ClientError> for Failure {
    fn from(e: ClientError) -> Self {
        match &e {
            // The request is at fault, not the daemon.
            ClientError::Refused {
                status: 400 | 404 | 409,
                ..
            } => Self::usage(e),
            _ => Self::run(e),
        }
    }
}

/// A daemon's control socket.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// A client for the daemon on this socket. Each request opens its own connection.
    pub fn new(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
        }
    }

    /// Sends `GET`; `path` begins after `/v1`. A user who may not use the control socket asks the read socket beside it.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let denied = match self.request("GET", path, b"") {
            Err(e @ ClientError::Denied { .. }) => e,
            answer => return answer,
        };
        match Self::new(&read_socket_beside(&self.socket)).request("GET", path, b"") {
            Err(ClientError::Denied { .. } | ClientError::NoDaemon { .. }) => Err(denied),
            answer => answer,
        }
    }

    /// Sends `POST` without a body.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn post<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.request("POST", path, b"")
    }

    /// Sends `PATCH` with a body.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn patch<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        let body = serde_json::to_vec(body).map_err(|e| self.protocol(e.to_string()))?;
        self.request("PATCH", path, &body)
    }

    fn request<T: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        body: &[u8],
    ) -> Result<T, ClientError> {
        let answer = self.exchange(method, path, body)?;
        let (status, body) = split(&answer).map_err(|what| self.protocol(what.to_owned()))?;
        if status >= 400 {
            let answer = serde_json::from_slice(body)
                .map_err(|_| self.protocol(format!("status {status} without a reason")))?;
            return Err(ClientError::Refused { status, answer });
        }
        serde_json::from_slice(body).map_err(|e| self.protocol(e.to_string()))
    }

    fn exchange(&self, method: &str, path: &str, body: &[u8]) -> Result<Vec<u8>, ClientError> {
        let socket = self.socket.clone();
        let mut stream = UnixStream::connect(&socket).map_err(|source| match source.kind() {
            io::ErrorKind::PermissionDenied => ClientError::Denied {
                socket: socket.clone(),
            },
            _ => ClientError::NoDaemon {
                socket: socket.clone(),
                source,
            },
        })?;
        let mut request = format!(
            "{method} /{}{path} HTTP/1.0\r\nhost: viola\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            viola_proto::VERSION,
            body.len()
        )
        .into_bytes();
        request.extend_from_slice(body);
        let mut answer = Vec::new();
        let done = (|| {
            stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
            stream.set_write_timeout(Some(REPLY_TIMEOUT))?;
            let sent = stream.write_all(&request);
            // A daemon that refuses a request replies before it has read the end, and closes the connection.
            Read::take(&stream, MAX_REPLY_BYTES)
                .read_to_end(&mut answer)
                .and(sent)
        })();
        match done {
            Err(source) if split(&answer).is_err() => Err(ClientError::Io { socket, source }),
            _ => Ok(answer),
        }
    }

    fn protocol(&self, what: String) -> ClientError {
        ClientError::Protocol {
            socket: self.socket.clone(),
            what,
        }
    }
}

/// Path of the read socket beside a control socket: `viola-read.sock` for `viola.sock`.
pub fn read_socket_beside(control: &Path) -> PathBuf {
    let mut name = control.file_stem().unwrap_or_default().to_owned();
    name.push("-read");
    if let Some(extension) = control.extension() {
        name.push(".");
        name.push(extension);
    }
    control.with_file_name(name)
}

/// Splits a reply into status and body.
fn split(answer: &[u8]) -> Result<(u16, &[u8]), &'static str> {
    let end = answer
        .windows(4)
        .position(|w| w == b"\r\n\r\n")
        .ok_or("the reply has no header")?;
    let head = std::str::from_utf8(&answer[..end]).map_err(|_| "the header is not text")?;
    let body = &answer[end + 4..];
    let mut lines = head.split("\r\n");
    let status = lines
        .next()
        .and_then(|l| l.strip_prefix("HTTP/1."))
        .and_then(|l| l.split(' ').nth(1)?.parse().ok())
        .ok_or("the reply is not HTTP/1")?;
    for line in lines {
        let Some((name, value)) = line.split_once(':') else {
            return Err("a header field has no value");
        };
        if name.eq_ignore_ascii_case("content-length") && value.trim().parse() != Ok(body.len()) {
            return Err("the reply was cut short");
        }
        if name.eq_ignore_ascii_case("transfer-encoding") {
            return Err("the reply is chunked");
        }
    }
    Ok((status, body))
}

/// A VM's name as a segment of a path, percent-encoded (RFC 3986).
pub fn segment(name: &str) -> String {
    let mut out = String::new();
    for b in name.bytes() {
        if b.is_ascii_alphanumeric() || b"-_.~:@".contains(&b) {
            out.push(b as char);
        } else {
            out.push_str(&format!("%{b:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_answer_is_a_head_and_a_body_of_the_promised_length() {
        assert_eq!(
            split(b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}"),
            Ok((200, &b"{}"[..]))
        );
        assert_eq!(
            split(b"HTTP/1.1 404 Not Found\r\n\r\n"),
            Ok((404, &b""[..]))
        );
        assert_eq!(
            split(b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\n{}"),
            Err("the reply was cut short")
        );
        assert!(split(b"HTTP/1.0 200 OK\r\n").is_err());
        assert!(split(b"SSH-2.0-x\r\n\r\n").is_err());
        assert!(split(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n").is_err());
    }

    #[test]
    fn a_name_cannot_leave_its_part_of_the_path() {
        assert_eq!(segment("uml:g1"), "uml:g1");
        assert_eq!(segment("a/../b c?"), "a%2F..%2Fb%20c%3F");
        assert_eq!(segment("ü"), "%C3%BC");
    }

    #[test]
    fn the_read_socket_has_the_control_sockets_name_with_read() {
        let beside = |path: &str| read_socket_beside(Path::new(path));
        assert_eq!(
            beside("/run/viola/viola.sock"),
            Path::new("/run/viola/viola-read.sock")
        );
        assert_eq!(beside("v"), Path::new("v-read"));
        assert_eq!(beside("/a.b/v.x.sock"), Path::new("/a.b/v.x-read.sock"));
    }

    #[test]
    fn without_a_daemon_the_socket_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("none.sock");
        let said = Client::new(&socket)
            .get::<viola_proto::Status>("/status")
            .unwrap_err()
            .to_string();
        assert!(
            said.contains("none.sock") && said.contains("viola run"),
            "{said}"
        );
    }

    #[test]
    fn somebody_elses_socket_is_recognised() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("x.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let other = std::thread::spawn(move || {
            let (mut c, _) = listener.accept().unwrap();
            let _ = c.read(&mut [0; 4096]);
            c.write_all(b"220 mail.example ESMTP\r\n").unwrap();
        });
        let e = Client::new(&socket)
            .get::<viola_proto::Status>("/status")
            .unwrap_err();
        other.join().unwrap();
        assert!(matches!(e, ClientError::Protocol { .. }), "{e}");
    }

    proptest! {
        #[test]
        fn no_answer_makes_the_client_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), head in any::<bool>()) {
            let mut answer = if head { b"HTTP/1.1 200 OK\r\n".to_vec() } else { Vec::new() };
            answer.extend(bytes);
            let _ = split(&answer);
        }
    }
}
