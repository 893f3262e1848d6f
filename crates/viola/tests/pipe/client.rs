// SPDX-License-Identifier: Apache-2.0
//! An HTTP/1.1 client with a persistent connection.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Read, Result, Write};
use std::net::TcpStream;

use crate::rig::CHANGE_TIMEOUT;

pub struct Client(pub BufReader<TcpStream>);

impl Client {
    pub fn of(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(CHANGE_TIMEOUT)).unwrap();
        Self(BufReader::new(stream))
    }

    /// Requests a file; `more` are additional header lines.
    pub fn ask(&mut self, path: &str, more: &str) {
        self.request("GET", path, more).unwrap();
    }

    pub fn request(&mut self, what: &str, path: &str, more: &str) -> Result<()> {
        let request = format!("{what} {path} HTTP/1.1\r\nHost: x\r\n{more}\r\n");
        self.0.get_mut().write_all(request.as_bytes())
    }

    /// Reads a response and returns its status and body.
    pub fn answer(&mut self) -> (u16, Vec<u8>) {
        self.try_answer().unwrap()
    }

    pub fn try_answer(&mut self) -> Result<(u16, Vec<u8>)> {
        let (status, length) = self.head()?;
        let mut body = vec![0; length];
        self.0.read_exact(&mut body)?;
        Ok((status, body))
    }

    /// Reads a response head and returns its status and content length.
    pub fn head(&mut self) -> Result<(u16, usize)> {
        let (mut status, mut length) = (0, 0);
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line)? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            let line = line.trim_end();
            if line.is_empty() {
                return Ok((status, length));
            }
            if let Some(rest) = line.strip_prefix("HTTP/1.1 ") {
                status = rest[..3].parse().unwrap();
            }
            if let Some(rest) = line.to_lowercase().strip_prefix("content-length: ") {
                length = rest.parse().unwrap();
            }
        }
    }

    /// Requests a whole file and compares it.
    pub fn fetch(&mut self, path: &str, file: &[u8]) {
        self.ask(path, "");
        self.compare(path, file).unwrap();
    }

    /// Compares a response with a whole file while it arrives.
    pub fn compare(&mut self, path: &str, file: &[u8]) -> Result<()> {
        assert_eq!(self.head()?, (200, file.len()), "{path}");
        let mut some = vec![0; 256 << 10];
        for (number, part) in file.chunks(some.len()).enumerate() {
            self.0.read_exact(&mut some[..part.len()])?;
            assert!(some[..part.len()] == *part, "{path}: part {number} differs");
        }
        Ok(())
    }
}
