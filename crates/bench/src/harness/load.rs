// SPDX-License-Identifier: Apache-2.0
//! Loads of HTTP requests on the latency-sensitive guests, in an open or in a closed loop.
//!
//! The rate of an open loop is a part of what the guest's share of the core can serve. That is measured in each run: either what a
//! guest serves beside its neighbours ([`served`]), or what a core serves ([`Capacity`]).

use std::net::Ipv4Addr;
use std::time::Duration;

use viola_lab::Lab;
use viola_lab::load::{self, Arrivals, Http, HttpResult};

use super::awake::KeepAwake;
use super::cell::{milliseconds, rate};
use super::cpu::ThreadSampler;
use super::guests::{self, Guests};
use super::side::lab_failure;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;
use viola_report::stats::Sorted;

/// Most connections of an open loop. nginx in a guest accepts 512.
const MAX_CONNECTIONS: usize = 64;
/// Upper bound on requests; no load has time for more.
const MAX_REQUESTS: usize = 1_000_000;
/// Longest time to wait for the last answers.
const GRACE: Duration = Duration::from_secs(2);
/// Settling time before a load.
const SETTLE_TIME: Duration = Duration::from_millis(100);
/// Attempts at a load whose generator was late itself.
const MAX_ATTEMPTS: usize = 3;

/// A load on a web server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Load {
    /// Open loop: Poisson arrivals at this part, in percent, of what the guest's share can serve, on up to 64 kept
    /// connections.
    Open(u32),
    /// Closed loop: each connection asks again as soon as it has its answer.
    Closed {
        /// Connections.
        connections: usize,
        /// Whether a connection carries more than one request.
        keep_alive: bool,
    },
}

impl Load {
    /// Name in rows.
    pub fn name(self) -> String {
        match self {
            Self::Open(percent) => format!("open loop {percent} %"),
            Self::Closed {
                connections,
                keep_alive,
            } => {
                let no = if keep_alive { "" } else { "no " };
                format!("closed loop {connections}, {no}keep-alive")
            }
        }
    }

    /// Requests per second of this load for a guest that can serve `served` of them; 0 for a closed loop.
    pub fn rate(self, served: f64) -> f64 {
        match self {
            Self::Open(percent) => served * f64::from(percent) / 100.0,
            Self::Closed { .. } => 0.0,
        }
    }

    /// Whether the guest's share is enough for it.
    pub fn is_inside(self) -> bool {
        matches!(self, Self::Open(_))
    }
}

/// HTTP requests per second that a whole core serves when they come one at a time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Capacity(pub f64);

impl Capacity {
    /// Measures it on the web server with busy neighbours, under stock scheduling: answers per second of a closed loop
    /// of one kept connection, divided by the part of the core that the guest used.
    ///
    /// # Errors
    /// A request fails, or the guest used no CPU time.
    pub fn measure(
        guests: &Guests,
        sampler: &mut ThreadSampler,
        time: Duration,
        seed: u64,
    ) -> Outcome<Self> {
        let options = LoadOptions::closed(1, 1, time, seed);
        let reading = attempt(guests, sampler, &options)?.0;
        let used = reading.shares.first().copied().unwrap_or_default();
        Self::of(reading.answered_per_s, used)
    }

    /// Of a server that answered so many requests per second with this part of a core.
    ///
    /// # Errors
    /// It answered nothing, or used no CPU time.
    pub fn of(answered_per_s: f64, used: f64) -> Outcome<Self> {
        let capacity = answered_per_s / used;
        match used > 0.01 && capacity.is_finite() && capacity > 0.0 {
            true => Ok(Self(capacity)),
            false => Err(Failure::run(format!(
                "cannot measure what a core serves: {answered_per_s:.0} requests/s, {:.1} % of the core",
                used * 100.0
            ))),
        }
    }

    /// Requests per second of a load, for a guest with this share of the core; 0 for a closed loop.
    pub fn rate(self, load: Load, share: f64) -> f64 {
        load.rate(self.0 * share)
    }
}

/// Requests per second that each of the first `servers` guests serves of a closed loop of 16 connections, on the side that is in
/// force. Of what a guest serves beyond its fair share (cores), only that part counts which the share would serve.
///
/// # Errors
/// A request fails, or a guest served nothing.
pub fn served(
    guests: &Guests,
    sampler: &mut ThreadSampler,
    (servers, share): (usize, f64),
    time: Duration,
    seed: u64,
) -> Outcome<f64> {
    let options = LoadOptions::closed(16, servers, time, seed);
    let reading = attempt(guests, sampler, &options)?.0;
    let served = served_in_share(&reading, servers, share);
    match served.is_finite() && served > 0.0 {
        true => Ok(served),
        false => Err(Failure::run(
            "cannot measure what a guest serves: it answered nothing",
        )),
    }
}

fn served_in_share(reading: &LoadReading, servers: usize, share: f64) -> f64 {
    let used: f64 = reading.shares.iter().take(servers).sum();
    let fair = share * servers as f64;
    reading.answered_per_s / servers as f64 * (fair / used).min(1.0)
}

/// Options of one load.
#[derive(Debug, Clone, Copy)]
pub struct LoadOptions {
    /// What to send.
    pub load: Load,
    /// Number of guests that are asked at the same time, from the first on.
    pub servers: usize,
    /// Requests per second to each of them ([`Load::rate`]); a closed loop has none.
    pub rate: f64,
    /// Duration.
    pub time: Duration,
    /// Seed of the arrivals.
    pub seed: u64,
}

/// Result of a load on all servers together. Latencies are in milliseconds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LoadReading {
    /// Latencies to the last byte of the answer; an open loop counts from the planned moment. Requests without an
    /// answer count with their age.
    pub latency: Sorted,
    /// Requests that were due, per second.
    pub planned_per_s: f64,
    /// Answers per second.
    pub answered_per_s: f64,
    /// Requests without an answer at the end.
    pub open: usize,
    /// 99th percentile of the generator's own lateness, in milliseconds.
    pub late_p99: f64,
    /// Share of a core that each guest got, 0..=1.
    pub shares: Vec<f64>,
    /// Work units per second of all neighbours together.
    pub batch_per_s: Option<f64>,
}

/// Measures a load. The inner error is the reason why its figures are refused: the generator was late itself in each of
/// three attempts.
///
/// # Errors
/// A request fails, or the guests do not answer.
pub fn measure(
    guests: &Guests,
    sampler: &mut ThreadSampler,
    options: &LoadOptions,
) -> Outcome<Result<LoadReading, String>> {
    let mut late = String::new();
    for _ in 0..MAX_ATTEMPTS {
        match attempt(guests, sampler, options)? {
            (reading, None) => return Ok(Ok(reading)),
            (_, Some(why)) => late = why,
        }
    }
    Ok(Err(late))
}

/// One attempt, and why its figures are refused.
fn attempt(
    guests: &Guests,
    sampler: &mut ThreadSampler,
    options: &LoadOptions,
) -> Outcome<(LoadReading, Option<String>)> {
    interrupt::check()?;
    let pids = guests.pids();
    let servers = guests.lab.guests().iter().take(options.servers);
    let addresses = servers.map(guests::address);
    let addresses = addresses.collect::<Outcome<Vec<Ipv4Addr>>>()?;
    let _awake = KeepAwake::start()?;
    std::thread::sleep(SETTLE_TIME);

    let work = guests.work()?;
    let before = sampler.vms(&pids)?;
    let results = std::thread::scope(|scope| {
        let clients: Vec<_> = (addresses.iter().zip(0..))
            .map(|(to, number)| {
                let http = options.http(guests, number);
                scope.spawn(move || ask(&guests.lab, *to, &http))
            })
            .collect();
        let results = clients.into_iter().map(|client| {
            let result = client.join();
            result.map_err(|_| Failure::run("the load's thread failed"))?
        });
        results.collect::<Outcome<Vec<HttpResult>>>()
    })?;
    let shares = sampler.vms(&pids)?.since(&before);
    let mut reading = pooled(&results);
    reading.batch_per_s = rate(&work, &guests.work()?);
    reading.shares = shares.iter().map(|used| used.share).collect();
    let late = results
        .iter()
        .find_map(|result| result.check_punctual(options.servers).err());
    Ok((reading, late.map(|e| e.to_string())))
}

impl LoadOptions {
    /// A closed loop of kept connections.
    fn closed(connections: usize, servers: usize, time: Duration, seed: u64) -> Self {
        Self {
            load: Load::Closed {
                connections,
                keep_alive: true,
            },
            servers,
            rate: 0.0,
            time,
            seed,
        }
    }

    /// The load on one server.
    fn http(&self, guests: &Guests, number: u64) -> Http {
        let (arrivals, connections, keep_alive) = match self.load {
            Load::Open(_) => (Arrivals::poisson(self.rate), MAX_CONNECTIONS, true),
            Load::Closed {
                connections,
                keep_alive,
            } => (Arrivals::CLOSED, connections, keep_alive),
        };
        Http {
            arrivals,
            connections,
            keep_alive,
            requests: MAX_REQUESTS,
            limit: self.time,
            grace: GRACE,
            // Each server has arrivals of its own, in each round others.
            client: guests.client(self.seed.wrapping_mul(16).wrapping_add(number)),
            ..Http::default()
        }
    }
}

/// Sends requests, all of which must be answered well.
///
/// # Errors
/// A request fails.
pub fn ask(lab: &Lab, to: Ipv4Addr, http: &Http) -> Outcome<HttpResult> {
    let result = load::http(lab, to, http).map_err(lab_failure)?;
    match &result.first_failure {
        None => Ok(result),
        Some(why) => Err(Failure::run(format!(
            "a request to the web server failed: {why}"
        ))),
    }
}

/// All servers' results together.
fn pooled(results: &[HttpResult]) -> LoadReading {
    let latencies: Vec<f64> = results.iter().flat_map(|r| r.us.iter().copied()).collect();
    let summaries: Vec<_> = results.iter().filter_map(HttpResult::summary).collect();
    LoadReading {
        latency: milliseconds(&latencies),
        planned_per_s: summaries.iter().map(|of| of.planned_per_s).sum(),
        answered_per_s: summaries.iter().map(|of| of.answered_per_s).sum(),
        open: results.iter().map(|r| r.open).sum(),
        late_p99: summaries
            .iter()
            .map(|of| of.late_p99 / 1e3)
            .fold(0.0, f64::max),
        ..LoadReading::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIXTEEN: Load = Load::Closed {
        connections: 16,
        keep_alive: false,
    };

    #[test]
    fn an_open_loop_asks_for_a_part_of_the_share() {
        let capacity = Capacity(6000.0);
        assert_eq!(capacity.rate(Load::Open(50), 0.25), 750.0);
        assert_eq!(capacity.rate(Load::Open(90), 0.125), 675.0);
        assert_eq!(capacity.rate(SIXTEEN, 0.25), 0.0);
    }

    #[test]
    fn what_a_guest_serves_beyond_its_share_does_not_count() {
        let reading = LoadReading {
            answered_per_s: 1000.0,
            shares: vec![0.25, 0.25, 0.5],
            ..LoadReading::default()
        };
        assert_eq!(served_in_share(&reading, 1, 0.25), 1000.0);
        assert_eq!(served_in_share(&reading, 1, 0.5), 1000.0);
        assert_eq!(served_in_share(&reading, 1, 0.125), 500.0);
        assert_eq!(served_in_share(&reading, 2, 0.2), 400.0);
    }

    #[test]
    fn names_say_which_loop_it_is() {
        assert_eq!(Load::Open(20).name(), "open loop 20 %");
        assert_eq!(SIXTEEN.name(), "closed loop 16, no keep-alive");
        assert!(Load::Open(90).is_inside() && !SIXTEEN.is_inside());
    }

    #[test]
    fn two_servers_are_one_reading() {
        let of = |us: f64, late: f64| HttpResult {
            us: vec![us; 10],
            late_us: vec![late; 10],
            planned: 10,
            answered: 9,
            open: 1,
            seconds: 1.0,
            plan_seconds: 1.0,
            ..HttpResult::default()
        };
        let reading = pooled(&[of(1000.0, 5.0), of(3000.0, 20.0)]);
        assert_eq!((reading.latency.len(), reading.open), (20, 2));
        assert_eq!(reading.latency.median(), Some(2.0));
        assert_eq!(
            (reading.planned_per_s, reading.answered_per_s),
            (20.0, 18.0)
        );
        assert_eq!(reading.late_p99, 0.02);
    }
}
