// SPDX-License-Identifier: Apache-2.0
//! Plan of `bench papers`: the experiments, their guests, their order and duration.

use std::time::Duration;

use crate::harness::side::Side;

/// viola's microslice, in microseconds.
pub const MICROSLICE: u32 = 300;
/// Lines of the VoIP test with several lines.
pub const LINES: u32 = 40;
/// Connections per second that vSlicer sustains in figure 2.14.
pub const RATE: u32 = 180;
/// Measured MPI calls, by their name in the Intel MPI Benchmarks, each with its message sizes in bytes. (An `Alltoall`
/// of 1 MiB takes 10 s under 30 ms slices.)
pub const CALLS: [(&str, &[u32]); 2] = [
    ("Alltoall", &[1 << 10, 64 << 10]),
    ("Sendrecv", &[1 << 10, 64 << 10, 1 << 20]),
];

/// All sides in the order of the first round and of tables; the paper's baseline comes first.
pub const SIDES: [Side; 3] = [Side::Credit, Side::Stock, Side::Viola(MICROSLICE)];
/// Name of viola's side in rows.
pub const VIOLA: &str = "viola";
/// Name of the paper's baseline in rows.
pub const CREDIT: &str = "30 ms slices";

/// Name of a side in rows.
pub fn side_name(side: Side) -> String {
    match side {
        Side::Viola(_) => VIOLA.into(),
        other => other.name(),
    }
}

/// Guests that share the core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Setup {
    /// Number of guests; the first one is the server under test.
    pub vms: usize,
    /// Number of latency-sensitive guests, which come first.
    pub ls: usize,
    /// Duty cycle, in percent, of all guests but the first and MPI's ranks. The first guest always has its own work.
    pub duty: u32,
}

impl Setup {
    /// Name in rows.
    pub fn name(self) -> String {
        let ls = match self.ls {
            1 => "1 LSVM".to_owned(),
            ls => format!("{ls} LSVMs"),
        };
        format!("{} VMs, {ls}, others {} %", self.vms, self.duty)
    }
}

/// An experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Experiment {
    /// Ping round trips.
    Ping,
    /// UDP stream of 1 Mbit/s in datagrams of 256 bytes.
    JitterSmall,
    /// The same in datagrams of 1470 bytes, as iperf sends them.
    JitterLarge,
    /// A TCP stream to the guest.
    TcpLan,
    /// The same with 30 ms of extra delay.
    TcpWan,
    /// Connections at the rate that vSlicer sustains.
    Apache,
    /// As many connections as 64 clients can make.
    ApacheMost,
    /// One VoIP call.
    Call,
    /// Many VoIP calls.
    Lines,
    /// A streamed film.
    Film,
    /// The Intel MPI Benchmarks; each LSVM is a rank.
    Mpi,
    /// Memory throughput of a batch guest.
    StreamBatch,
    /// Memory throughput of the latency-sensitive guest.
    StreamLs,
}

/// Name and unit of a figure.
pub type Figure = (&'static str, &'static str);

impl Experiment {
    /// All experiments, in the paper's order.
    pub const ALL: [Self; 13] = [
        Self::Ping,
        Self::JitterSmall,
        Self::JitterLarge,
        Self::TcpLan,
        Self::TcpWan,
        Self::StreamBatch,
        Self::StreamLs,
        Self::Apache,
        Self::ApacheMost,
        Self::Mpi,
        Self::Call,
        Self::Lines,
        Self::Film,
    ];

    /// Figures of the experiment, in the order of measurement.
    pub fn figures(self) -> &'static [Figure] {
        match self {
            Self::Ping => &[("ping mean", "ms"), ("ping p99", "ms")],
            Self::JitterSmall => &[("UDP jitter, 256 bytes", "ms")],
            Self::JitterLarge => &[("UDP jitter, 1470 bytes", "ms")],
            Self::TcpLan => &[("TCP on the LAN", "MB/s")],
            Self::TcpWan => &[("TCP, 30 ms away", "MB/s")],
            Self::Apache => &[
                ("Apache, answers to 180 connections/s", "1/s"),
                ("Apache, connection time", "ms"),
                ("Apache, response time", "ms"),
            ],
            Self::ApacheMost => &[("Apache, most connections", "1/s")],
            Self::Call => &[
                ("VoIP, one line, upstream jitter", "ms"),
                ("VoIP, one line, downstream jitter", "ms"),
                ("VoIP, one line, packets discarded", "%"),
            ],
            Self::Lines => &[
                ("VoIP, 40 lines, upstream jitter", "ms"),
                ("VoIP, 40 lines, upstream loss", "%"),
                ("VoIP, 40 lines, downstream loss", "%"),
                ("VoIP, 40 lines, packets discarded", "%"),
            ],
            Self::Film => &[
                ("streaming, video jitter", "ms"),
                ("streaming, audio jitter", "ms"),
                ("streaming, frames late", "%"),
                ("streaming, trip time", "ms"),
                ("streaming, SETUP", "ms"),
                ("streaming, DESCRIBE", "ms"),
                ("streaming, PLAY", "ms"),
            ],
            Self::Mpi => &[
                ("MPI Alltoall, 1 KiB", "ms"),
                ("MPI Alltoall, 64 KiB", "ms"),
                ("MPI Sendrecv, 1 KiB", "ms"),
                ("MPI Sendrecv, 64 KiB", "ms"),
                ("MPI Sendrecv, 1 MiB", "ms"),
            ],
            Self::StreamBatch => &[
                ("STREAM copy in a batch VM", "MB/s"),
                ("STREAM scale in a batch VM", "MB/s"),
                ("STREAM add in a batch VM", "MB/s"),
                ("STREAM triad in a batch VM", "MB/s"),
            ],
            Self::StreamLs => &[
                ("STREAM copy in the LSVM", "MB/s"),
                ("STREAM scale in the LSVM", "MB/s"),
                ("STREAM add in the LSVM", "MB/s"),
                ("STREAM triad in the LSVM", "MB/s"),
            ],
        }
    }

    /// Setups of the experiment: the paper's guests, with the others busy all or part of the time.
    pub fn setups(self) -> Vec<Setup> {
        let (vms, ls, duties): (&[usize], &[usize], &[u32]) = match self {
            Self::Ping => (&[3, 4, 5], &[1, 2], &[100, 40]),
            Self::JitterSmall | Self::JitterLarge | Self::TcpLan | Self::TcpWan => {
                (&[3, 4, 5], &[1], &[100, 40])
            }
            Self::Apache | Self::ApacheMost | Self::Call | Self::Lines | Self::Film => {
                (&[4], &[2], &[100, 40])
            }
            Self::Mpi => (&[6], &[4], &[100]),
            Self::StreamBatch | Self::StreamLs => (&[4], &[2], &[100]),
        };
        let mut setups = Vec::new();
        for &vms in vms {
            for &ls in ls {
                setups.extend(duties.iter().map(|&duty| Setup { vms, ls, duty }));
            }
        }
        setups
    }

    /// Approximate duration on one side.
    pub fn time(self, quick: bool) -> Duration {
        let ms = match self {
            Self::Ping => times(quick).ping + 500,
            Self::JitterSmall | Self::JitterLarge => times(quick).jitter + 1300,
            Self::TcpLan => times(quick).lan + 300,
            Self::TcpWan => times(quick).wan + 500,
            Self::Apache | Self::ApacheMost => times(quick).apache + 700,
            Self::Call | Self::Lines => times(quick).call + 1700,
            Self::Film => times(quick).film + 3000,
            // Mean of all sides; 30 ms slices take half a minute.
            Self::Mpi if quick => 14_000,
            Self::Mpi => 16_000,
            Self::StreamBatch | Self::StreamLs => 4 * (times(quick).stream + 400),
        };
        Duration::from_millis(ms)
    }
}

/// Durations of the experiments, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// Pings.
    pub ping: u64,
    /// UDP streams.
    pub jitter: u64,
    /// TCP streams on the LAN.
    pub lan: u64,
    /// TCP streams over the long line, which start slowly.
    pub wan: u64,
    /// Apache connections.
    pub apache: u64,
    /// VoIP calls.
    pub call: u64,
    /// Films.
    pub film: u64,
    /// Each STREAM kernel.
    pub stream: u64,
}

/// Number of timed repetitions of each MPI call; fewer where a call takes many turns of 30 ms.
pub fn calls(side: Side, quick: bool) -> u32 {
    match (side, quick) {
        (Side::Credit, _) => 2,
        (_, true) => 10,
        (_, false) => 20,
    }
}

/// Durations of a full or a quick run.
pub fn times(quick: bool) -> Times {
    match quick {
        false => Times {
            ping: 1500,
            jitter: 2000,
            lan: 1200,
            wan: 4000,
            apache: 3000,
            call: 4500,
            film: 5000,
            stream: 800,
        },
        true => Times {
            ping: 1000,
            jitter: 1500,
            lan: 1000,
            wan: 2500,
            apache: 2000,
            call: 3000,
            film: 3000,
            stream: 600,
        },
    }
}

/// Time to switch between sides or between sets of latency-sensitive guests.
pub const SWITCH_TIME: Duration = Duration::from_millis(900);
/// Time to boot a lab with its servers and shut it down.
pub const BOOT_TIME: Duration = Duration::from_secs(5);

/// An experiment with its setup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cell {
    /// The guests.
    pub setup: Setup,
    /// The experiment.
    pub part: Experiment,
}

impl Cell {
    /// All cells, in the paper's order.
    pub fn all() -> Vec<Self> {
        let cells = Experiment::ALL.into_iter().flat_map(|part| {
            let setups = part.setups().into_iter();
            setups.map(move |setup| Self { setup, part })
        });
        cells.collect()
    }

    /// Names of its rows, with their units.
    pub fn rows(self) -> impl Iterator<Item = (String, Figure)> {
        let figures = self.part.figures().iter();
        figures.map(move |figure| (format!("{}, {}", figure.0, self.setup.name()), *figure))
    }

    /// Cells with a row whose name contains one of the patterns.
    pub fn of(patterns: Option<&[&str]>) -> Vec<Self> {
        let has = |cell: &Self| {
            let any = |patterns: &[&str]| {
                let of = |name: String| {
                    let name = name.to_lowercase();
                    patterns.iter().any(|p| name.contains(&p.to_lowercase()))
                };
                cell.rows().any(|(name, _)| of(name))
            };
            patterns.is_none_or(any)
        };
        Self::all().into_iter().filter(has).collect()
    }
}

/// Guest counts of these cells; each needs its own lab.
pub fn labs(cells: &[Cell]) -> Vec<usize> {
    let mut labs: Vec<usize> = cells.iter().map(|cell| cell.setup.vms).collect();
    labs.sort_unstable();
    labs.dedup();
    labs
}

/// Counts of latency-sensitive guests in a lab.
pub fn classes(cells: &[Cell], vms: usize) -> Vec<usize> {
    let of = cells.iter().filter(|cell| cell.setup.vms == vms);
    let mut ls: Vec<usize> = of.map(|cell| cell.setup.ls).collect();
    ls.sort_unstable();
    ls.dedup();
    ls
}

/// Duration of a round.
pub fn round(cells: &[Cell], quick: bool) -> Duration {
    let sides = SIDES.len() as u32;
    let mut time: Duration = cells.iter().map(|c| c.part.time(quick) * sides).sum();
    for vms in labs(cells) {
        time += BOOT_TIME + SWITCH_TIME * sides * classes(cells, vms).len() as u32;
    }
    time
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_run_takes_some_forty_minutes() {
        let minutes = round(&Cell::all(), false).as_secs_f64() * 5.0 / 60.0;
        assert!((25.0..50.0).contains(&minutes), "{minutes}");
    }

    #[test]
    fn row_names_are_unique() {
        let mut names: Vec<String> = Cell::all()
            .iter()
            .flat_map(|c| c.rows())
            .map(|r| r.0)
            .collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(names.contains(&"ping mean, 4 VMs, 1 LSVM, others 40 %".to_owned()));
        let lines = format!("VoIP, {LINES} lines");
        assert!(
            Experiment::Lines
                .figures()
                .iter()
                .all(|f| f.0.starts_with(&lines))
        );
        assert!(
            Experiment::Apache.figures()[0]
                .0
                .contains(&RATE.to_string())
        );
        let size = |bytes: u32| match bytes >> 20 {
            0 => format!("{} KiB", bytes >> 10),
            mib => format!("{mib} MiB"),
        };
        let of = |(call, sizes): (&str, &[u32])| {
            let name = |bytes: &u32| format!("MPI {call}, {}", size(*bytes));
            sizes.iter().map(name).collect::<Vec<_>>()
        };
        let figure_names: Vec<&str> = Experiment::Mpi.figures().iter().map(|f| f.0).collect();
        assert_eq!(CALLS.map(of).concat(), figure_names);
    }

    #[test]
    fn cells_are_chosen_by_words_in_their_rows_names() {
        assert_eq!(Cell::of(None), Cell::all());
        let one = Cell::of(Some(&["ping mean, 5 VMs, 2 LSVMs, others 40"]));
        assert_eq!(one.len(), 1);
        assert_eq!(Cell::of(Some(&["stream copy", "PLAY"])).len(), 4);
        assert!(Cell::of(Some(&["ftp"])).is_empty());
        assert_eq!((labs(&one), classes(&one, 5)), (vec![5], vec![2]));
    }
}
