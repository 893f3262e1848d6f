// SPDX-License-Identifier: Apache-2.0
//! HTTP requests to a guest's web server, in an open or in a closed loop.
//!
//! | loop | the next request is sent | a request's latency counts from | a server that stalls |
//! |---|---|---|---|
//! | open | at a moment fixed before the run, whatever the server does | that moment | delays every request that is due meanwhile, and all of them show it |
//! | closed | when the client has its last answer | when it was sent | delays one request of each connection; the others are never sent |
//!
//! So percentiles of a closed loop hide stalls ("coordinated omission"), but it asks for all that the
//! server can give. Percentiles of an open loop are what clients see that do not know each other.
//!
//! One thread does it all: epoll and a timer, and a busy wait for the last part before a request is
//! due. An answer's end is the kernel's receive time stamp.

mod answer;
mod engine;
mod source;
#[cfg(test)]
mod tests;

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use super::arrivals::{Spacing, plan_arrivals};
use super::{Client, ClientNetwork, failed, percentile_of_sorted, run};
use crate::error::{Error, Result};
use source::Source;

/// Own lateness (99th percentile) of an open loop up to which its figures are always good.
pub const MAX_LATE: Duration = Duration::from_micros(100);
/// Above [`MAX_LATE`], own lateness may be this part of the measured latency's 99th percentile.
const MAX_LATE_PART: f64 = 0.1;
/// Largest number of connections.
const MAX_CONNECTIONS: usize = 256;

/// When requests are sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arrivals {
    /// Open loop.
    Open {
        /// Requests per second.
        rate: f64,
        /// Time between two requests.
        spacing: Spacing,
    },
    /// Closed loop: each connection stands for a client.
    Closed {
        /// Shortest and longest pause of a client before its next request, uniform in between.
        pause: (Duration, Duration),
    },
}

impl Arrivals {
    /// A closed loop without pauses.
    pub const CLOSED: Self = Self::Closed {
        pause: (Duration::ZERO, Duration::ZERO),
    };

    /// An open loop of Poisson arrivals.
    pub fn poisson(rate: f64) -> Self {
        Self::Open {
            rate,
            spacing: Spacing::Poisson,
        }
    }
}

/// A run of HTTP requests.
#[derive(Debug, Clone)]
pub struct Http {
    /// Port of the guest's web server.
    pub port: u16,
    /// Requested path.
    pub path: String,
    /// Expected length of the body in bytes.
    pub bytes: usize,
    /// When requests are sent.
    pub arrivals: Arrivals,
    /// Connections, 1 to 256. Closed loop: their number. Open loop: their largest number at a time;
    /// a request that finds none free waits, and its latency includes the wait.
    pub connections: usize,
    /// Whether a connection carries more than one request.
    pub keep_alive: bool,
    /// Largest number of requests.
    pub requests: usize,
    /// Length of the run: the client sends no request after this time.
    pub limit: Duration,
    /// Longest time to wait for the last answers. Requests without an answer then count with their
    /// age.
    pub grace: Duration,
    /// How the client runs; its seed also makes the plan of an open loop.
    pub client: Client,
}

impl Default for Http {
    /// A closed loop of 1000 requests for `/page5k`, one at a time, each on a connection of its own,
    /// in at most 60 s.
    fn default() -> Self {
        Self {
            port: 80,
            path: "/page5k".into(),
            bytes: 5 << 10,
            arrivals: Arrivals::CLOSED,
            connections: 1,
            keep_alive: false,
            requests: 1000,
            limit: Duration::from_secs(60),
            grace: Duration::from_secs(10),
            client: Client::default(),
        }
    }
}

/// Result of a run of requests.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HttpResult {
    /// Latency of each request to the last byte of its answer, in microseconds: from the planned
    /// moment in an open loop, from the start of the request in a closed one. First those that were
    /// answered, in the order of their answers, then the age of those that were not at the end.
    pub us: Vec<f64>,
    /// Time from the same moment until the connection was established, of the answered requests
    /// that opened one, in microseconds.
    pub connect_us: Vec<f64>,
    /// Own lateness of each request of an open loop in microseconds: from the planned moment until
    /// the generator took the request up.
    pub late_us: Vec<f64>,
    /// Requests that were due.
    pub planned: usize,
    /// Requests that the kernel accepted whole.
    pub sent: usize,
    /// Good answers.
    pub answered: usize,
    /// Requests without an answer at the end.
    pub open: usize,
    /// Requests with a wrong answer or a broken connection.
    pub errors: usize,
    /// Largest number of connections at a time.
    pub connections: usize,
    /// Time in which requests were due, in seconds.
    pub plan_seconds: f64,
    /// Time from the start to the last answer, or to the end of the run if requests are open.
    pub seconds: f64,
    /// Reason of the first error.
    pub first_failure: Option<String>,
}

/// The figures of a run. Times are in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Summary {
    /// Median latency.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// Longest latency.
    pub max: f64,
    /// Requests that were due, per second.
    pub planned_per_s: f64,
    /// Requests sent, per second.
    pub sent_per_s: f64,
    /// Good answers per second.
    pub answered_per_s: f64,
    /// 99th percentile of the generator's own lateness; 0 for a closed loop.
    pub late_p99: f64,
}

impl HttpResult {
    /// The figures; `None` without any latency.
    pub fn summary(&self) -> Option<Summary> {
        let sorted = |values: &[f64]| {
            let mut sorted = values.to_vec();
            sorted.sort_by(f64::total_cmp);
            sorted
        };
        let (us, late) = (sorted(&self.us), sorted(&self.late_us));
        let of = |p| percentile_of_sorted(&us, p);
        let per_s = |count: usize, seconds: f64| count as f64 / seconds.max(1e-9);
        Some(Summary {
            p50: of(50.0)?,
            p90: of(90.0)?,
            p99: of(99.0)?,
            p999: of(99.9)?,
            max: of(100.0)?,
            planned_per_s: per_s(self.planned, self.plan_seconds),
            sent_per_s: per_s(self.sent, self.seconds),
            answered_per_s: self.rate(),
            late_p99: percentile_of_sorted(&late, 99.0).unwrap_or_default(),
        })
    }

    /// Good answers per second.
    pub fn rate(&self) -> f64 {
        self.answered as f64 / self.seconds.max(1e-9)
    }

    /// Refuses the figures of an open loop whose generator was late itself: its 99th percentile of
    /// own lateness is above [`MAX_LATE`] and above a tenth of that of the measured latency. Of several
    /// `generators` on one core, one waits for another: each adds [`MAX_LATE`] to what is allowed.
    ///
    /// # Errors
    /// [`Error::Load`] with both figures.
    pub fn check_punctual(&self, generators: usize) -> Result<()> {
        let Some(of) = self.summary() else {
            return Ok(());
        };
        let own = MAX_LATE.as_secs_f64() * 1e6 * generators as f64;
        let most = (of.p99 * MAX_LATE_PART).max(own);
        if of.late_p99 <= most {
            return Ok(());
        }
        Err(Error::Load(format!(
            "the generator was late itself: p99 {:.3} ms, where the latency's p99 is {:.3} ms; keep its core free",
            of.late_p99 / 1e3,
            of.p99 / 1e3
        )))
    }
}

/// Sends requests to a guest's web server and checks status and length of each answer.
///
/// # Errors
/// [`Error::Load`], [`Error::OutsideLab`].
pub fn http(net: &impl ClientNetwork, to: Ipv4Addr, options: &Http) -> Result<HttpResult> {
    if !(1..=MAX_CONNECTIONS).contains(&options.connections) {
        return Err(Error::Load(format!(
            "{} connections; it must be 1 to {MAX_CONNECTIONS}",
            options.connections
        )));
    }
    let (source, plan_seconds) = match options.arrivals {
        Arrivals::Open { rate, spacing } => {
            let mut plan = plan_arrivals(rate, options.limit, spacing, options.client.seed)?;
            let mut seconds = options.limit.as_secs_f64();
            if plan.len() > options.requests {
                plan.truncate(options.requests);
                seconds = plan.last().map_or(0.0, |due| *due as f64 / 1e9);
            }
            (Source::open(plan), seconds)
        }
        Arrivals::Closed { pause } => {
            let source = Source::closed(
                options.connections,
                options.requests,
                options.limit,
                pause,
                options.client.seed,
            );
            (source, options.limit.as_secs_f64())
        }
    };
    let to = SocketAddrV4::new(to, options.port);
    let time = options.limit + options.grace;
    let job = || {
        let mut result = engine::run(to, options, source).map_err(failed("sending requests"))?;
        result.plan_seconds = plan_seconds;
        Ok(result)
    };
    run(net, *to.ip(), options.requests, time, options.client, job)
}
