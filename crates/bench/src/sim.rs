// SPDX-License-Identifier: Apache-2.0
//! `viola-lab bench sim`: measures the speed of the simulator for one host by events, and for fleets of 100, 1,000 and
//! 10,000 hosts by the fluid model.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

use crate::Options;
use crate::harness::progress::Progress;
use crate::harness::result::Results;
use crate::harness::row::{Goal, Row};
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;

/// Host for the event simulation: 64 VMs on 16 cores.
const HOST: &str = "crates/sim/scenarios/host64.toml";
/// Simulated time of [`HOST`], s. A test compares it with the file.
const HOST_SECONDS: f64 = 600.0;
/// Fleet sizes in hosts; each host has 64 VMs and is simulated for ten minutes.
const FLEETS: [usize; 3] = [100, 1000, 10_000];

/// Warm-up time of a core before a measurement.
const WARM_UP: Duration = Duration::from_secs(2);

/// Cost of one run.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cost {
    /// Wall-clock time, s.
    wall: f64,
    /// CPU time on all cores, s.
    cpu: f64,
    /// Peak memory, MiB.
    mib: f64,
    /// Clock of the core just before the run, GHz.
    ghz: f64,
}

/// A cell: the host or a fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cell {
    Host,
    Fleet(usize),
}

impl Cell {
    fn all() -> impl Iterator<Item = Self> {
        std::iter::once(Self::Host).chain(FLEETS.map(Self::Fleet))
    }

    fn name(self) -> String {
        match self {
            Self::Host => "one host by events".to_owned(),
            Self::Fleet(hosts) => format!("{hosts} hosts"),
        }
    }

    /// Approximate duration.
    fn time(self) -> Duration {
        match self {
            Self::Host => WARM_UP + Duration::from_secs(1),
            Self::Fleet(hosts) => Duration::from_millis(4 * hosts as u64),
        }
    }
}

/// Runs the benchmark, prints the table and writes the result.
pub fn run(options: &Options) -> Outcome {
    let rounds = options.rounds();
    let selected = |cell: &Cell| {
        let only = options.only.as_deref();
        only.is_none_or(|only| cell.name().contains(only))
    };
    let cells: Vec<Cell> = Cell::all().filter(selected).collect();
    if cells.is_empty() {
        let what = "no cell name contains the pattern of --only; try `one host` or `100 hosts`";
        return Err(Failure::usage(what));
    }
    let total_time = cells.iter().map(|c| c.time()).sum::<Duration>() * rounds as u32;
    let mut progress = Progress::new(total_time);
    progress.announce("sim", rounds);
    let mut found = Vec::new();
    for round in 0..rounds {
        let mut order = cells.clone();
        order.rotate_left(round % cells.len());
        for cell in order {
            interrupt::check()?;
            let label = format!("round {} of {rounds}: {}", round + 1, cell.name());
            progress.step(&label, cell.time());
            found.push((cell, measure(cell)?));
        }
    }
    drop(progress);
    let rows = rows(&found);
    let is_full = rounds >= 5 && options.only.is_none() && !options.quick;
    let path = options.path("sim", is_full);
    let results = Results::new(rounds, "none: simulated ones", rows);
    results.publish("sim", &path)
}

fn measure(cell: Cell) -> Outcome<Cost> {
    let own = crate::harness::program::viola()?;
    let mut command = Command::new(own);
    match cell {
        Cell::Host => command.args(["sim", "run", "--json", HOST]),
        Cell::Fleet(hosts) => command
            .args(["sim", "fleet", "--json", "--hosts"])
            .arg(hosts.to_string()),
    };
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let cost = match cell {
        Cell::Host => run_on_warm_core(|| cost(&mut command)),
        Cell::Fleet(_) => cost(&mut command),
    };
    cost.map_err(|e| Failure::run(format!("{}: {e}", cell.name())))
}

/// Pins this process and its children to one core and warms the core up: an idle core needs time to reach its full
/// clock.
fn run_on_warm_core<T>(run: impl FnOnce() -> std::io::Result<T>) -> std::io::Result<T> {
    let all = sched_getaffinity(None)?;
    let mut one = CpuSet::new();
    one.set(sched_getcpu());
    sched_setaffinity(None, &one)?;
    let begin = Instant::now();
    while begin.elapsed() < WARM_UP {
        clock_ghz();
    }
    let result = run();
    sched_setaffinity(None, &all)?;
    result
}

/// Runs a program to its end and measures its cost.
fn cost(command: &mut Command) -> std::io::Result<Cost> {
    let begin = Instant::now();
    // wait4() below waits for the child and returns its resource use.
    #[allow(clippy::zombie_processes)]
    let child = command.spawn()?;
    let mut status = 0;
    // SAFETY: all fields are integers, for which zero is valid.
    let mut used: libc::rusage = unsafe { std::mem::zeroed() };
    loop {
        // SAFETY: nothing else waits for this child; both pointers are valid for writes.
        let pid =
            unsafe { libc::wait4(child.id().cast_signed(), &raw mut status, 0, &raw mut used) };
        let e = std::io::Error::last_os_error();
        match pid {
            -1 if e.kind() == std::io::ErrorKind::Interrupted => {}
            -1 => return Err(e),
            _ => break,
        }
    }
    let wall = begin.elapsed().as_secs_f64();
    let ghz = clock_ghz();
    if status != 0 {
        return Err(std::io::Error::other(format!(
            "ended with status {status:#x}"
        )));
    }
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    Ok(Cost {
        wall,
        cpu: seconds(used.ru_utime) + seconds(used.ru_stime),
        mib: used.ru_maxrss as f64 / 1024.0,
        ghz,
    })
}

/// Measures the clock of a core with a chain of dependent additions of one cycle each. The clock of a shared machine
/// varies. The best of three samples counts, because other programs only slow it down.
fn clock_ghz() -> f64 {
    const CYCLES: u32 = 20_000_000;
    let sample_ghz = || {
        let begin = Instant::now();
        let mut sum = 0_u64;
        for _ in 0..CYCLES / 8 {
            // SAFETY: the code changes only this register and the flags; the compiler knows both.
            #[cfg(target_arch = "x86_64")]
            unsafe {
                std::arch::asm!(
                    "add {0}, 1", "add {0}, 1", "add {0}, 1", "add {0}, 1",
                    "add {0}, 1", "add {0}, 1", "add {0}, 1", "add {0}, 1",
                    inout(reg) sum, options(nomem, nostack)
                );
            }
            #[cfg(not(target_arch = "x86_64"))]
            {
                sum = std::hint::black_box(sum) + 8;
            }
        }
        let seconds = begin.elapsed().as_secs_f64();
        (std::hint::black_box(sum) as f64) / seconds / 1e9
    };
    (0..3).map(|_| sample_ghz()).fold(0.0, f64::max)
}

fn rows(found: &[(Cell, Cost)]) -> Vec<Row> {
    let of = |cell: Cell, value: fn(&Cost) -> f64| {
        let costs = found.iter().filter(move |(c, _)| *c == cell);
        costs.map(move |(_, cost)| value(cost))
    };
    let host = Row::new("one host, 64 VMs on 16 cores, 10 minutes", "s")
        .side("clock", of(Cell::Host, |c| c.wall))
        .side("CPU", of(Cell::Host, |c| c.cpu))
        // One thousand times real time on one core.
        .goal(Goal::FigureAtMost(HOST_SECONDS / 1000.0), "CPU");
    let cycles = Row::new("the same in cycles of a core", "G")
        .side("CPU", of(Cell::Host, |c| c.cpu * c.ghz));
    let ghz = Row::new("clock of a core then, by additions", "GHz")
        .side("CPU", of(Cell::Host, |c| c.ghz));
    let mut rows = vec![host, cycles, ghz];
    for hosts in FLEETS {
        let row = Row::new(format!("{hosts} hosts with 64 VMs each, 10 minutes"), "s")
            .side("clock", of(Cell::Fleet(hosts), |c| c.wall))
            .side("CPU", of(Cell::Fleet(hosts), |c| c.cpu));
        rows.push(match hosts {
            10_000 => row.goal(Goal::FigureAtMost(900.0), "clock"),
            _ => row,
        });
    }
    let [few, _, many] = FLEETS;
    // A host in a large fleet costs as much as in a small one, apart from the start-up cost.
    let mut each = Row::new("CPU time of a host, 10,000 against 100", "ms");
    for hosts in FLEETS {
        let costs = of(Cell::Fleet(hosts), |c| c.cpu);
        each = each.side(hosts.to_string(), costs.map(|s| s * 1e3 / hosts as f64));
    }
    let (few, many) = (few.to_string(), many.to_string());
    rows.push(each.against(&many, &few).goal(Goal::AtMost(1.15), &many));
    rows.push(
        Row::new("memory of 10,000 hosts", "MiB")
            .side("peak", of(Cell::Fleet(10_000), |c| c.mib))
            .goal(Goal::FigureAtMost(2048.0), "peak"),
    );
    rows.retain(Row::is_measured);
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_simulated_for_as_long_as_its_goal_says() {
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../..")
            .join(HOST);
        let text = std::fs::read_to_string(file).unwrap();
        assert!(
            text.contains(&format!("\nseconds = {HOST_SECONDS:.1}\n")),
            "{text}"
        );
    }

    #[test]
    fn cost_covers_one_program_and_its_failure_is_an_error() {
        let shell_cost = |script: &str| cost(Command::new("sh").args(["-c", script]));
        let cost =
            shell_cost("n=0; while [ $n -lt 20000 ]; do n=$((n + 1)); done; sleep 0.1").unwrap();
        assert!(
            cost.wall > 0.1 && cost.cpu > 0.0 && cost.mib > 0.1,
            "{cost:?}"
        );
        assert!((0.3..8.0).contains(&cost.ghz), "{cost:?}");
        assert!(
            shell_cost("exit 3")
                .unwrap_err()
                .to_string()
                .contains("0x300")
        );
    }

    #[test]
    fn goals_are_judged_on_time_growth_and_memory() {
        let cost = |wall, cpu, mib| Cost {
            wall,
            cpu,
            mib,
            ghz: 3.0,
        };
        let found = [
            (Cell::Host, cost(0.7, 0.5, 10.0)),
            (Cell::Fleet(100), cost(0.3, 0.5, 20.0)),
            (Cell::Fleet(1000), cost(3.0, 5.0, 40.0)),
            (Cell::Fleet(10_000), cost(30.0, 60.0, 300.0)),
        ];
        let rows = rows(&found);
        let met: Vec<_> = rows.iter().map(|r| r.met).collect();
        let yes = Some(true);
        let of_the_host = [yes, None, None];
        assert_eq!(met[..3], of_the_host);
        assert_eq!(met[3..], [None, None, yes, Some(false), yes]);
        assert!((rows[1].median("CPU").unwrap() - 1.5).abs() < 1e-9);
        assert!((rows[6].ratio.unwrap() - 1.2).abs() < 1e-9);
        assert_eq!(super::rows(&found[..1]).len(), 3);
    }
}
