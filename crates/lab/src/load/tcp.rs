// SPDX-License-Identifier: Apache-2.0
//! Request and response over one TCP connection, and a bulk stream.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::socket::{now_us, receive, set_pace, stamp_arrivals, wait_readable, waits};
use super::{Client, ClientNetwork, Intervals, Times, failed, run, sleep_until};
use crate::error::Result;

/// Longest wait for a connection and for an answer.
const ANSWER: Duration = Duration::from_secs(10);

/// One byte to and fro on a persistent connection, as netperf's TCP_RR.
#[derive(Debug, Clone)]
pub struct TcpRr {
    /// Port of the guest's `echo`.
    pub port: u16,
    /// Requests to send.
    pub count: usize,
    /// Shortest and longest time from one request to the next, uniform in between; zeros for back to
    /// back. A request that falls due before the last one was answered is sent right after that
    /// answer, and its time counts from when it was due: clients do not hold back because the
    /// server is slow, and a run of quick answers between two long waits shall not hide the waits.
    pub interval: (Duration, Duration),
    /// The run ends after this time even when requests are left.
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

/// Measures round trips to a guest's `echo`. A request without an answer in ten seconds is lost and
/// ends the run, for on one connection no other could follow.
pub fn tcp_rr(net: &impl ClientNetwork, to: Ipv4Addr, options: &TcpRr) -> Result<Times> {
    run(
        net,
        to,
        options.count,
        options.limit,
        options.client,
        || {
            let stream = TcpStream::connect_timeout(&SocketAddr::from((to, options.port)), ANSWER)
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
                if !wait_readable(&stream, ANSWER).map_err(failed("waiting"))? {
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
    /// How long it sends, 60 s at most.
    pub time: Duration,
    /// Most bytes a second, as a link of that speed lets through; none for as fast as it goes. The kernel spaces the packets.
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

/// What a bulk stream sent, and what it waited for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TcpStreamResult {
    /// Bytes that the host's kernel took; the guest's `sink` counts those that arrived.
    pub bytes: u64,
    /// Time of the run in seconds.
    pub seconds: f64,
    /// Part of the time with data to send in which the receiver's window was full, 0..=1 (`tcpi_rwnd_limited` of
    /// `tcpi_busy_time`); else the sender's own window bounds.
    pub window_full: f64,
    /// Packets that were sent again.
    pub retransmits: u32,
}

/// Sends to a guest's `sink` as fast as it takes.
///
/// # Errors
/// No connection, or one that breaks; an address that is not of this lab; a time that is too long.
pub fn tcp_stream(
    net: &impl ClientNetwork,
    to: Ipv4Addr,
    options: &TcpBulk,
) -> Result<TcpStreamResult> {
    run(net, to, 1, options.time, options.client, || {
        let mut stream = TcpStream::connect_timeout(&SocketAddr::from((to, options.port)), ANSWER)
            .map_err(failed("connecting to its sink"))?;
        stream
            .set_write_timeout(Some(ANSWER))
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
        let (window_full, retransmits) = waits(&stream).map_err(failed("TCP_INFO"))?;
        Ok(TcpStreamResult {
            bytes,
            seconds,
            window_full,
            retransmits,
        })
    })
}
