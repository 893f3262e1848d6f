// SPDX-License-Identifier: Apache-2.0
//! What `bench papers` measures: which experiment with which guests, in which order, and how long it takes.

use std::time::Duration;

use crate::harness::side::Side;

/// viola's microslice, in microseconds.
pub const MICROSLICE: u32 = 300;
/// Lines of the multi-line VoIP test.
pub const LINES: u32 = 40;
/// Connections a second that vSlicer sustains in figure 2.14.
pub const RATE: u32 = 180;
/// MPI's calls that are measured, as the Intel MPI Benchmarks name them, each with sizes of its messages in bytes. (An `Alltoall` of
/// 1 MiB takes 10 s under 30 ms slices.)
pub const CALLS: [(&str, &[u32]); 2] = [
    ("Alltoall", &[1 << 10, 64 << 10]),
    ("Sendrecv", &[1 << 10, 64 << 10, 1 << 20]),
];

/// All sides, in the order of the first round and of tables: the paper's baseline first.
pub const SIDES: [Side; 3] = [Side::Credit, Side::Stock, Side::Viola(MICROSLICE)];
/// Name of viola's side in rows.
pub const VIOLA: &str = "viola";
/// Name of the paper's baseline in rows.
pub const CREDIT: &str = "30 ms slices";

/// A side as rows name it.
pub fn side_name(side: Side) -> String {
    match side {
        Side::Viola(_) => VIOLA.into(),
        other => other.name(),
    }
}

/// Which guests share the core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Setup {
    /// All of them; the first one is asked.
    pub vms: usize,
    /// Latency-sensitive ones: the first ones.
    pub ls: usize,
    /// Percent of the time that all but the first work (but MPI's ranks); that one always has work of its own.
    pub duty: u32,
}

impl Setup {
    /// As rows name it.
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
    /// Round trips.
    Ping,
    /// A stream of 1 Mbit/s in datagrams of 256 bytes.
    JitterSmall,
    /// The same in datagrams of 1470 bytes, as iperf sends it.
    JitterLarge,
    /// A TCP stream to the guest.
    TcpLan,
    /// The same, with 30 ms more on its way.
    TcpWan,
    /// Connections that come at the rate which vSlicer sustains.
    Apache,
    /// As many connections as 64 clients make.
    ApacheMost,
    /// A call.
    Call,
    /// Many of them.
    Lines,
    /// A film.
    Film,
    /// The Intel MPI Benchmarks, each LSVM a rank.
    Mpi,
    /// Memory throughput of a guest that is not latency-sensitive.
    StreamBatch,
    /// Memory throughput of the latency-sensitive guest.
    StreamLs,
}

/// A figure's name and unit.
pub type Figure = (&'static str, &'static str);

impl Experiment {
    /// All, in the paper's order.
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

    /// What it finds, in the order in which it is measured.
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

    /// With which guests it is made: those of the paper, each with others that are busy all or part of the time.
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

    /// About how long it takes on one side.
    pub fn time(self, quick: bool) -> Duration {
        let ms = match self {
            Self::Ping => times(quick).ping + 500,
            Self::JitterSmall | Self::JitterLarge => times(quick).jitter + 1300,
            Self::TcpLan => times(quick).lan + 300,
            Self::TcpWan => times(quick).wan + 500,
            Self::Apache | Self::ApacheMost => times(quick).apache + 700,
            Self::Call | Self::Lines => times(quick).call + 1700,
            Self::Film => times(quick).film + 3000,
            // the mean of all sides: half a minute with 30 ms slices
            Self::Mpi if quick => 14_000,
            Self::Mpi => 16_000,
            Self::StreamBatch | Self::StreamLs => 4 * (times(quick).stream + 400),
        };
        Duration::from_millis(ms)
    }
}

/// How long each experiment is, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// Pings.
    pub ping: u64,
    /// UDP streams.
    pub jitter: u64,
    /// TCP streams on the LAN.
    pub lan: u64,
    /// TCP streams over a longer way, which begin slowly.
    pub wan: u64,
    /// Connections.
    pub apache: u64,
    /// Calls.
    pub call: u64,
    /// Films.
    pub film: u64,
    /// Each kernel of STREAM.
    pub stream: u64,
}

/// How often each of MPI's calls is timed: less often where each takes many turns of 30 ms.
pub fn calls(side: Side, quick: bool) -> u32 {
    match (side, quick) {
        (Side::Credit, _) => 2,
        (_, true) => 10,
        (_, false) => 20,
    }
}

/// Those of a whole run, or of a look.
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

/// Time to switch from one side, or one set of guests' classes, to the next.
pub const SWITCH_TIME: Duration = Duration::from_millis(900);
/// Time to boot a lab with its servers and take it down.
pub const BOOT_TIME: Duration = Duration::from_secs(5);

/// An experiment with its guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cell {
    /// With which guests.
    pub setup: Setup,
    /// What.
    pub part: Experiment,
}

impl Cell {
    /// All, in the paper's order.
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

    /// Those of which a row has one of the patterns in its name.
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

/// Numbers of guests of these cells, each a lab of its own.
pub fn labs(cells: &[Cell]) -> Vec<usize> {
    let mut labs: Vec<usize> = cells.iter().map(|cell| cell.setup.vms).collect();
    labs.sort_unstable();
    labs.dedup();
    labs
}

/// Numbers of latency-sensitive guests in a lab.
pub fn classes(cells: &[Cell], vms: usize) -> Vec<usize> {
    let of = cells.iter().filter(|cell| cell.setup.vms == vms);
    let mut ls: Vec<usize> = of.map(|cell| cell.setup.ls).collect();
    ls.sort_unstable();
    ls.dedup();
    ls
}

/// How long a round takes.
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
    fn rows_have_names_of_their_own() {
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
        let told: Vec<&str> = Experiment::Mpi.figures().iter().map(|f| f.0).collect();
        assert_eq!(CALLS.map(of).concat(), told);
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
