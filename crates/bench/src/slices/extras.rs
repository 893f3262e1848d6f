// SPDX-License-Identifier: Apache-2.0
//! Cells beside the groups: other weights, a cap, two latency-sensitive guests, a packet flood, an idle host, and the
//! first pings after viola starts. The microslice is 0.3 ms. Stock has the same weights and caps, by cgroups.

use std::time::{Duration, Instant};

use viola_lab::load::{self, UdpFlood};

use super::first::{self, LatePing};
use super::plan::{Extra, State};
use crate::harness::cell::{self, Reading, Times, fair_shares, points_from};
use crate::harness::cpu::{CpuSample, ThreadSampler};
use crate::harness::guests::{self, Guests, WEB};
use crate::harness::row::{Goal, Row};
use crate::harness::side::{Active, Guests as Settings, Side, lab_failure, slice};
use viola_cli::error::{Failure, Outcome};

const MICROSLICE: u32 = 300;
/// Packets per second of the flood, more than a guest on a shared core can receive.
const FLOOD: u32 = 20_000;
const CAP: u32 = 20;
const STOCK: &str = "stock";
const VIOLA: &str = "viola";
/// Sides of a cell that is compared.
const SIDES: [(&str, Side); 2] = [(STOCK, Side::Stock), (VIOLA, Side::Viola(MICROSLICE))];

/// Settings of an extra cell.
#[derive(Debug, Clone, Copy)]
pub struct ExtraOptions {
    /// Core of the guests.
    pub core: usize,
    /// Duration of a cell.
    pub times: Times,
    /// Number of pings after viola starts.
    pub pings: usize,
    /// Seed of the random intervals.
    pub seed: u64,
}

/// Readings, one per round.
#[derive(Debug, Default)]
pub struct Measurements {
    readings: Vec<(Extra, &'static str, Reading)>,
    first: Vec<(State, usize, Vec<LatePing>)>,
}

impl Measurements {
    /// Measures one extra cell on all its sides.
    ///
    /// # Errors
    /// A side cannot be set up, or a load fails.
    pub fn measure(
        &mut self,
        extra: Extra,
        job: &ExtraOptions,
        guests: &mut Guests,
        sampler: &mut ThreadSampler,
    ) -> Outcome {
        if extra == Extra::First {
            for state in [State::Busy, State::Idle] {
                guests.keep_busy(state == State::Busy, 100)?;
                let settings = Settings::equal(job.core, WEB);
                let active = Active::start(Side::Viola(MICROSLICE), &settings, &guests.lab)?;
                let late = first::pings(guests, sampler, job.core, job.pings, job.seed)?;
                active.stop()?;
                self.first.push((state, job.pings, late));
            }
            return Ok(());
        }
        match extra {
            Extra::Quiet => guests.keep_busy(false, 0)?,
            _ => guests.keep_busy(true, 100)?,
        }
        let mut settings = Settings::equal(job.core, WEB);
        let second = guests.lab.guests()[1].name().to_owned();
        match extra {
            Extra::Weights => settings.weights.push((WEB.into(), 512)),
            Extra::Cap => settings.caps.push((second, CAP)),
            Extra::TwoLs => settings.ls.push(second),
            Extra::Flood | Extra::Quiet | Extra::First => {}
        }
        let mut sides = SIDES;
        // Each side comes first in every other round.
        sides.rotate_left((job.seed % 2) as usize);
        for (name, side) in sides {
            if extra == Extra::Quiet && name == STOCK {
                continue;
            }
            let active = Active::start(side, &settings, &guests.lab)?;
            let reading = match extra {
                Extra::Flood => flooded(guests, &active, sampler, job)?,
                // No pings: the cell shows that an idle host costs nothing.
                Extra::Quiet => quiet(guests, &active, sampler, job.times.ping)?,
                _ => cell::measure(guests, &active, sampler, &job.times, job.seed)?,
            };
            active.stop()?;
            self.readings.push((extra, name, reading));
        }
        Ok(())
    }

    /// Rows of the extra cells.
    pub fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        for extra in [Extra::Weights, Extra::Cap, Extra::TwoLs, Extra::Flood] {
            let name = |what: &str| {
                format!(
                    "{what}, LSVM busy, 4 VMs, others 100 %, {}, {}",
                    extra.name(),
                    slice(MICROSLICE)
                )
            };
            let row = |what: &str, unit, figure: &dyn Fn(&Reading) -> Option<f64>| {
                SIDES
                    .iter()
                    .fold(Row::new(name(what), unit), |row, (side, _)| {
                        row.side(*side, self.of(extra, side).filter_map(figure))
                    })
            };
            let equal = [None; 4];
            let expected = match extra {
                Extra::Weights => fair_shares(&[2.0, 1.0, 1.0, 1.0], &equal),
                Extra::Cap => {
                    fair_shares(&[1.0; 4], &[None, Some(f64::from(CAP) / 100.0), None, None])
                }
                _ => fair_shares(&[1.0; 4], &equal),
            };
            rows.push(
                row("largest distance from a fair share", "points", &|r| {
                    Some(points_from(&expected, &r.shares))
                })
                .goal(Goal::FigureAtMost(1.0), VIOLA),
            );
            // A flood is more than the guest's share, as a closed loop is.
            let (p50, p99) = match extra {
                Extra::Flood => (1.2, 0.7),
                _ => (0.125, 1.0 / 12.0),
            };
            let latency = |what: &str, q: f64, most: f64| {
                let row = row(what, "ms", &|r| r.ping.quantile(q));
                row.against(VIOLA, STOCK).goal(Goal::AtMost(most), VIOLA)
            };
            rows.push(latency("ping p50", 0.5, p50));
            rows.push(latency("ping p99", 0.99, p99));
        }
        let quiet = |what: &str, unit, figure: fn(&Reading) -> f64| {
            let name = format!("{what}, {}", Extra::Quiet.name());
            Row::new(name, unit).side(VIOLA, self.of(Extra::Quiet, VIOLA).map(figure))
        };
        rows.push(
            quiet("controller", "% of the core", |r| r.controller * 100.0)
                .goal(Goal::FigureAtMost(0.1), VIOLA),
        );
        rows.push(quiet(
            "daemon, watchdog and controller",
            "% of a core",
            |r| r.viola * 100.0,
        ));
        for (state, count, late) in &self.first {
            rows.push(first::row(state.name(), *count, &slice(MICROSLICE), late));
        }
        rows.retain(Row::is_measured);
        rows
    }

    fn of<'a>(&'a self, extra: Extra, side: &'a str) -> impl Iterator<Item = &'a Reading> {
        self.readings
            .iter()
            .filter(move |(e, s, _)| *e == extra && *s == side)
            .map(|(_, _, reading)| reading)
    }
}

/// A cell during a packet flood.
fn flooded(
    guests: &Guests,
    active: &Active,
    sampler: &mut ThreadSampler,
    job: &ExtraOptions,
) -> Outcome<Reading> {
    let web = guests::address(guests.web())?;
    let flood = UdpFlood {
        rate: FLOOD,
        time: super::around(&job.times),
        client: guests.client(job.seed),
        ..UdpFlood::default()
    };
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| load::udp_flood(&guests.lab, web, &flood));
        let reading = cell::measure(guests, active, sampler, &job.times, job.seed);
        let sent = sender
            .join()
            .map_err(|_| Failure::run("the flood's thread failed"))?
            .map_err(lab_failure)?;
        if sent.sent == 0 {
            return Err(Failure::run("the flood sent no packet"));
        }
        reading
    })
}

/// A cell without load.
fn quiet(
    guests: &Guests,
    active: &Active,
    sampler: &mut ThreadSampler,
    time: Duration,
) -> Outcome<Reading> {
    let pids = guests.pids();
    std::thread::sleep(Duration::from_millis(500));
    let (before, tree, controller, started) = (
        sampler.vms(&pids)?,
        active.sample(),
        active.controller_ns()?,
        Instant::now(),
    );
    std::thread::sleep(time);
    let ns = active.controller_ns()?.saturating_sub(controller);
    let used = |now: Option<CpuSample>| Some(now?.since(&tree?).iter().map(|u| u.share).sum());
    Ok(Reading {
        controller: ns as f64 / 1e9 / started.elapsed().as_secs_f64(),
        viola: used(active.sample()).unwrap_or_default(),
        switches_per_s: sampler
            .vms(&pids)?
            .since(&before)
            .iter()
            .map(|u| u.switches_per_s)
            .sum(),
        ..Reading::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_compared_with_weights_and_caps() {
        let reading = |shares: [f64; 4]| Reading {
            shares: shares.to_vec(),
            ..Reading::default()
        };
        let third = 0.8 / 3.0;
        let found = Measurements {
            readings: vec![
                (Extra::Weights, VIOLA, reading([0.4, 0.2, 0.2, 0.2])),
                (Extra::Cap, VIOLA, reading([third, 0.2, third, third])),
                (Extra::TwoLs, VIOLA, reading([0.25, 0.22, 0.25, 0.25])),
                (Extra::TwoLs, STOCK, reading([0.25; 4])),
            ],
            first: Vec::new(),
        };
        let rows = found.rows();
        let met: Vec<Option<bool>> = rows
            .iter()
            .filter(|r| r.name.starts_with("largest"))
            .map(|r| r.met)
            .collect();
        assert_eq!(met, [Some(true), Some(true), Some(false)]);
    }
}
