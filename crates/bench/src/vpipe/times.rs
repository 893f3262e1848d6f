// SPDX-License-Identifier: Apache-2.0
//! Times of a hand-over: until the host sends, and until the program has its connection back.
//!
//! A program in the guest (`lab/vpipe-times.c`) sends files by `vpipe_file(3)` and reports, by its own clock, the times
//! of the call and of the return. The client reports, by the host's clock, the times of the first and the last byte. So
//!
//! - *call to first byte* lasts from the library's call until the client gets the first byte that the host sends, and
//! - *last byte to return* lasts from the last byte, which the client's kernel acknowledges at once, until the program
//!   has the count and may write to the connection again.
//!
//! Both are end to end: they include waits for the guest's core and the client's own wake-up. (Agent and worker could
//! each time their phases by one clock, but this would miss the ways between them, the larger part. The difference to a
//! reply without the library needs no second clock, but gives only medians and nothing about the return.)
//!
//! The two clocks are compared by cause and effect: the guest reads its time after the client's request and before the
//! client has the reply. Each such pair bounds the difference of the clocks. Hundreds of pairs, some of them quick,
//! leave a few tens of microseconds. Both clocks have the same rate: a UML guest's clock is the host's CLOCK_MONOTONIC
//! since its boot. If a clock were faster, no difference would fit all pairs, and the measurement fails.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::client::{READ_BYTES, REPLY_TIMEOUT, Response};
use viola_cli::error::{Failure, Outcome};

/// Number of requests for the guest's time, before the files and after them.
const PAIRS: usize = 100;
/// Maximum error of the clock difference, ns: one fifth of the smallest goal.
const MAX_CLOCK_ERROR: i64 = 100_000;

/// Times of the hand-overs of some files.
#[derive(Debug, Clone, Default)]
pub struct Handovers {
    /// From the call to the first byte, milliseconds.
    pub first_ms: Vec<f64>,
    /// From the last byte to the return, milliseconds.
    pub return_ms: Vec<f64>,
    /// Maximum error of the clock difference, milliseconds.
    pub clock_error_ms: f64,
}

/// Bounds of the difference between the guest's clock and the host's, ns.
#[derive(Debug, Clone, Copy)]
struct ClockOffset {
    lower: i64,
    upper: i64,
}

impl ClockOffset {
    fn unknown() -> Self {
        Self {
            lower: i64::MIN,
            upper: i64::MAX,
        }
    }

    /// Adds a pair: the guest read `guest` after the host time `after` and before the host time `before`.
    fn add_pair(&mut self, after: i64, guest: i64, before: i64) {
        self.lower = self.lower.max(guest.saturating_sub(before));
        self.upper = self.upper.min(guest.saturating_sub(after));
    }

    /// The middle of the bounds, and its maximum error.
    fn middle(&self) -> Result<(i64, i64), String> {
        let width = self.upper.saturating_sub(self.lower);
        match width {
            // The clocks are read in steps of 256 ns.
            -1000..0 => Ok((self.lower, -width)),
            0.. if width / 2 <= MAX_CLOCK_ERROR => Ok((self.lower + width / 2, width / 2)),
            ..0 => Err(format!(
                "the clocks of guest and host drift: the bounds of their difference contradict by {} ns",
                -width
            )),
            _ => Err(format!(
                "the difference of the guest's and the host's clock is known only to {} ns",
                width / 2
            )),
        }
    }
}

/// Times of one file, ns: call and return by the guest's clock, the others by the host's.
#[derive(Debug, Clone, Copy)]
struct Turn {
    call: i64,
    first: i64,
    last: i64,
    back: i64,
}

fn turns(all: &[Turn], difference: ClockOffset) -> Outcome<Handovers> {
    let (difference, unsure) = difference.middle().map_err(Failure::run)?;
    let ms = |from: i64, to: i64| (to - from) as f64 / 1e6;
    Ok(Handovers {
        first_ms: all
            .iter()
            .map(|turn| ms(turn.call - difference, turn.first))
            .collect(),
        return_ms: all
            .iter()
            .map(|turn| ms(turn.last, turn.back - difference))
            .collect(),
        clock_error_ms: unsure as f64 / 1e6,
    })
}

struct Client {
    stream: TcpStream,
    started: Instant,
    difference: ClockOffset,
}

impl Client {
    /// The host's clock, ns.
    fn now(&self) -> i64 {
        i64::try_from(self.started.elapsed().as_nanos()).unwrap_or(i64::MAX)
    }

    fn time(&mut self) -> std::io::Result<i64> {
        let mut number = [0; 8];
        self.stream.read_exact(&mut number)?;
        Ok(i64::from_be_bytes(number))
    }

    /// Compares the clocks.
    fn compare(&mut self) -> std::io::Result<()> {
        for _ in 0..PAIRS {
            let after = self.now();
            self.stream.write_all(&0_u64.to_be_bytes())?;
            let guest = self.time()?;
            let before = self.now();
            self.difference.add_pair(after, guest, before);
        }
        Ok(())
    }

    /// Gets a file.
    fn get(&mut self, file: &[u8], piece: &mut [u8]) -> std::io::Result<Turn> {
        let request_sent = self.now();
        self.stream.write_all(&(file.len() as u64).to_be_bytes())?;
        let (mut first, mut last, mut at) = (None, 0, 0);
        while at < file.len() {
            let expected = piece.len().min(file.len() - at);
            let n = self.stream.read(&mut piece[..expected])?;
            last = self.now();
            first = first.or(Some(last));
            // Otherwise the last acknowledgement may wait for another byte.
            let _ = rustix::net::sockopt::set_tcp_quickack(&self.stream, true);
            if n == 0 || piece[..n] != file[at..at + n] {
                let why = match n {
                    0 => format!("the reply ends after {at} bytes"),
                    _ => format!("the reply differs from the file at byte {at}"),
                };
                return Err(std::io::Error::other(why));
            }
            at += n;
        }
        let first = first.unwrap_or(last);
        let (call, back) = (self.time()?, self.time()?);
        let reply_received = self.now();
        self.difference.add_pair(request_sent, call, first);
        self.difference.add_pair(request_sent, back, reply_received);
        Ok(Turn {
            call,
            first,
            last,
            back,
        })
    }
}

/// Gets files one after the other for this long, but at least `least` of them, from the calling thread's network
/// namespace. The first file is extra and does not count.
///
/// # Errors
/// The first failure, in particular bytes that differ from the file or clocks that cannot be compared.
pub fn load(
    to: SocketAddr,
    file: &[u8],
    length: Duration,
    least: usize,
) -> Outcome<(Response, Handovers)> {
    let failed = |e: std::io::Error| Failure::run(format!("{} bytes of {to}: {e}", file.len()));
    let stream = TcpStream::connect_timeout(&to, REPLY_TIMEOUT).map_err(failed)?;
    stream
        .set_read_timeout(Some(REPLY_TIMEOUT))
        .map_err(failed)?;
    stream.set_nodelay(true).map_err(failed)?;
    let mut client = Client {
        stream,
        started: Instant::now(),
        difference: ClockOffset::unknown(),
    };
    let mut piece = vec![0; READ_BYTES];
    client.compare().map_err(failed)?;
    let _ = client.get(file, &mut piece).map_err(failed)?;
    let started = Instant::now();
    let mut all = Vec::new();
    while started.elapsed() < length || all.len() < least {
        all.push(client.get(file, &mut piece).map_err(failed)?);
    }
    let received = Response {
        bytes: (all.len() * file.len()) as u64,
        seconds: started.elapsed().as_secs_f64(),
        times_ms: Vec::new(),
    };
    client.compare().map_err(failed)?;
    Ok((received, turns(&all, client.difference)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_narrow_the_clock_difference() {
        let mut found = ClockOffset::unknown();
        // the guest's clock is 1000 us behind
        found.add_pair(5_000_000, 4_100_000, 5_400_000);
        assert_eq!((found.lower, found.upper), (-1_300_000, -900_000));
        assert!(found.middle().is_err(), "200 us are too much");
        found.add_pair(6_000_000, 5_020_000, 6_060_000);
        found.add_pair(7_000_000, 6_030_000, 7_500_000);
        assert_eq!((found.lower, found.upper), (-1_040_000, -980_000));
        assert_eq!(found.middle().unwrap(), (-1_010_000, 30_000));
    }

    #[test]
    fn clocks_of_different_rates_are_an_error() {
        let mut found = ClockOffset::unknown();
        found.add_pair(0, 100, 200);
        found.add_pair(1_000_000_000, 1_000_100_100, 1_000_000_200);
        let why = found.middle().unwrap_err();
        assert!(why.contains("drift"), "{why}");
    }

    #[test]
    fn times_use_the_hosts_clock() {
        let mut difference = ClockOffset::unknown();
        difference.add_pair(0, 1_000_000_000, 0);
        let turn = Turn {
            call: 1_002_000_000,
            first: 2_500_000,
            last: 9_000_000,
            back: 1_010_000_000,
        };
        let found = turns(&[turn], difference).unwrap();
        assert_eq!((found.first_ms, found.return_ms), (vec![0.5], vec![1.0]));
        assert_eq!(found.clock_error_ms, 0.0);
    }
}
