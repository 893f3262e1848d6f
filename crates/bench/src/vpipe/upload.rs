// SPDX-License-Identifier: Apache-2.0
//! A client that uploads one file repeatedly to the library's example upload server.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::client::{REPLY_TIMEOUT, Response};
use viola_cli::error::{Failure, Outcome};

/// Uploads over one connection for this long, from the calling thread's network namespace, and waits for each upload to
/// complete.
///
/// # Errors
/// The first failure, in particular an incomplete upload.
pub fn load(to: SocketAddr, file: &[u8], length: Duration) -> Outcome<Response> {
    let failed = |e: std::io::Error| Failure::run(format!("upload to {to}: {e}"));
    let mut stream = TcpStream::connect_timeout(&to, REPLY_TIMEOUT).map_err(failed)?;
    stream
        .set_read_timeout(Some(REPLY_TIMEOUT))
        .map_err(failed)?;
    stream
        .set_write_timeout(Some(REPLY_TIMEOUT))
        .map_err(failed)?;
    stream.set_nodelay(true).map_err(failed)?;
    let head = (file.len() as u64).to_be_bytes();
    let started = Instant::now();
    let mut received = Response::default();
    while started.elapsed() < length {
        let each = Instant::now();
        stream.write_all(&head).map_err(failed)?;
        stream.write_all(file).map_err(failed)?;
        let mut answer = [0; 8];
        stream.read_exact(&mut answer).map_err(failed)?;
        if answer != head {
            let count = u64::from_be_bytes(answer);
            let why = format!(
                "upload to {to}: {count} bytes arrived instead of {}",
                file.len()
            );
            return Err(Failure::run(why));
        }
        received.bytes += file.len() as u64;
        received.times_ms.push(each.elapsed().as_secs_f64() * 1e3);
    }
    received.seconds = started.elapsed().as_secs_f64();
    Ok(received)
}
