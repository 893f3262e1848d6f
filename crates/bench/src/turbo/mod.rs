// SPDX-License-Identifier: Apache-2.0
//! `viola-lab bench turbo`: measures the I/O of a busy guest with two vCPUs and busy neighbours, under stock
//! scheduling, the papers' 30 ms slices and with its first vCPU on a turbo core, and the cost to the others. Further
//! sides show larger buffers alone, and the guest without neighbours.
//!
//! On every side the programs of all guests keep to the second vCPU, so that the first one serves interrupts at once.
//! Otherwise a User Mode Linux guest would see a packet only at the running program's next system call, and the other
//! sides would look worse than they are.

mod agent;
mod bed;
mod files;
mod rows;
mod spec;

use std::time::Duration;

use bed::{Reading, TestBed};

use crate::harness::progress::Progress;
use crate::harness::result::Results;
use crate::harness::vmm::GuestKind;
use crate::harness::{guests, row};
use crate::options::GuestOptions;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;

/// Time to boot the guests and shut them down, and to switch sides.
const BOOT_TIME: Duration = Duration::from_secs(18);
const SWITCH_TIME: Duration = Duration::from_secs(2);

/// Durations of the parts of a cell.
#[derive(Debug, Clone, Copy)]
struct Times {
    /// Pings, connections, requests: duration of each.
    answers: Duration,
    /// Floods: duration of each.
    bulk: Duration,
    /// Streams: duration of each.
    stream: Duration,
    /// Data written to the disk, MiB.
    disk: u32,
    /// Size of the copied files, MiB.
    file: u32,
    /// Web application, whole seconds.
    web: Duration,
}

impl Times {
    fn of(quick: bool) -> Self {
        Self {
            answers: Duration::from_millis(if quick { 1000 } else { 2000 }),
            bulk: Duration::from_millis(if quick { 1000 } else { 1500 }),
            stream: Duration::from_millis(if quick { 1500 } else { 2500 }),
            disk: if quick { 32 } else { 96 },
            file: if quick { 8 } else { 16 },
            web: Duration::from_secs(if quick { 3 } else { 5 }),
        }
    }

    /// Duration of a cell, including setup and teardown of each part.
    fn cell(self, measures: &Measures) -> Duration {
        let each = measures.0.iter().map(|kind| match kind {
            Measure::Ping | Measure::Connect | Measure::OpenPage | Measure::RoundTrips => {
                self.answers
            }
            Measure::Udp(_) | Measure::Read => self.bulk,
            Measure::Tcp | Measure::TcpGigabit => self.stream,
            Measure::Calendar => self.web,
            Measure::Write | Measure::Scp | Measure::NfsWrite | Measure::NfsRead => {
                Duration::from_secs(3)
            }
        });
        each.sum()
    }
}

/// Quantities measured on each side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Measure {
    Ping,
    Connect,
    OpenPage,
    RoundTrips,
    /// A flood, by its index in [`bed::RATES`].
    Udp(usize),
    Tcp,
    TcpGigabit,
    Write,
    Read,
    Scp,
    NfsWrite,
    NfsRead,
    Calendar,
}

impl Measure {
    const ALL: [Self; 15] = [
        Self::Ping,
        Self::Connect,
        Self::OpenPage,
        Self::RoundTrips,
        Self::Udp(0),
        Self::Udp(1),
        Self::Udp(2),
        Self::Tcp,
        Self::TcpGigabit,
        Self::Write,
        Self::Read,
        Self::Scp,
        Self::NfsWrite,
        Self::NfsRead,
        Self::Calendar,
    ];

    /// Whether it needs servers in the guest that the lab does not have.
    fn is_of_files(self) -> bool {
        matches!(self, Self::Scp | Self::NfsWrite | Self::NfsRead)
    }

    /// Whether its clients are host programs.
    fn has_tools(self) -> bool {
        self.is_of_files() || self == Self::Calendar
    }

    fn name(self) -> &'static str {
        match self {
            Self::Ping => "ping",
            Self::Connect => "connect",
            Self::OpenPage => "web page, open loop",
            Self::RoundTrips => "TCP_RR",
            Self::Udp(0) => "UDP at 5,000/s",
            Self::Udp(1) => "UDP at 20,000/s",
            Self::Udp(_) => "UDP at 50,000/s",
            Self::Tcp => "TCP receive",
            Self::TcpGigabit => "TCP over 1 Gbit/s",
            Self::Write => "disk write",
            Self::Read => "disk read",
            Self::Scp => "scp",
            Self::NfsWrite => "NFS write",
            Self::NfsRead => "NFS read",
            Self::Calendar => "web and database",
        }
    }
}

/// The selected measures.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Measures(Vec<Measure>);

impl Measures {
    /// All measures, or those whose name contains one of the patterns (separated by `, ` or `,`).
    fn of(only: Option<&str>) -> Self {
        let only = only.map(str::to_lowercase);
        let has = |kind: &Measure, word: &str| kind.name().to_lowercase().contains(word.trim());
        let selected = |kind: &Measure| match &only {
            None => true,
            // Numbers contain commas too.
            Some(whole) if Measure::ALL.iter().any(|kind| has(kind, whole)) => has(kind, whole),
            Some(words) => words.split(',').any(|word| has(kind, word)),
        };
        Self(Measure::ALL.into_iter().filter(selected).collect())
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn is_all(&self) -> bool {
        self.0.len() == Measure::ALL.len()
    }

    /// The measures that need no host programs.
    fn without_host_tools() -> Self {
        let without_host_tools = Measure::ALL.into_iter().filter(|kind| !kind.has_tools());
        Self(without_host_tools.collect())
    }

    fn has(&self, kind: Measure) -> bool {
        self.0.contains(&kind)
    }
}

/// Sides of the comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Comparison {
    /// Stock kernel, unmodified guest.
    Stock,
    /// Stock kernel, with the receive buffers of viola-agent in the guest.
    Buffers,
    /// The papers' 30 ms slices.
    Credit,
    /// Stock kernel with the placement of turbo: the first vCPUs on one core, the others on the other. Each vCPU has
    /// its own cgroup, as with libvirt. viola-agent runs in the guest, as for turbo.
    Pinned,
    /// viola, with viola-agent in the guest.
    Turbo,
    /// No neighbours, and the guest's fair share of the core: the upper bound for any scheduler.
    Alone,
}

impl Comparison {
    /// All sides, in the order of the first round and of tables.
    const ALL: [Self; 6] = [
        Self::Stock,
        Self::Buffers,
        Self::Credit,
        Self::Pinned,
        Self::Turbo,
        Self::Alone,
    ];
    /// The sides of a quick run.
    const QUICK_SIDES: [Self; 3] = [Self::Stock, Self::Credit, Self::Turbo];

    /// Name in tables.
    const fn name(self) -> &'static str {
        match self {
            Self::Stock => "stock",
            Self::Buffers => "stock, buffers",
            Self::Credit => "30 ms slices",
            Self::Pinned => "pinned",
            Self::Turbo => "turbo",
            Self::Alone => "alone, a quarter",
        }
    }

    /// Whether viola-agent runs in the guest.
    fn has_agent(self) -> bool {
        matches!(self, Self::Pinned | Self::Turbo)
    }

    /// Whether the guest has only the agent's buffers.
    fn has_buffers(self) -> bool {
        matches!(self, Self::Buffers | Self::Alone)
    }
}

/// Runs the benchmark, prints the table and writes the result.
pub fn run(wanted: &GuestOptions) -> Outcome {
    let options = &wanted.options;
    let measures = Measures::of(options.only.as_deref());
    if measures.is_empty() {
        return Err(Failure::usage(format!(
            "no measure contains the pattern of --only; try {}",
            Measure::ALL.map(Measure::name).join(", ")
        )));
    }
    guests::split_cores(options.core)?;
    let rounds = options.rounds();
    let times = Times::of(options.quick);
    let kind = wanted.guests.kind()?;
    let place = (options.core, kind);
    let (found, kernel) = measure(place, &Comparison::ALL, times, &measures, rounds)?;
    let results = Results::new(rounds, &kernel, found.rows());
    let is_full = !options.quick && rounds >= 5 && measures.is_all();
    results.publish(&kind.result("turbo"), &wanted.path("turbo", kind, is_full))
}

/// One short round of all figures, for the demo. Returns nothing for emulated guests, which are too slow for it, and nothing if
/// User Mode Linux's kernel for several vCPUs is not built, because the build takes minutes.
pub fn quick_round(core: usize, kind: GuestKind) -> Outcome<Vec<row::Row>> {
    let has_kernel = || viola_lab::Paths::find().and_then(|paths| paths.kernel(2));
    let is_possible = match kind {
        GuestKind::Kvm => true,
        GuestKind::Uml => has_kernel().is_ok(),
        GuestKind::Emulated => false,
    };
    if !is_possible {
        return Ok(Vec::new());
    }
    let found = measure(
        (core, kind),
        &Comparison::QUICK_SIDES,
        Times::of(true),
        &Measures::without_host_tools(),
        1,
    )?;
    Ok(found.0.rows())
}

/// Measures all sides, in a different order each round. Returns the readings and the guest kernel.
fn measure(
    (core, kind): (usize, GuestKind),
    settings: &[Comparison],
    times: Times,
    measures: &Measures,
    rounds: usize,
) -> Outcome<(rows::Measurements, String)> {
    let cell = times.cell(measures);
    let total_time = (BOOT_TIME + (SWITCH_TIME + cell) * settings.len() as u32) * rounds as u32;
    let mut progress = Progress::new(total_time);
    progress.announce("turbo", rounds);
    let mut found = rows::Measurements::default();
    let mut kernel = String::new();
    for round in 0..rounds {
        progress.step(&format!("round {} of {rounds}: boot", round + 1), BOOT_TIME);
        let mut bed = TestBed::boot(core, kind, &times, measures)?;
        if kernel.is_empty() {
            kernel = bed.kernel()?;
        }
        let mut order = settings.to_vec();
        let first = round % order.len();
        order.rotate_left(first);
        for side in order {
            interrupt::check()?;
            let label = format!("round {} of {rounds}: turbo, {}", round + 1, side.name());
            progress.step(&label, SWITCH_TIME + cell);
            let reading: Reading = bed.measure(side, &times, measures, 1 + round as u64)?;
            found.add(side, reading);
        }
        bed.down()?;
    }
    Ok((found, kernel))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_chosen_by_words_in_their_names() {
        assert!(Measures::of(None).is_all());
        assert_eq!(Measures::of(Some("udp, disk read")).0.len(), 4);
        assert_eq!(Measures::of(Some("UDP at 20,000")).0, [Measure::Udp(1)]);
        assert_eq!(
            Measures::of(Some("nfs")).0,
            [Measure::NfsWrite, Measure::NfsRead]
        );
        assert!(Measures::of(Some("ftp")).is_empty());
    }
}
