// SPDX-License-Identifier: Apache-2.0
//! Requests and responses over one TCP connection, and a bulk stream.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::socket::{
    now_us, receive, set_pace, stamp_arrivals, wait_readable, window_share_and_retransmits,
};
use super::{Client, ClientNetwork, Intervals, Times, failed, run, sleep_until};
use crate::error::Result;

/// Time limit for a connection and for an answer.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// Round trips of one byte on a persistent connection, as netperf's TCP_RR.
#[derive(Debug, Clone)]
pub struct TcpRr {
    /// Port of the guest's `echo`.
    pub port: u16,
    /// Number of requests.
    pub count: usize,
    /// Shortest and longest time from one request to the next, uniform in between; zeros for back
    /// to back. A request that is due before the last answer is sent right after that answer, and
    /// its time counts from when it was due (no coordinated omission): clients do not wait for a
    /// slow server.
    pub interval: (Duration, Duration),
    /// The run ends after this time even if requests remain.
    pub limit: Duration,
    /// How the client runs.
    pub client: Client,
}

impl Default for TcpRr {
    /// 1000 requests back to back on port 7 in at most 60 s.
    fn default() -> Self {
        Self {
            port: 7,
            count: 1000,
            interval: (Duration::ZERO, Duration::ZERO),
            limit: Duration::from_secs(60),
            client: Client::default(),
        }
    }
}

/// Measures round trips to a guest's `echo`. A request without an answer within ten seconds is lost
/// and ends the run, because no other request could follow on its connection.
///
/// # Errors
/// [`crate::Error::Load`], [`crate::Error::OutsideLab`].
pub fn tcp_rr(net: &impl ClientNetwork, to: Ipv4Addr, options: &TcpRr) -> Result<Times> {
    run(
        net,
        to,
        options.count,
        options.limit,
        options.client,
        || {
            let stream =
                TcpStream::connect_timeout(&SocketAddr::from((to, options.port)), REPLY_TIMEOUT)
                    .map_err(failed("connecting to its echo"))?;
            stream.set_nodelay(true).map_err(failed("TCP_NODELAY"))?;
            stamp_arrivals(&stream).map_err(failed("time stamps"))?;
            let mut intervals = Intervals::new(options.client.seed, options.interval);
            let mut times = Times::default();
            let mut byte = [0_u8];
            let begin = Instant::now();
            let mut due = begin;
            while times.sent < options.count && begin.elapsed() < options.limit {
                let mut late = Duration::ZERO;
                if !options.interval.1.is_zero() {
                    due += intervals.next();
                    late = Instant::now().saturating_duration_since(due);
                    sleep_until(due);
                }
                let sent = now_us() - late.as_secs_f64() * 1e6;
                (&stream)
                    .write_all(&[times.sent as u8])
                    .map_err(failed("sending"))?;
                times.sent += 1;
                if !wait_readable(&stream, REPLY_TIMEOUT).map_err(failed("waiting"))? {
                    break;
                }
                match receive(&stream, &mut byte).map_err(failed("receiving"))? {
                    (0, _) => break,
                    (_, arrived) => times.us.push(arrived - sent),
                }
            }
            times.seconds = begin.elapsed().as_secs_f64();
            times.lost = times.sent - times.us.len();
            Ok(times)
        },
    )
}

/// A bulk stream, as iperf's.
#[derive(Debug, Clone)]
pub struct TcpBulk {
    /// Port of the guest's `sink`.
    pub port: u16,
    /// Length of the run, at most ten minutes.
    pub time: Duration,
    /// Rate limit in bytes per second; `None`: as fast as possible. The kernel spaces the packets.
    pub pace: Option<u32>,
    /// How the client runs.
    pub client: Client,
}

impl Default for TcpBulk {
    /// A second to port 9, unpaced.
    fn default() -> Self {
        Self {
            port: 9,
            time: Duration::from_secs(1),
            pace: None,
            client: Client::default(),
        }
    }
}

/// Result of a bulk stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TcpStreamResult {
    /// Bytes that the host's kernel accepted; the guest's `sink` counts those that arrived.
    pub bytes: u64,
    /// Time of the run in seconds.
    pub seconds: f64,
    /// Share of the time with data to send in which the receiver's window was full, 0 to 1
    /// (`tcpi_rwnd_limited` of `tcpi_busy_time`); otherwise the sender's own window limits.
    pub window_full: f64,
    /// Retransmitted packets.
    pub retransmits: u32,
}

/// Sends a bulk stream to a guest's `sink`.
///
/// # Errors
/// [`crate::Error::Load`] without a connection, or if it breaks or the time is too long;
/// [`crate::Error::OutsideLab`].
pub fn tcp_stream(
    net: &impl ClientNetwork,
    to: Ipv4Addr,
    options: &TcpBulk,
) -> Result<TcpStreamResult> {
    run(net, to, 1, options.time, options.client, || {
        let mut stream =
            TcpStream::connect_timeout(&SocketAddr::from((to, options.port)), REPLY_TIMEOUT)
                .map_err(failed("connecting to its sink"))?;
        stream
            .set_write_timeout(Some(REPLY_TIMEOUT))
            .map_err(failed("time limit"))?;
        if let Some(pace) = options.pace {
            set_pace(&stream, pace).map_err(failed("SO_MAX_PACING_RATE"))?;
        }
        let data = vec![0x5a_u8; 64 << 10];
        let (begin, mut bytes) = (Instant::now(), 0);
        while begin.elapsed() < options.time {
            bytes += stream.write(&data).map_err(failed("sending"))? as u64;
        }
        let seconds = begin.elapsed().as_secs_f64();
        let (window_full, retransmits) =
            window_share_and_retransmits(&stream).map_err(failed("TCP_INFO"))?;
        Ok(TcpStreamResult {
            bytes,
            seconds,
            window_full,
            retransmits,
        })
    })
}
