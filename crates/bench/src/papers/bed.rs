// SPDX-License-Identifier: Apache-2.0
//! Test bed: guests on one core, a client on their network and a client behind a long line.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use viola_lab::load::{
    self, Arrivals, Call, Client, ClientNetwork, Http, Ping, Spacing, TcpBulk, VideoSession,
};
use viola_lab::media::{HEADER_BYTES, Quality, Stream};
use viola_lab::wire::{Pattern, Workload};
use viola_lab::{Delay, Guest, WanClient};

use super::mpi::Mpi;
use super::plan::{Experiment, LINES, RATE, Times};
use crate::harness::guests::{self, Guests, HOG};
use crate::harness::side::lab_failure;
use crate::harness::vmm::GuestKind;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;
use viola_report::stats::Sorted;

/// Time between two pings. It is random so that pings do not fall in step with the scheduler's period.
const PING_INTERVAL: (Duration, Duration) = (Duration::from_millis(3), Duration::from_millis(12));
/// Timeout for the last replies.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);
/// Delay of the long line in section 2.5.1, and below it in section 2.5.2; the paper uses netem.
const WAN: Duration = Duration::from_millis(30);
const REMOTE: Delay = Delay {
    low: Duration::from_millis(20),
    high: Duration::from_millis(40),
};
/// Playout buffer, milliseconds: a packet that is later than the fastest by more than this is discarded.
const PLAYOUT_BUFFER_MS: f64 = 100.0;
/// Checks for the rest of a stream, five per second.
const MAX_DRAIN_CHECKS: usize = 25;
/// Films of one packet, which measure start-up times.
const STARTUP_FILMS: usize = 8;
/// Clients that load Apache to its limit.
const CLIENTS: usize = 64;
/// Maximum number of requests in flight at a fixed rate.
const MAX_IN_FLIGHT: usize = 256;
/// Upper bound on requests; no cell has time for more.
const MAX_REQUESTS: usize = 1_000_000;
/// TCP receive buffer in the guest, bytes. With its default a User Mode Linux guest allows only some 50 KB in flight,
/// measured on an idle core at 10 and 30 ms; the scheduler would have no effect.
const TCP_WINDOW_BYTES: u32 = 8_000_000;
/// Memory of a guest, bytes.
const MEMORY_BYTES: u64 = 192 << 20;
/// Size of all STREAM arrays together, KiB: larger than the caches.
const ARRAYS_KIB: u32 = 48 << 10;
/// Name of the STREAM workload in a guest.
const STREAM: &str = "stream";
/// Time before a STREAM kernel is counted, in which it fills its arrays.
const ARRAY_FILL_TIME: Duration = Duration::from_millis(300);
/// Priority of the long line's processing, above its client programs.
const LINE_PRIORITY: u8 = 60;

/// Guests, and the long line to the remote client.
pub struct TestBed {
    far: WanClient,
    /// MPI, mounted on first use.
    mpi: Option<Mpi>,
    /// The guests.
    pub guests: Guests,
}

impl TestBed {
    /// Boots the guests and starts the servers of all experiments.
    ///
    /// # Errors
    /// A guest or server does not start, or the long line cannot be made.
    pub fn boot(vms: usize, core: usize, kind: GuestKind) -> Outcome<Self> {
        let mut spec = guests::spec("bench-papers", vms, &[core], kind)?;
        spec.guests
            .iter_mut()
            .for_each(|of| of.memory = of.memory.max(MEMORY_BYTES));
        let guests = guests::boot_spec(&spec, core)?;
        for (name, server) in [("apache", Workload::apache()), ("media", Workload::media())] {
            guests.web().start(name, server).map_err(lab_failure)?;
        }
        guests::shell(guests.web(), &wide())?;
        let client = Client {
            fifo: Some(LINE_PRIORITY),
            ..guests.client(1)
        };
        let far = WanClient::new(&guests.lab, client, REMOTE).map_err(lab_failure)?;
        Ok(Self {
            far,
            mpi: None,
            guests,
        })
    }

    /// Shuts the guests down.
    pub fn down(self) -> Outcome {
        drop(self.far);
        self.guests.down()
    }

    /// Runs an experiment. Returns its figures in the order of [`Experiment::figures`], `None` for
    /// a figure without data. `calls` is the number of repetitions of MPI calls.
    ///
    /// # Errors
    /// A guest, server or client fails, or the load generator was late itself.
    pub fn measure(
        &mut self,
        part: Experiment,
        ls: usize,
        duty: u32,
        times: &Times,
        calls: u32,
        seed: u64,
    ) -> Outcome<Vec<Option<f64>>> {
        interrupt::check()?;
        match part {
            // Waiting ranks poll for messages all the time, so they need no other load.
            Experiment::Mpi => {
                let others = self.guests.lab.guests().len().saturating_sub(ls);
                self.guests.keep_last_busy(false, others, duty)?;
            }
            _ => self.guests.keep_busy(part != Experiment::StreamLs, duty)?,
        }
        let client = self.guests.client(seed);
        std::thread::sleep(Duration::from_millis(200));
        let remote = |delay: Delay| {
            self.far.set_delay(delay);
            &self.far
        };
        match part {
            Experiment::Ping => self.ping(times.ping, client),
            Experiment::JitterSmall => self.jitter(256, times.jitter, client),
            Experiment::JitterLarge => self.jitter(1470, times.jitter, client),
            Experiment::TcpLan => self.tcp(&self.guests.lab, times.lan),
            Experiment::TcpWan => self.tcp(remote(Delay::constant(WAN)), times.wan),
            Experiment::Apache => {
                let http = Http {
                    arrivals: Arrivals::Open {
                        rate: RATE.into(),
                        spacing: Spacing::Even,
                    },
                    connections: MAX_IN_FLIGHT,
                    ..requests(times.apache, client)
                };
                self.apache(remote(REMOTE), &http)
            }
            Experiment::ApacheMost => {
                let http = Http {
                    connections: CLIENTS,
                    ..requests(times.apache, client)
                };
                let mut found = self.apache(remote(REMOTE), &http)?;
                found.truncate(1);
                Ok(found)
            }
            Experiment::Call => self.call(remote(REMOTE), 1, times.call, client),
            Experiment::Lines => self.call(remote(REMOTE), LINES, times.call, client),
            Experiment::Film => self.video(remote(REMOTE), times.film, client),
            Experiment::Mpi => {
                let ranks = &self.guests.lab.guests()[..ls];
                let mpi = match self.mpi.take() {
                    Some(mounted) => mounted,
                    None => Mpi::mount(ranks, &wide())?,
                };
                self.mpi.insert(mpi).measure(&self.guests.lab, ranks, calls)
            }
            Experiment::StreamBatch => {
                let guest = &self.guests.lab.guests()[ls];
                guest.stop(HOG).map_err(lab_failure)?;
                let found = stream(guest, times.stream);
                let again = Workload::hog_duty(duty, guests::PERIOD);
                guest.start(HOG, again).map_err(lab_failure)?;
                found
            }
            Experiment::StreamLs => stream(self.guests.web(), times.stream),
        }
    }

    fn address(&self) -> Outcome<Ipv4Addr> {
        guests::address(self.guests.web())
    }

    fn ping(&self, time: u64, client: Client) -> Outcome<Vec<Option<f64>>> {
        let mean = (PING_INTERVAL.0 + PING_INTERVAL.1) / 2;
        let options = Ping {
            count: (time as f64 / 1e3 / mean.as_secs_f64()).ceil() as usize,
            interval: PING_INTERVAL,
            grace: REPLY_TIMEOUT,
            client,
        };
        let found = load::ping(&self.guests.lab, self.address()?, &options).map_err(lab_failure)?;
        let ms: Vec<f64> = found.us.iter().map(|us| us / 1e3).collect();
        Ok(vec![average(&ms), Sorted::new(ms).quantile(0.99)])
    }

    /// Jitter (ms) of a stream of 1 Mbit/s for `time` ms, in datagrams of `size` bytes.
    fn jitter(&self, size: u32, time: u64, client: Client) -> Outcome<Vec<Option<f64>>> {
        let period_us = size * 8;
        let up = Stream {
            lines: 1,
            packets: packets(time, period_us),
            period_us,
            payload: size - HEADER_BYTES as u32,
        };
        let options = Call {
            up,
            both: false,
            client,
            ..Call::default()
        };
        let received =
            load::call(&self.guests.lab, self.address()?, &options).map_err(lab_failure)?;
        let quality = Quality::of(up, &received.up, PLAYOUT_BUFFER_MS);
        Ok(vec![quality.map(|q| q.jitter_ms)])
    }

    /// Throughput of a stream of `time` ms at a program in the guest, MB/s.
    fn tcp(&self, from: &impl ClientNetwork, time: u64) -> Outcome<Vec<Option<f64>>> {
        let bytes =
            || Ok::<u64, Failure>(self.guests.web().stat("sink").map_err(lab_failure)?.bytes);
        let before = bytes()?;
        let started = Instant::now();
        let options = TcpBulk {
            time: Duration::from_millis(time),
            // Normal priority: at real-time priority the receiver would block everything else on its core.
            client: Client {
                core: Some(self.guests.load_core),
                ..Client::default()
            },
            ..TcpBulk::default()
        };
        load::tcp_stream(from, self.address()?, &options).map_err(lab_failure)?;
        let mut last = bytes()?;
        let rate = last.saturating_sub(before) as f64 / 1e6 / started.elapsed().as_secs_f64();
        // Drain the sender's queue so that it does not disturb the next measurement.
        for _ in 0..MAX_DRAIN_CHECKS {
            std::thread::sleep(Duration::from_millis(200));
            let now = bytes()?;
            if now == std::mem::replace(&mut last, now) {
                break;
            }
        }
        Ok(vec![Some(rate)])
    }

    /// Replies per second, connect times, and times from then to the end of the reply. At a fixed rate (open loop) both
    /// count from when a request was due.
    fn apache(&self, from: &impl ClientNetwork, options: &Http) -> Outcome<Vec<Option<f64>>> {
        let found = load::http(from, self.address()?, options).map_err(lab_failure)?;
        if found.answered == 0 {
            let why = found.first_failure.unwrap_or_default();
            return Err(Failure::run(format!("Apache sent no reply: {why}")));
        }
        found.check_punctual(1).map_err(lab_failure)?;
        let connect = average(&found.connect_us).map(|us| us / 1e3);
        let whole = average(&found.us[..found.answered]).map(|us| us / 1e3);
        let response = connect.zip(whole).map(|(connect, whole)| whole - connect);
        Ok(vec![Some(found.rate()), connect, response])
    }

    /// Upstream jitter; then for one line the downstream jitter, or for several lines the loss in each direction; then
    /// the discarded packets of both directions.
    fn call(
        &self,
        from: &impl ClientNetwork,
        lines: u32,
        time: u64,
        client: Client,
    ) -> Outcome<Vec<Option<f64>>> {
        let up = Stream::voice(lines, packets(time, 20_000));
        let options = Call {
            up,
            client,
            ..Call::default()
        };
        let received = load::call(from, self.address()?, &options).map_err(lab_failure)?;
        let of = |arrivals: &[_]| Quality::of(up, arrivals, PLAYOUT_BUFFER_MS);
        let (up, down) = (of(&received.up), of(&received.down));
        let discarded: Vec<f64> = [up, down].into_iter().flatten().map(|q| q.late).collect();
        let lost = |direction: Option<Quality>| Some(direction.map_or(100.0, |q| q.lost));
        let mut found = vec![up.map(|q| q.jitter_ms)];
        match lines {
            1 => found.push(down.map(|q| q.jitter_ms)),
            _ => found.extend([lost(up), lost(down)]),
        }
        found.push(average(&discarded));
        Ok(found)
    }

    fn video(
        &self,
        from: &impl ClientNetwork,
        time: u64,
        client: Client,
    ) -> Outcome<Vec<Option<f64>>> {
        let to = self.address()?;
        let watch = |packets| {
            let options = VideoSession {
                packets,
                client,
                ..VideoSession::default()
            };
            load::watch_video(from, to, &options).map_err(lab_failure)
        };
        let count = packets(time, 50_000);
        let film = watch(count)?;
        let video = Quality::of(Stream::video(count), &film.video, PLAYOUT_BUFFER_MS);
        let audio = Quality::of(Stream::audio(count), &film.audio, PLAYOUT_BUFFER_MS);
        let mut times = [vec![], vec![], vec![]];
        for _ in 0..STARTUP_FILMS {
            interrupt::check()?;
            let film = watch(1)?;
            let of = [film.setup_ms, film.describe_ms, film.play_ms];
            times.iter_mut().zip(of).for_each(|(all, ms)| all.push(ms));
        }
        let mut found = vec![
            video.map(|q| q.jitter_ms),
            audio.map(|q| q.jitter_ms),
            video.map(|q| q.late),
            average(&film.trips_ms),
        ];
        found.extend(times.iter().map(|ms| average(ms)));
        Ok(found)
    }
}

/// Sets [`TCP_WINDOW_BYTES`] in a guest for new connections.
fn wide() -> String {
    format!("echo 4096 {TCP_WINDOW_BYTES} {TCP_WINDOW_BYTES} >/proc/sys/net/ipv4/tcp_rmem")
}

/// Requests for the paper's page of 5 KB, for `time` ms.
fn requests(time: u64, client: Client) -> Http {
    Http {
        port: 8080,
        requests: MAX_REQUESTS,
        limit: Duration::from_millis(time),
        client,
        ..Http::default()
    }
}

/// STREAM's four kernels in sequence, MB/s by STREAM's own count and the guest's clock.
fn stream(guest: &Guest, time: u64) -> Outcome<Vec<Option<f64>>> {
    let kernels = [Pattern::Copy, Pattern::Scale, Pattern::Add, Pattern::Triad];
    let found = kernels.map(|pattern| {
        let kernel = Workload::Hog {
            pattern,
            footprint_kib: ARRAYS_KIB,
            procs: 1,
            duty: 100,
            period_ms: guests::PERIOD,
            nice: 0,
        };
        guest.start(STREAM, kernel).map_err(lab_failure)?;
        std::thread::sleep(ARRAY_FILL_TIME);
        let before = guest.stat(STREAM).map_err(lab_failure)?;
        std::thread::sleep(Duration::from_millis(time));
        let after = guest.stop(STREAM).map_err(lab_failure)?;
        let bytes = after.bytes.saturating_sub(before.bytes) as f64;
        let seconds = after.up_ms.saturating_sub(before.up_ms) as f64 / 1e3;
        Ok(Some(bytes / 1e6 / seconds.max(1e-3)))
    });
    found.into_iter().collect()
}

/// Number of packets due in this many milliseconds.
fn packets(time_ms: u64, period_us: u32) -> u32 {
    (time_ms * 1000 / u64::from(period_us.max(1))) as u32
}

/// The mean; `None` without samples.
fn average(of: &[f64]) -> Option<f64> {
    (!of.is_empty()).then(|| of.iter().sum::<f64>() / of.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packet_counts_match_the_duration() {
        assert_eq!(packets(5000, 20_000), 250);
        assert_eq!(packets(2500, 11_760), 212);
        assert_eq!(average(&[1.0, 2.0]), Some(1.5));
        assert_eq!(average(&[]), None);
    }
}
