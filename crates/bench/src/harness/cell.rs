// SPDX-License-Identifier: Apache-2.0
//! One measurement (cell): a side, a state of the guests, and a few seconds of load.

use std::time::{Duration, Instant};

use viola_lab::load::{self, Client, Http, Ping, TcpRr};

use super::cpu::{CpuUse, ThreadSampler};
use super::guests::{self, Guests};
use super::load::ask;
use super::side::{Active, lab_failure};
use viola_cli::error::Outcome;
use viola_cli::interrupt;
use viola_report::stats::Sorted;

/// Time between two pings. It is random so that pings do not fall in step with the scheduler's period.
const PING_INTERVAL: (Duration, Duration) = (Duration::from_millis(3), Duration::from_millis(12));
/// Time between two TCP requests, random for the same reason.
const RR_INTERVAL: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(8));
/// Timeout for a reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);
/// Upper bound on requests; no cell has time for more.
const MAX_REQUESTS: usize = 1_000_000;

/// Duration of each part of a cell; a part of zero length is skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// Settling time before the measurement.
    pub settle: Duration,
    /// Ping at random intervals of 3 to 12 ms.
    pub ping: Duration,
    /// TCP requests of one byte, each sent 2 to 8 ms after the last one.
    pub rr: Duration,
    /// HTTP requests in a closed loop, one at a time, each on its own connection.
    pub http: Duration,
}

impl Times {
    /// Durations from milliseconds.
    pub const fn of(settle: u64, ping: u64, rr: u64, http: u64) -> Self {
        Self {
            settle: Duration::from_millis(settle),
            ping: Duration::from_millis(ping),
            rr: Duration::from_millis(rr),
            http: Duration::from_millis(http),
        }
    }

    /// Duration of the whole cell, including setup and teardown.
    pub fn cell(&self) -> Duration {
        self.settle + self.ping + self.rr + self.http + Duration::from_millis(300)
    }

    /// The same without TCP and HTTP.
    pub const fn only_ping(self) -> Self {
        Self {
            rr: Duration::ZERO,
            http: Duration::ZERO,
            ..self
        }
    }
}

/// Result of a cell. Latencies are in milliseconds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reading {
    /// Ping round trips.
    pub ping: Sorted,
    /// Pings without a reply.
    pub ping_lost: usize,
    /// Round trips of one byte on a TCP connection.
    pub rr: Sorted,
    /// HTTP requests in a closed loop, one at a time, from connect to the last byte.
    pub http: Sorted,
    /// Such requests per second.
    pub http_per_s: f64,
    /// Share of the core that each guest got over the whole cell, 0..=1.
    pub shares: Vec<f64>,
    /// Work units per second of all neighbours together, counted during the ping part.
    pub batch_per_s: Option<f64>,
    /// Context switches to guest threads, per second.
    pub switches_per_s: f64,
    /// CPU time of the slot controller during the ping part, as a part of a core. The controller usually has its own
    /// core.
    pub controller: f64,
    /// CPU time of daemon, watchdog and controller, as a part of a core.
    pub viola: f64,
    /// Share of the core that went neither to a guest, although one guest always wanted it, nor to viola: other
    /// programs of this machine used it.
    pub foreign_share: f64,
}

/// Measures one cell.
///
/// # Errors
/// A guest does not answer, an HTTP request fails, or viola's controller has failed.
pub fn measure(
    guests: &Guests,
    active: &Active,
    sampler: &mut ThreadSampler,
    times: &Times,
    seed: u64,
) -> Outcome<Reading> {
    interrupt::check()?;
    let pids = guests.pids();
    let web = guests::address(guests.web())?;
    let client = guests.client(seed);
    std::thread::sleep(times.settle);

    let mut reading = Reading::default();
    let (before, tree, controller, started) = (
        sampler.vms(&pids)?,
        active.sample(),
        active.controller_ns()?,
        Instant::now(),
    );
    let work = guests.work()?;
    if !times.ping.is_zero() {
        let mean = (PING_INTERVAL.0 + PING_INTERVAL.1) / 2;
        let count = (times.ping.as_secs_f64() / mean.as_secs_f64()).ceil() as usize;
        let options = Ping {
            count,
            interval: PING_INTERVAL,
            grace: REPLY_TIMEOUT,
            client,
        };
        let found = load::ping(&guests.lab, web, &options).map_err(lab_failure)?;
        reading.ping = milliseconds(&found.us);
        reading.ping_lost = found.lost;
    }
    reading.batch_per_s = rate(&work, &guests.work()?);
    let ns = active.controller_ns()?.saturating_sub(controller);
    reading.controller = ns as f64 / 1e9 / started.elapsed().as_secs_f64();
    interrupt::check()?;
    if !times.rr.is_zero() {
        let options = TcpRr {
            count: MAX_REQUESTS,
            interval: RR_INTERVAL,
            limit: times.rr,
            client,
            ..TcpRr::default()
        };
        reading.rr = milliseconds(
            &load::tcp_rr(&guests.lab, web, &options)
                .map_err(lab_failure)?
                .us,
        );
    }
    if !times.http.is_zero() {
        let options = Http {
            requests: MAX_REQUESTS,
            limit: times.http,
            client,
            ..Http::default()
        };
        let found = ask(&guests.lab, web, &options)?;
        reading.http = milliseconds(&found.us);
        reading.http_per_s = found.rate();
    }
    let mut own = 0.0;
    let used = sampler.vms(&pids)?.since(&before);
    reading.shares = used.iter().map(|u| u.share).collect();
    reading.switches_per_s = used.iter().map(|u| u.switches_per_s).sum();
    if let (Some(now), Some(before)) = (active.sample(), tree) {
        let sum = |used: Vec<CpuUse>| used.iter().map(|u| u.share).sum::<f64>();
        reading.viola = sum(now.since(&before));
        let (now, before) = (now.only_on(guests.core), before.only_on(guests.core));
        own = sum(now.since(&before));
    }
    if guests.is_saturated() {
        reading.foreign_share = foreign_share(&reading.shares, own);
    }
    Ok(reading)
}

/// Share of the core that neither the guests nor viola used. The controller usually runs on another core and then uses
/// none of this one.
fn foreign_share(shares: &[f64], own: f64) -> f64 {
    (1.0 - shares.iter().sum::<f64>() - own).max(0.0)
}

pub fn milliseconds(us: &[f64]) -> Sorted {
    Sorted::new(us.iter().map(|us| us / 1e3).collect())
}

/// Work units per second of all busy guests together, each by its own clock. A guest may reply late because it waits
/// for the core, but it reads counter and clock together.
pub fn rate(before: &[Option<(u64, f64)>], after: &[Option<(u64, f64)>]) -> Option<f64> {
    let rates: Vec<f64> = before
        .iter()
        .zip(after)
        .filter_map(|(before, after)| {
            let ((units0, at0), (units1, at1)) = ((*before)?, (*after)?);
            Some((units1.saturating_sub(units0)) as f64 / (at1 - at0)).filter(|r| r.is_finite())
        })
        .collect();
    (!rates.is_empty()).then(|| rates.iter().sum())
}

/// Mean share of the core used by other programs above which the figures are marked as disturbed.
/// In a single cell four times as much is allowed.
const MAX_FOREIGN_SHARE: f64 = 0.015;

/// One sentence if other programs used the guests' core too.
pub fn disturbance<'a>(readings: impl IntoIterator<Item = &'a Reading>) -> Option<String> {
    let foreign_share: Vec<f64> = readings
        .into_iter()
        .map(|r| r.foreign_share)
        .filter(|f| *f > 0.0)
        .collect();
    let mean = foreign_share.iter().sum::<f64>() / foreign_share.len().max(1) as f64;
    let worst = foreign_share.iter().copied().fold(0.0, f64::max);
    (mean > MAX_FOREIGN_SHARE || worst > 4.0 * MAX_FOREIGN_SHARE).then(|| {
        format!(
            "other programs used {:.1} % of the guests' core on average and {:.1} % at worst; this affects \
             latencies and shares",
            mean * 100.0,
            worst * 100.0
        )
    })
}

/// Fair shares of the core when all guests are busy: proportional to weight, no guest above its cap; what a capped
/// guest leaves goes to the others by weight.
pub fn fair_shares(weights: &[f64], caps: &[Option<f64>]) -> Vec<f64> {
    let mut parts: Vec<Option<f64>> = vec![None; weights.len()];
    loop {
        let given: f64 = parts.iter().flatten().sum();
        let open: f64 = weights
            .iter()
            .zip(&parts)
            .filter(|(_, p)| p.is_none())
            .map(|(w, _)| w)
            .sum();
        let part = |i: usize| weights[i] / open * (1.0 - given);
        let capped = (0..weights.len())
            .find(|&i| parts[i].is_none() && caps[i].is_some_and(|cap| part(i) > cap));
        match capped {
            Some(i) => parts[i] = caps[i],
            None => {
                return (0..weights.len())
                    .map(|i| parts[i].unwrap_or_else(|| part(i)))
                    .collect();
            }
        }
    }
}

/// Largest distance of a guest's share from its fair share, in points (hundredths of the core).
pub fn points_from(fair_shares: &[f64], shares: &[f64]) -> f64 {
    fair_shares
        .iter()
        .zip(shares)
        .map(|(f, s)| (f - s).abs() * 100.0)
        .fold(0.0, f64::max)
}

impl Guests {
    /// Client options: real-time priority, so that the load's own waits do not count, on a core without guests.
    pub fn client(&self, seed: u64) -> Client {
        Client {
            core: Some(self.load_core),
            seed,
            ..Client::real_time()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_counted_by_the_guests_own_clock() {
        let before = [None, Some((100, 1.0)), Some((0, 5.0))];
        let after = [None, Some((300, 3.0)), Some((50, 5.5))];
        assert_eq!(rate(&before, &after), Some(200.0));
        assert_eq!(rate(&[None], &[None]), None);
        assert_eq!(
            rate(&[Some((1, 1.0))], &[Some((1, 1.0))]),
            None,
            "no time passed"
        );
    }

    #[test]
    fn the_rest_of_a_capped_share_goes_to_the_others() {
        let close = |a: &[f64], b: &[f64]| {
            a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-9) && a.len() == b.len()
        };
        assert!(close(&fair_shares(&[1.0; 4], &[None; 4]), &[0.25; 4]));
        assert!(close(
            &fair_shares(&[2.0, 1.0, 1.0, 1.0], &[None; 4]),
            &[0.4, 0.2, 0.2, 0.2]
        ));
        let third = 0.8 / 3.0;
        assert!(close(
            &fair_shares(&[1.0; 4], &[None, Some(0.2), None, None]),
            &[third, 0.2, third, third]
        ));
        assert!(close(
            &fair_shares(&[1.0; 2], &[Some(0.9), Some(0.1)]),
            &[0.9, 0.1]
        ));
    }

    #[test]
    fn a_high_foreign_share_is_reported() {
        let reading = |foreign_share| Reading {
            foreign_share,
            ..Reading::default()
        };
        assert_eq!(disturbance(&[reading(0.004), reading(0.01)]), None);
        let text = disturbance(&[reading(0.01), reading(0.07)]).unwrap();
        assert!(
            text.contains("4.0 % of the guests' core on average and 7.0 % at worst"),
            "{text}"
        );
        assert_eq!(disturbance(&[]), None);
    }

    #[test]
    fn a_controller_on_another_core_uses_nothing_of_the_guests_core() {
        assert!((foreign_share(&[0.5, 0.4], 0.0) - 0.1).abs() < 1e-9);
        assert!((foreign_share(&[0.5, 0.4], 0.07) - 0.03).abs() < 1e-9);
        assert_eq!(foreign_share(&[0.6, 0.41], 0.0), 0.0);
    }

    #[test]
    fn the_worst_guest_counts() {
        assert!((points_from(&[0.25, 0.25], &[0.26, 0.22]) - 3.0).abs() < 1e-9);
    }
}
