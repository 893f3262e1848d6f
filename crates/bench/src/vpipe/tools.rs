// SPDX-License-Identifier: Apache-2.0
//! Standard clients: Debian's wrk, which counts replies, and curl, whose file is compared by MD5.

use std::fs::File;
use std::io::{Seek, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};

use super::client::{REPLY_TIMEOUT, Response};
use crate::harness::tool::output;
use viola_cli::error::{Failure, Outcome};

/// Threads of wrk, one per core of a small machine.
const THREADS: usize = 2;
/// Script of wrk that prints its results; wrk's own summary rounds bytes to hundredths of a GB. Times are in
/// microseconds.
const SCRIPT: &str = "done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format('counted %d %d %d %d\\n', summary.duration, summary.requests, summary.bytes,
    e.connect + e.read + e.write + e.status + e.timeout))
end
";

/// Parses the line of the script.
fn parse_counts(text: &str) -> Result<Response, String> {
    let line = text.lines().find_map(|line| line.strip_prefix("counted "));
    let numbers: Option<Vec<u64>> = line.and_then(|line| {
        let words = line.split_ascii_whitespace();
        words.map(|word| word.parse().ok()).collect()
    });
    match numbers.as_deref() {
        Some(&[duration, _, bytes, 0]) if duration > 0 && bytes > 0 => Ok(Response {
            bytes,
            seconds: duration as f64 / 1e6,
            times_ms: Vec::new(),
        }),
        Some(&[_, requests, _, errors]) if errors > 0 => {
            Err(format!("{errors} of {requests} replies failed"))
        }
        _ => Err(format!("cannot parse wrk's output: {}", text.trim())),
    }
}

/// Runs wrk for this many seconds. Bytes include heads and replies cut off at the end. `folder` holds its script.
///
/// # Errors
/// wrk fails, or a reply is an error.
pub fn wrk(
    to: SocketAddr,
    path: &str,
    connections: usize,
    length: Duration,
    folder: &Path,
) -> Outcome<Response> {
    let script = folder.join("wrk.lua");
    std::fs::write(&script, SCRIPT)
        .map_err(|e| Failure::run(format!("{}: {e}", script.display())))?;
    let threads = THREADS.min(connections);
    let output = output(
        Command::new("wrk")
            .args([format!("-t{threads}"), format!("-c{connections}")])
            .arg(format!("-d{}s", length.as_secs()))
            .args(["--timeout", &format!("{}s", REPLY_TIMEOUT.as_secs())])
            .arg("-s")
            .arg(&script)
            .arg(format!("http://{to}{path}")),
    )?;
    let text = String::from_utf8_lossy(&output.stdout);
    parse_counts(&text).map_err(|why| Failure::run(format!("wrk {to}{path}: {why}")))
}

/// The sum in md5sum's output.
fn sum_of(text: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(text).ok()?;
    let sum = text.split_ascii_whitespace().next()?;
    let is_sum = sum.len() == 32 && sum.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_sum.then(|| sum.to_owned())
}

/// MD5 of a file, from offset 0.
fn md5(mut file: &File) -> Outcome<String> {
    let from = file
        .rewind()
        .and_then(|()| file.try_clone())
        .map_err(Failure::run)?;
    let output = output(Command::new("md5sum").stdin(Stdio::from(from)))?;
    sum_of(&output.stdout).ok_or_else(|| Failure::run("cannot parse md5sum's output"))
}

/// A file in memory; drop frees it.
fn memory(name: &str) -> Outcome<File> {
    let made = memfd_create(name, MemfdFlags::CLOEXEC).map_err(Failure::run)?;
    Ok(made.into())
}

/// MD5 of bytes.
///
/// # Errors
/// No memory is left, or md5sum is missing.
pub fn md5_of(bytes: &[u8]) -> Outcome<String> {
    let mut file = memory("md5")?;
    file.write_all(bytes).map_err(Failure::run)?;
    md5(&file)
}

/// Parses bytes and seconds in curl's output.
fn parse_curl(text: &str) -> Option<(u64, f64)> {
    let mut words = text.trim().split(' ');
    let parse_curl = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    (words.next().is_none() && parse_curl.1 > 0.0).then_some(parse_curl)
}

/// Gets a file repeatedly with curl for this long, each time over a new connection. The time is curl's own and includes
/// the connection.
///
/// # Errors
/// curl fails, or the MD5 of a body is not `sum`.
pub fn curl(to: SocketAddr, path: &str, sum: &str, length: Duration) -> Outcome<Response> {
    let failed = |why: String| Failure::run(format!("curl {to}{path}: {why}"));
    let mut received = Response::default();
    let started = Instant::now();
    while received.seconds < length.as_secs_f64() && started.elapsed() < REPLY_TIMEOUT {
        let body = memory("curl")?;
        let stdout = body.try_clone().map_err(Failure::run)?;
        let output = output(
            Command::new("curl")
                .args(["--silent", "--show-error", "--fail", "--max-time"])
                .arg(REPLY_TIMEOUT.as_secs().to_string())
                .args(["--write-out", "%{stderr}%{size_download} %{time_total}"])
                .arg(format!("http://{to}{path}"))
                .stdout(Stdio::from(stdout)),
        )?;
        let text = String::from_utf8_lossy(&output.stderr);
        let (bytes, seconds) = parse_curl(&text)
            .ok_or_else(|| failed(format!("cannot parse curl's output: {}", text.trim())))?;
        let found = md5(&body)?;
        if found != sum {
            return Err(failed(format!(
                "{bytes} bytes with MD5 {found} instead of {sum}"
            )));
        }
        received.bytes += bytes;
        received.seconds += seconds;
        received.times_ms.push(seconds * 1e3);
    }
    Ok(received)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrk_results_with_errors_are_rejected() {
        let text =
            "Running 1s test\n  2 threads and 32 connections\ncounted 1002345 700 46000000 0\n";
        let received = parse_counts(text).unwrap();
        assert_eq!((received.bytes, received.seconds), (46_000_000, 1.002_345));
        let why = parse_counts("counted 1002345 700 46000000 3\n").unwrap_err();
        assert_eq!(why, "3 of 700 replies failed");
        assert!(parse_counts("counted 1002345 0 0 0\n").is_err());
        assert!(parse_counts("Requests/sec: 12\n").is_err());
    }

    #[test]
    fn curl_output_gives_bytes_and_seconds() {
        assert_eq!(
            parse_curl("268435456 0.251337"),
            Some((268_435_456, 0.251_337))
        );
        assert_eq!(parse_curl("curl: (7) no route"), None);
        assert_eq!(parse_curl("1 0.0"), None);
    }

    #[test]
    fn md5_covers_all_bytes() {
        let sum = "900150983cd24fb0d6963f7d28e17f72"; // RFC 1321, A.5
        assert_eq!(md5_of(b"abc").unwrap(), sum);
        assert_eq!(sum_of(format!("{sum}  -\n").as_bytes()).unwrap(), sum);
        assert_eq!(sum_of(b"md5sum: -: no"), None);
    }
}
