// SPDX-License-Identifier: Apache-2.0
//! HTTP requests, each on a connection of its own.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::{Client, ClientNetwork, Intervals, Times, percentile, run, sleep_until};
use crate::error::{Error, Result};

/// Time limit for a connection and for each part of an answer.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// A run of HTTP requests.
#[derive(Debug, Clone)]
pub struct Http {
    /// Port of the guest's `nginx`.
    pub port: u16,
    /// Requested path.
    pub path: String,
    /// Expected length of the body in bytes.
    pub bytes: usize,
    /// Number of requests.
    pub requests: usize,
    /// Parallel requests, 1 to 256.
    pub concurrency: usize,
    /// Shortest and longest pause of a worker before its next request, uniform in between; zeros
    /// for a closed loop.
    pub pause: (Duration, Duration),
    /// Open loop: evenly spaced requests per second, whether earlier ones were answered or not, as
    /// httperf sends them. A request's time counts from when it was due. `None`: closed loop with
    /// `pause`.
    pub rate: Option<f64>,
    /// The run ends after this time even if requests remain.
    pub limit: Duration,
    /// How the client runs.
    pub client: Client,
}

impl Default for Http {
    /// 1000 requests for `/page5k`, one at a time, in at most 60 s.
    fn default() -> Self {
        Self {
            port: 80,
            path: "/page5k".into(),
            bytes: 5 << 10,
            requests: 1000,
            concurrency: 1,
            pause: (Duration::ZERO, Duration::ZERO),
            rate: None,
            limit: Duration::from_secs(60),
            client: Client::default(),
        }
    }
}

/// Result of a run of requests.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HttpResult {
    /// Times from the start of the connection to the last byte; `lost` includes wrong answers.
    pub times: Times,
    /// Connection time of each good request in microseconds.
    pub connect_us: Vec<f64>,
    /// Reason of the first failure.
    pub first_failure: Option<String>,
}

impl HttpResult {
    /// The `p`-th percentile of the connection times in microseconds.
    pub fn connect_percentile(&self, p: f64) -> Option<f64> {
        percentile(&self.connect_us, p)
    }
}

/// Sends requests to a guest's web server and checks status and length of each answer.
///
/// # Errors
/// [`Error::Load`], [`Error::OutsideLab`].
pub fn http(net: &impl ClientNetwork, to: Ipv4Addr, options: &Http) -> Result<HttpResult> {
    if !(1..=256).contains(&options.concurrency) {
        return Err(Error::Load(format!(
            "concurrency {} must be 1 to 256",
            options.concurrency
        )));
    }
    run(
        net,
        to,
        options.requests,
        options.limit,
        options.client,
        || {
            let tickets = AtomicUsize::new(0);
            let begin = Instant::now();
            let parts: Vec<HttpResult> = std::thread::scope(|scope| {
                let tickets = &tickets;
                let workers: Vec<_> = (0..options.concurrency)
                    .map(|number| scope.spawn(move || worker(to, options, tickets, number, begin)))
                    .collect();
                workers
                    .into_iter()
                    .filter_map(|worker| worker.join().ok())
                    .collect()
            });
            let mut all = HttpResult::default();
            for part in parts {
                all.times.us.extend(part.times.us);
                all.times.sent += part.times.sent;
                all.connect_us.extend(part.connect_us);
                all.first_failure = all.first_failure.or(part.first_failure);
            }
            all.times.lost = all.times.sent - all.times.us.len();
            all.times.seconds = begin.elapsed().as_secs_f64();
            Ok(all)
        },
    )
}

fn worker(
    to: Ipv4Addr,
    options: &Http,
    tickets: &AtomicUsize,
    number: usize,
    begin: Instant,
) -> HttpResult {
    let mut result = HttpResult::default();
    let mut intervals = Intervals::new(options.client.seed + number as u64, options.pause);
    while begin.elapsed() < options.limit {
        let ticket = tickets.fetch_add(1, Ordering::Relaxed);
        if ticket >= options.requests {
            break;
        }
        let mut due = None;
        if let Some(rate) = options.rate {
            let at = Duration::from_secs_f64(ticket as f64 / rate.max(1e-3));
            if at >= options.limit {
                break;
            }
            sleep_until(begin + at);
            due = Some(begin + at);
        } else if !options.pause.1.is_zero() {
            sleep_until(Instant::now() + intervals.next());
        }
        result.times.sent += 1;
        match get(to, options, due.unwrap_or_else(Instant::now)) {
            Ok((connected, done)) => {
                result.connect_us.push(connected.as_secs_f64() * 1e6);
                result.times.us.push(done.as_secs_f64() * 1e6);
            }
            Err(why) => result.first_failure = result.first_failure.or(Some(why)),
        }
    }
    result
}

/// Makes one request. Returns the times from `start` to the connection and to the end of the
/// answer.
fn get(
    to: Ipv4Addr,
    options: &Http,
    start: Instant,
) -> std::result::Result<(Duration, Duration), String> {
    let text = |e: std::io::Error| e.to_string();
    let mut stream =
        TcpStream::connect_timeout(&SocketAddr::from((to, options.port)), REPLY_TIMEOUT)
            .map_err(text)?;
    let connected = start.elapsed();
    stream.set_read_timeout(Some(REPLY_TIMEOUT)).map_err(text)?;
    stream
        .write_all(format!("GET {} HTTP/1.0\r\nHost: lab\r\n\r\n", options.path).as_bytes())
        .map_err(text)?;
    let mut answer = Vec::with_capacity(options.bytes + 1024);
    // more than any good answer, so that an endless one ends
    let most = options.bytes as u64 + 16 * 1024;
    Read::take(&mut stream, most)
        .read_to_end(&mut answer)
        .map_err(text)?;
    let done = start.elapsed();
    check(&answer, options.bytes).map(|()| (connected, done))
}

/// Checks status and length of an answer.
fn check(answer: &[u8], bytes: usize) -> std::result::Result<(), String> {
    let end = answer
        .windows(4)
        .position(|w| w == b"\r\n\r\n")
        .ok_or("an answer without a header's end")?;
    let header = String::from_utf8_lossy(&answer[..end]);
    let status = header.split(' ').nth(1).unwrap_or_default();
    if status != "200" {
        return Err(format!("status {status}"));
    }
    let body = answer.len() - end - 4;
    if body != bytes {
        return Err(format!(
            "a body of {body} bytes where {bytes} were expected"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn an_answer_needs_status_200_and_the_right_length() {
        assert_eq!(check(b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n12345", 5), Ok(()));
        assert!(
            check(b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n1234", 5)
                .unwrap_err()
                .contains("4 bytes")
        );
        assert!(
            check(b"HTTP/1.1 404 Not Found\r\n\r\n12345", 5)
                .unwrap_err()
                .contains("404")
        );
        assert!(check(b"", 0).is_err());
    }
}
