// SPDX-License-Identifier: Apache-2.0
//! Traffic of guests that are network namespaces, to a server in another namespace. The test bed and the benchmark of
//! lanes run it in a guest with an SR-IOV NIC as `viola-lab internal traffic JSON` (see [`Spec`]); it prints a
//! [`TrafficReport`] per guest. `viola-lab internal traffic serve` runs the server until it is killed.
//!
//! Each guest sends a TCP stream whose bytes follow from its number; the server checks every byte. It also sends
//! numbered UDP packets, which the server returns.

use std::error::Error;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use viola_report::stats::Sorted;

type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

const TCP: u16 = 7000;
const UDP: u16 = 7001;
/// Bytes that are checked at a time; every write is a multiple of it.
const CHUNK_BYTES: usize = 1024;
/// Minimum length of a gap in the report, ms.
const LONG_GAP: f64 = 50.0;
/// Maximum interval between two checks for a new phase.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Time to wait for replies at the end.
const FINAL_REPLY_TIMEOUT: Duration = Duration::from_secs(3);

/// Specification of the traffic.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Spec {
    /// Namespace of the server, under /run/netns. Without it the server runs elsewhere: `viola-lab internal traffic
    /// serve`.
    #[serde(default)]
    server: Option<String>,
    /// Address of the server.
    address: Ipv4Addr,
    /// Length of a phase.
    phase_ms: u64,
    /// The traffic ends early when this file exists.
    #[serde(default)]
    until: Option<PathBuf>,
    guests: Vec<GuestSpec>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct GuestSpec {
    /// Namespace of the guest.
    netns: String,
    /// UDP packets per second in each phase; the stream sends half as many pieces per second.
    rates: Vec<u32>,
    /// KiB per piece.
    #[serde(default = "one_kib")]
    kib: u32,
    /// Pieces per second in all phases; overrides the rate derived from `rates`.
    #[serde(default)]
    pieces: Option<u32>,
}

fn one_kib() -> u32 {
    1
}

/// Report of a guest.
#[derive(Debug, Default, Serialize)]
struct TrafficReport {
    netns: String,
    /// Bytes of its stream that the server received, all correct.
    stream_bytes: u64,
    /// Whether the server received all bytes and no others.
    stream_whole: bool,
    /// Longest time that the socket took to accept one piece.
    worst_stall_ms: f64,
    /// UDP packets sent and lost.
    sent: u64,
    lost: u64,
    /// Consecutive lost packets: time (ms after the start) and number.
    holes: Vec<(u64, u64)>,
    /// Longest time between two replies beyond the time between their packets.
    longest_gap_ms: f64,
    /// All such times over 50 ms: time (ms after the start) and length.
    gaps: Vec<(u64, f64)>,
    /// Round trip, median and 99th percentile.
    p50_ms: Option<f64>,
    p99_ms: Option<f64>,
}

/// Runs the traffic, or the server.
pub fn traffic(json: &str) -> viola_cli::error::Outcome {
    run(json).map_err(|e| viola_cli::error::Failure::run(e.to_string()))
}

fn run(json: &str) -> Outcome {
    let here = || -> Outcome<_> {
        let any = Ipv4Addr::UNSPECIFIED;
        Ok((TcpListener::bind((any, TCP))?, UdpSocket::bind((any, UDP))?))
    };
    let over = AtomicBool::new(false);
    if json == "serve" {
        let (tcp, udp) = here()?;
        return std::thread::scope(|scope| {
            scope.spawn(|| echo(&udp, &over));
            serve(&tcp, usize::MAX)
        });
    }
    let spec: Spec = serde_json::from_str(json)?;
    let server = spec.server.as_ref().map(|name| in_netns(name, here));
    let server = server.transpose()?;
    let (count, over, spec) = (spec.guests.len(), &over, &spec);
    let enough = &AtomicBool::new(false);
    let report: Outcome<Vec<TrafficReport>> = std::thread::scope(|scope| {
        if let Some((tcp, udp)) = &server {
            scope.spawn(move || echo(udp, over));
            scope.spawn(move || serve(tcp, count));
        }
        let guests: Vec<std::thread::ScopedJoinHandle<'_, _>> = (0..)
            .zip(&spec.guests)
            .map(|(number, guest)| scope.spawn(move || one(spec, guest, number, enough)))
            .collect();
        if let Some(file) = &spec.until {
            while !file.exists() && !guests.iter().all(|g| g.is_finished()) {
                std::thread::sleep(POLL_INTERVAL);
            }
            enough.store(true, Ordering::Relaxed);
        }
        let joined = guests
            .into_iter()
            .map(|g| g.join().map_err(|_| "a guest's thread failed")?);
        let report = joined.collect();
        over.store(true, Ordering::Relaxed);
        report
    });
    println!("{}", serde_json::to_string(&report?)?);
    Ok(())
}

/// Checks this many streams.
fn serve(listener: &TcpListener, count: usize) -> Outcome {
    let mut checks = Vec::new();
    for _ in 0..count {
        let (stream, _) = listener.accept()?;
        checks.push(std::thread::spawn(move || check(stream)));
    }
    for check in checks {
        // The sending end reports the error.
        let _ = check.join();
    }
    Ok(())
}

fn in_netns<T: Send>(name: &str, work: impl FnOnce() -> Outcome<T> + Send) -> Outcome<T> {
    let path = Path::new("/run/netns").join(name);
    let netns = File::open(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    viola_netdev::in_netns(netns.as_fd(), work)?
}

/// Returns each packet to its sender.
fn echo(socket: &UdpSocket, over: &AtomicBool) {
    let _ = socket.set_read_timeout(Some(Duration::from_millis(200)));
    let mut packet = [0; 64];
    while !over.load(Ordering::Relaxed) {
        if let Ok((n, from)) = socket.recv_from(&mut packet) {
            let _ = socket.send_to(&packet[..n], from);
        }
    }
}

/// Bytes of a guest's stream.
struct Bytes(u64);

impl Bytes {
    fn of(guest: u32) -> Self {
        Self(0x9e37_79b9_7f4a_7c15 ^ (u64::from(guest) + 1))
    }

    fn fill(&mut self, piece: &mut [u8]) {
        for word in piece.chunks_mut(8) {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            let bytes = self.0.to_le_bytes();
            word.copy_from_slice(&bytes[..word.len()]);
        }
    }
}

/// Reads a stream to its end and replies with the number of correct bytes. The first wrong byte ends it.
fn check(mut stream: TcpStream) -> Outcome {
    let mut guest = [0; 4];
    stream.read_exact(&mut guest)?;
    let mut bytes = Bytes::of(u32::from_le_bytes(guest));
    let (mut right, mut expected, mut received) = (0_u64, [0; CHUNK_BYTES], [0; CHUNK_BYTES]);
    let mut filled = 0;
    loop {
        let n = stream.read(&mut received[filled..])?;
        filled += n;
        if n == 0 || filled == CHUNK_BYTES {
            bytes.fill(&mut expected[..]);
            if received[..filled] != expected[..filled] {
                break;
            }
            right += filled as u64;
            filled = 0;
        }
        if n == 0 {
            break;
        }
    }
    stream.write_all(&right.to_le_bytes())?;
    Ok(())
}

fn one(spec: &Spec, guest: &GuestSpec, number: u32, enough: &AtomicBool) -> Outcome<TrafficReport> {
    let (stream, socket) = in_netns(&guest.netns, || {
        let stream = TcpStream::connect((spec.address, TCP))?;
        stream.set_nodelay(true)?;
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.connect((spec.address, UDP))?;
        Ok((stream, socket))
    })?;
    let begin = Instant::now();
    let phase = Duration::from_millis(spec.phase_ms);
    let rate = |now: Instant| {
        if enough.load(Ordering::Relaxed) {
            return None;
        }
        let at = now.duration_since(begin).as_millis() / phase.as_millis().max(1);
        guest
            .rates
            .get(usize::try_from(at).unwrap_or(usize::MAX))
            .copied()
    };
    let (stream, rate) = (&stream, &rate);
    std::thread::scope(|scope| {
        let piece = guest.kib.max(1) as usize * CHUNK_BYTES;
        let pieces = guest.pieces;
        let pieces = move |now| rate(now).map(|rate| pieces.map_or(rate, |n| 2 * n));
        let sender = scope.spawn(move || send(stream, (number, piece), begin, &pieces));
        let mut report = probe(&socket, begin, rate)?;
        let (bytes, stall) = sender.join().map_err(|_| "a stream's thread failed")??;
        let mut answer = [0; 8];
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        stream.shutdown(std::net::Shutdown::Write)?;
        (&*stream).read_exact(&mut answer)?;
        report.netns.clone_from(&guest.netns);
        report.stream_bytes = u64::from_le_bytes(answer);
        report.stream_whole = report.stream_bytes == bytes;
        report.worst_stall_ms = stall.as_secs_f64() * 1000.0;
        Ok(report)
    })
}

/// Sends a stream. Returns its length and the longest time for one piece.
fn send(
    mut stream: &TcpStream,
    (number, piece): (u32, usize),
    begin: Instant,
    rate: &(dyn Fn(Instant) -> Option<u32> + Sync),
) -> Outcome<(u64, Duration)> {
    stream.write_all(&number.to_le_bytes())?;
    let (mut bytes, mut piece) = (Bytes::of(number), vec![0; piece]);
    let (mut sent, mut worst, mut pace) = (0, Duration::ZERO, Schedule(begin));
    loop {
        let now = Instant::now();
        let Some(rate) = rate(now) else {
            return Ok((sent, worst));
        };
        let remaining = pace.time_until_due(now, Duration::from_secs(2) / rate.max(1));
        if !remaining.is_zero() {
            std::thread::sleep(remaining.min(POLL_INTERVAL));
            continue;
        }
        bytes.fill(&mut piece);
        let before = Instant::now();
        stream.write_all(&piece)?;
        worst = worst.max(before.elapsed());
        sent += piece.len() as u64;
    }
}

/// Due time of the next piece.
struct Schedule(Instant);

impl Schedule {
    /// Time until the next piece is due, with one piece per interval; zero if it is due now, which counts as sent.
    /// Missed pieces are not made up for, and a faster phase takes effect at once.
    fn time_until_due(&mut self, now: Instant, interval: Duration) -> Duration {
        self.0 = self.0.min(now + interval);
        let remaining = self.0.saturating_duration_since(now);
        if remaining.is_zero() {
            let missed = now.duration_since(self.0) > interval;
            self.0 = if missed { now } else { self.0 } + interval;
        }
        remaining
    }
}

/// Sends numbered packets and counts the replies.
fn probe(
    socket: &UdpSocket,
    begin: Instant,
    rate: &(dyn Fn(Instant) -> Option<u32> + Sync),
) -> Outcome<TrafficReport> {
    socket.set_nonblocking(true)?;
    let mut report = TrafficReport::default();
    let mut sent_at: Vec<Duration> = Vec::new();
    let mut back_at: Vec<Option<Duration>> = Vec::new();
    let mut next = begin;
    let mut end = None;
    loop {
        let now = Instant::now();
        if end.is_some_and(|end| now >= end) {
            break;
        }
        if now >= next && end.is_none() {
            match rate(now) {
                None => end = Some(now + FINAL_REPLY_TIMEOUT),
                Some(rate) => {
                    let number = sent_at.len() as u64;
                    sent_at.push(begin.elapsed());
                    back_at.push(None);
                    // A packet that cannot be sent counts as lost.
                    let _ = socket.send(&number.to_le_bytes());
                    next = (next + Duration::from_secs(1) / rate.max(1)).max(now);
                }
            }
        }
        let until = end.unwrap_or(next);
        let left = until.saturating_duration_since(Instant::now());
        wait(socket, left.min(Duration::from_secs(1)))?;
        let mut packet = [0; 64];
        if let Ok(8) = socket.recv(&mut packet) {
            let mut number = [0; 8];
            number.copy_from_slice(&packet[..8]);
            if let Some(back) = back_at.get_mut(u64::from_le_bytes(number) as usize) {
                *back = Some(begin.elapsed());
            }
        }
    }
    evaluate_replies(&mut report, &sent_at, &back_at);
    Ok(report)
}

/// Waits until there is something to receive, at most this long. A socket's own timeout has the resolution of a clock
/// tick, too coarse for a packet every millisecond.
fn wait(socket: &UdpSocket, longest: Duration) -> Outcome {
    let longest = Timespec::try_from(longest)?;
    match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&longest)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn evaluate_replies(
    report: &mut TrafficReport,
    sent_at: &[Duration],
    back_at: &[Option<Duration>],
) {
    let ms = |d: Duration| d.as_secs_f64() * 1000.0;
    report.sent = sent_at.len() as u64;
    let mut last: Option<(Duration, Duration)> = None;
    let mut hole = None;
    let trip = |(sent, back): (&Duration, &Option<Duration>)| Some(ms((*back)? - *sent));
    let trips = Sorted::new(sent_at.iter().zip(back_at).filter_map(trip).collect());
    (report.p50_ms, report.p99_ms) = (trips.quantile(0.5), trips.quantile(0.99));
    for (sent, back) in sent_at.iter().zip(back_at) {
        match back {
            None => {
                report.lost += 1;
                let (_, n) = hole.get_or_insert((sent.as_millis() as u64, 0_u64));
                *n += 1;
            }
            Some(back) => {
                if let Some((sent_before, back_before)) = last {
                    let beyond = ms(back.saturating_sub(back_before)) - ms(*sent - sent_before);
                    // A reordered packet, and the lost packets before it.
                    let gap = match hole {
                        Some(_) => ms(back.saturating_sub(back_before)),
                        None => beyond,
                    };
                    report.longest_gap_ms = report.longest_gap_ms.max(gap);
                    if gap >= LONG_GAP {
                        report.gaps.push((sent.as_millis() as u64, gap));
                    }
                }
                report.holes.extend(hole.take());
                last = Some((*sent, *back));
            }
        }
    }
    report.holes.extend(hole);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_lost_packets_form_a_hole_and_a_gap() {
        let ms = Duration::from_millis;
        let sent: Vec<Duration> = (0..6).map(|i| ms(i * 10)).collect();
        let back = [Some(ms(1)), None, None, Some(ms(31)), Some(ms(41)), None];
        let mut report = TrafficReport::default();
        evaluate_replies(&mut report, &sent, &back);
        assert_eq!((report.sent, report.lost), (6, 3));
        assert_eq!(report.holes, [(10, 2), (50, 1)]);
        assert!((report.longest_gap_ms - 30.0).abs() < 1e-9);
    }

    #[test]
    fn a_faster_phase_takes_effect_at_once() {
        let (begin, ms) = (Instant::now(), Duration::from_millis);
        let (slow, fast) = (ms(2000), ms(100));
        let mut pace = Schedule(begin);
        let mut sent_between = |from: u64, to: u64, interval| {
            let times = (from..to).map(|at| begin + ms(at));
            times
                .filter(|now| pace.time_until_due(*now, interval).is_zero())
                .count()
        };
        assert_eq!(sent_between(0, 4000, slow), 2);
        assert_eq!(sent_between(4000, 8000, fast), 40);
        assert_eq!(sent_between(8000, 12_000, slow), 2);
        // The sender was delayed for a while.
        assert_eq!(sent_between(20_000, 21_000, fast), 10);
    }

    #[test]
    fn a_guests_stream_does_not_depend_on_the_piece_size() {
        let (mut a, mut b, mut c) = (Bytes::of(1), Bytes::of(1), Bytes::of(2));
        let (mut whole, mut parts, mut other) = ([0; 64], [0; 64], [0; 64]);
        a.fill(&mut whole);
        parts.chunks_mut(16).for_each(|part| b.fill(part));
        c.fill(&mut other);
        assert_eq!(whole, parts);
        assert_ne!(whole, other);
    }
}
