// SPDX-License-Identifier: Apache-2.0
//! Clients that request a file from a web server over persistent connections and compare every received byte.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use viola_cli::error::{Failure, Outcome};

/// Timeout for a reply.
pub const REPLY_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes per read.
pub const READ_BYTES: usize = 256 << 10;

/// A request.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The server.
    pub to: SocketAddr,
    /// Path of the file.
    pub path: &'a str,
    /// Expected contents.
    pub file: &'a [u8],
}

/// Result of a load.
#[derive(Debug, Clone, Default)]
pub struct Response {
    /// Body bytes, including bodies cut off at the end.
    pub bytes: u64,
    /// From the first request to the end.
    pub seconds: f64,
    /// From request to the last byte of the reply, in milliseconds; complete replies only.
    pub times_ms: Vec<f64>,
}

/// Repeats requests on this many connections for this long, from the calling thread's network namespace.
///
/// # Errors
/// The first failure, in particular a byte that differs from the file.
pub fn load(ask: Request<'_>, connections: usize, length: Duration) -> Outcome<Response> {
    let connect = |_| -> Outcome<BufReader<TcpStream>> {
        let stream = TcpStream::connect_timeout(&ask.to, REPLY_TIMEOUT);
        let stream = stream.map_err(|e| Failure::run(format!("{}: {e}", ask.to)))?;
        stream
            .set_read_timeout(Some(REPLY_TIMEOUT))
            .map_err(Failure::run)?;
        stream.set_nodelay(true).map_err(Failure::run)?;
        Ok(BufReader::with_capacity(64 << 10, stream))
    };
    let streams: Vec<_> = (0..connections).map(connect).collect::<Outcome<_>>()?;
    let started = Instant::now();
    let until = started + length;
    let each = std::thread::scope(|scope| {
        let threads: Vec<_> = streams
            .into_iter()
            .map(|stream| scope.spawn(move || one(ask, stream, until)))
            .collect();
        let joined = threads.into_iter().map(|thread| match thread.join() {
            Ok(received) => received,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        joined.collect::<Outcome<Vec<Response>>>()
    })?;
    let mut all = Response {
        seconds: started.elapsed().as_secs_f64(),
        ..Response::default()
    };
    for received in each {
        all.bytes += received.bytes;
        all.times_ms.extend(received.times_ms);
    }
    Ok(all)
}

/// One connection.
fn one(ask: Request<'_>, mut stream: BufReader<TcpStream>, until: Instant) -> Outcome<Response> {
    let failed = |what: &str| Failure::run(format!("{}{}: {what}", ask.to, ask.path));
    let request = format!("GET {} HTTP/1.1\r\nHost: x\r\n\r\n", ask.path);
    let mut received = Response::default();
    let mut piece = vec![0; READ_BYTES];
    while Instant::now() < until {
        let started = Instant::now();
        stream
            .get_mut()
            .write_all(request.as_bytes())
            .map_err(|e| failed(&e.to_string()))?;
        head(&mut stream, ask.file.len()).map_err(|why| failed(&why))?;
        let mut at = 0;
        while at < ask.file.len() {
            let expected = READ_BYTES.min(ask.file.len() - at);
            let n = stream
                .read(&mut piece[..expected])
                .map_err(|e| failed(&e.to_string()))?;
            if n == 0 {
                return Err(failed(&format!("the body ends after {at} bytes")));
            }
            if piece[..n] != ask.file[at..at + n] {
                return Err(failed(&format!("other bytes than the file's at {at}")));
            }
            at += n;
            received.bytes += n as u64;
            if Instant::now() >= until && at < ask.file.len() {
                return Ok(received);
            }
        }
        received
            .times_ms
            .push(started.elapsed().as_secs_f64() * 1e3);
    }
    Ok(received)
}

/// Reads a reply's head, which must announce the complete file.
fn head(stream: &mut BufReader<TcpStream>, length: usize) -> Result<(), String> {
    let mut first = true;
    let mut announced: Option<usize> = None;
    loop {
        let mut line = String::new();
        let received = stream.read_line(&mut line).map_err(|e| e.to_string())?;
        let line = line.trim_end().to_ascii_lowercase();
        match line.as_str() {
            _ if received == 0 => return Err("the server closed the connection".into()),
            "" => break,
            _ if first && !line.starts_with("http/1.1 200") => return Err(line),
            _ => {}
        }
        first = false;
        if let Some(number) = line.strip_prefix("content-length:") {
            announced = number.trim().parse().ok();
        }
    }
    match announced {
        Some(n) if n == length => Ok(()),
        other => Err(format!("{other:?} bytes announced instead of {length}")),
    }
}
