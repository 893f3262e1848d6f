// SPDX-License-Identifier: Apache-2.0
//! `viola-lab bench scx`: measures how long one of four VMs waits for its core after a request under sched_ext, slots,
//! EEVDF slices and stock scheduling, and the CPU share of each VM. It repeats this with turbo vCPUs, and measures the
//! CPU time left to the VMs beside a busy host program. scx_lavd and scx_bpfland, which schedule the whole host, take
//! part if scripts/other-schedulers.sh has built them.
//!
//! This needs a kernel with sched_ext, so the host is a QEMU guest and its VMs are processes ([`stand`]). Its clock
//! counts instructions, 8 ns each, so other load on this machine does not matter. Each scheduling decision costs its
//! instructions.

mod stand;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use viola_lab::qemu::{Image, Program, QemuVm, VmSpec};

use crate::Options;
use crate::harness::folder::Folder;
use crate::harness::progress::Progress;
use crate::harness::result::Results;
use crate::harness::row::{Goal, Row};
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;

pub use stand::stand;

const STOCK: &str = "stock";
const EEVDF: &str = "eevdf";
const SLOTS: &str = "slots";
const SCHED_EXT: &str = "sched_ext";
const LAVD: &str = "scx_lavd";
const BPFLAND: &str = "scx_bpfland";
const SIDES: [&str; 6] = [STOCK, EEVDF, SLOTS, SCHED_EXT, LAVD, BPFLAND];
/// Sides that support turbo cores, and those that they are compared with.
const TURBO_SIDES: [&str; 3] = [STOCK, SLOTS, SCHED_EXT];

/// Quantity that a cell measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quantity {
    /// Reply time of the first VM, its share, and the share of all VMs.
    Answers,
    /// Distance of the VMs from equal shares of both cores.
    Shares,
    /// Share of all VMs beside a host program.
    Beside,
}

/// The regular core and the turbo core. The emulator runs its CPUs in turn, from the lowest number on: only CPU 1 sees
/// an interrupt from the requester (CPU 0) at once.
const TURBO: &str = "2,1";

struct Cell {
    name: &'static str,
    /// The core, or the regular core and the turbo core.
    cpus: &'static str,
    vms: &'static str,
    what: Quantity,
    sides: &'static [&'static str],
    /// Nanoseconds per instruction, as a power of two.
    shift: u32,
}

/// Slow emulated CPU, 2^3 = 8 ns per instruction. With a faster one a run would take hours.
const MAX_SHIFT: u32 = 3;
/// Faster emulated CPU, 2^1 = 2 ns per instruction, for figures that depend on the cost of a
/// decision.
const FAST: u32 = 1;

const CELLS: [Cell; 8] = [
    Cell {
        name: "LSVM busy",
        cpus: "1",
        vms: "ls:busy batch:spin batch:spin batch:spin",
        what: Quantity::Answers,
        sides: &SIDES,
        shift: MAX_SHIFT,
    },
    Cell {
        name: "LSVM idle",
        cpus: "1",
        vms: "ls:idle batch:spin batch:spin batch:spin",
        what: Quantity::Answers,
        sides: &SIDES,
        shift: MAX_SHIFT,
    },
    Cell {
        name: "turbo",
        cpus: TURBO,
        vms: "turbo:idle turbo:idle turbo:idle turbo:idle",
        what: Quantity::Answers,
        sides: &TURBO_SIDES,
        shift: MAX_SHIFT,
    },
    Cell {
        name: "turbo, others flooded",
        cpus: TURBO,
        vms: "turbo:idle turbo:spin turbo:spin turbo:spin",
        what: Quantity::Answers,
        sides: &TURBO_SIDES,
        shift: MAX_SHIFT,
    },
    // The first VM has interrupts for 15 % of a core.
    Cell {
        name: "turbo, one with interrupts",
        cpus: TURBO,
        vms: "turbo:150 turbo:idle turbo:idle turbo:idle",
        what: Quantity::Shares,
        sides: &[SLOTS, SCHED_EXT],
        shift: MAX_SHIFT,
    },
    Cell {
        name: "a program of the host",
        cpus: "1",
        vms: "batch:spin batch:spin batch:spin batch:spin fair:spin",
        what: Quantity::Beside,
        sides: &SIDES,
        shift: MAX_SHIFT,
    },
    Cell {
        name: "LSVM idle, 2 ns",
        cpus: "1",
        vms: "ls:idle batch:spin batch:spin batch:spin",
        what: Quantity::Answers,
        sides: &TURBO_SIDES,
        shift: FAST,
    },
    Cell {
        name: "turbo, 2 ns",
        cpus: TURBO,
        vms: "turbo:idle turbo:idle turbo:idle turbo:idle",
        what: Quantity::Answers,
        sides: &TURBO_SIDES,
        shift: FAST,
    },
];

const BOOT_TIME: Duration = Duration::from_secs(30);
/// Timeout for a cell, including a busy machine.
const CELL_TIMEOUT: Duration = Duration::from_secs(900);

/// Result of one run of a cell.
struct Reading {
    /// Reply times, µs, NaN if nothing was requested; then each VM's share, percent of a core.
    p50_us: f64,
    p99_us: f64,
    shares: Vec<f64>,
}

impl Reading {
    fn parse(text: &str) -> Option<Self> {
        let value: Value = serde_json::from_str(text.lines().last()?).ok()?;
        let shares = value["shares_percent"].as_array()?;
        // If the scheduler ended, the run measured another one.
        if !value["ended"].as_array()?.is_empty() {
            return None;
        }
        Some(Self {
            p50_us: value["answer_p50_us"].as_f64().unwrap_or(f64::NAN),
            p99_us: value["answer_p99_us"].as_f64().unwrap_or(f64::NAN),
            shares: shares.iter().filter_map(Value::as_f64).collect(),
        })
    }

    /// Share of all VMs together, percent of a core.
    fn all(&self) -> f64 {
        self.shares.iter().sum()
    }

    /// Largest distance of a VM from an equal share, points.
    fn unfair(&self) -> f64 {
        let mean = self.all() / self.shares.len().max(1) as f64;
        let far = self.shares.iter().map(|s| (s - mean).abs());
        far.fold(0.0, f64::max)
    }
}

type Measurements = BTreeMap<(&'static str, &'static str), Vec<Reading>>;

/// Runs the benchmark, prints the table and writes the result.
pub fn run(options: &Options) -> Outcome {
    let rounds = options.rounds();
    // About 90 replies per second. A VM may be ahead of its share on two cores by two accounting periods, 60 ms.
    let seconds = |what: Quantity| match (what, options.quick) {
        (Quantity::Shares, _) => 10,
        (_, true) => 2,
        (Quantity::Answers, false) => 6,
        (Quantity::Beside, false) => 3,
    };
    // The cells at 2 ns take four times as long and only show the origin of a part of the other times, so they run only
    // by name.
    let selected = |cell: &&Cell| match &options.only {
        Some(only) => cell.name.contains(only.as_str()),
        None => cell.shift == MAX_SHIFT,
    };
    let cells: Vec<_> = CELLS.iter().filter(selected).collect();
    if cells.is_empty() {
        return Err(Failure::usage(
            "no cell name contains the pattern of --only; try busy, idle, turbo, host or 2 ns",
        ));
    }
    // One second of the guest takes one to two seconds here at 8 ns per instruction, and proportionally longer with
    // shorter instructions.
    let each = |cell: &Cell| {
        Duration::from_secs(seconds(cell.what) * 2 + 2) * (1 << (MAX_SHIFT - cell.shift))
    };
    let others = others();
    let is_there = |side: &&str| !OTHERS.contains(side) || others.contains_key(*side);
    let sides = |cell: &Cell| -> Vec<&'static str> {
        cell.sides.iter().copied().filter(is_there).collect()
    };
    let of = |cell: &&Cell| each(cell) * sides(cell).len() as u32;
    let total_time = (BOOT_TIME * 2 + cells.iter().map(of).sum::<Duration>()) * rounds as u32;
    let mut progress = Progress::new(total_time);
    progress.announce("scx", rounds);
    let (mut found, mut kernel) = (Measurements::new(), String::new());
    let shifts =
        [MAX_SHIFT, FAST].map(|shift| (shift, cells.iter().filter(move |c| c.shift == shift)));
    let shifts = shifts.map(|(shift, cells)| (shift, cells.copied().collect::<Vec<_>>()));
    let turns = (0..rounds).flat_map(|round| shifts.iter().map(move |(s, c)| (round, *s, c)));
    for (round, shift, cells) in turns.filter(|(.., cells)| !cells.is_empty()) {
        let label = format!("round {} of {rounds}", round + 1);
        progress.step(&format!("{label}: boot"), BOOT_TIME);
        let at = std::env::temp_dir().join(format!("viola-scx-{}", std::process::id()));
        let folder = Folder::new(at)?;
        let (host, program) = boot(&folder.0, options.core, shift, &others)?;
        if kernel.is_empty() {
            kernel = host.sh("uname -r").map_err(failed)?.trim().to_owned();
        }
        let mut one = |cell: &Cell, side: &'static str| -> Outcome {
            interrupt::check()?;
            let name = cell.name;
            progress.step(&format!("{label}: {name}, {side}"), each(cell));
            let words = format!(
                "{} internal stand run {} {} {} {}",
                program.command(),
                mechanism(side),
                cell.cpus,
                seconds(cell.what),
                cell.vms
            );
            let output = host.exec(&words, CELL_TIMEOUT).map_err(failed)?;
            let reading = Reading::parse(&output.stdout).ok_or_else(|| {
                let log_text = format!("{}{}", output.stdout, output.stderr);
                Failure::run(format!("{name}, {side}: {log_text}"))
            })?;
            found.entry((name, side)).or_default().push(reading);
            Ok(())
        };
        // The other schedulers take long to start, so each starts once per round for all cells. The order changes each
        // round.
        let mut turns = vec![None];
        let at_all = |other: &&str| cells.iter().any(|cell| cell.sides.contains(other));
        turns.extend(others.keys().copied().filter(at_all).map(Some));
        let first = round % turns.len();
        turns.rotate_left(first);
        for turn in turns {
            let held = turn.map(|other| OtherScheduler::start(&host, &program, other));
            let held = held.transpose()?;
            for cell in cells {
                let mut order = sides(cell);
                order.retain(|side| others.contains_key(side).then_some(*side) == turn);
                let first = round % order.len().max(1);
                order.rotate_left(first);
                for side in order {
                    one(cell, side)?;
                }
            }
            held.map_or(Ok(()), OtherScheduler::end)?;
        }
    }
    let guests = format!(
        "processes in a QEMU guest with 3 vCPUs, Linux {kernel}, {} ns per instruction if a row says nothing else",
        1 << MAX_SHIFT
    );
    let results = Results::new(rounds, &guests, rows(&found));
    let is_whole = !options.quick && rounds >= 5 && options.only.is_none();
    let path = options.path("scx", is_whole);
    results.publish("scx", &path)
}

/// Name of the mechanism for `stand run`.
fn mechanism(side: &str) -> String {
    match OTHERS.contains(&side) {
        true => format!("/viola/bin/{side}"),
        false => side.to_owned(),
    }
}

/// Another scheduler that is active in the guest.
struct OtherScheduler<'a> {
    host: &'a QemuVm,
}

impl<'a> OtherScheduler<'a> {
    fn start(host: &'a QemuVm, program: &Program, other: &str) -> Outcome<Self> {
        let hold = format!(
            "touch /tmp/held; {} internal stand hold {} /tmp/held </dev/null >/tmp/hold.log 2>&1 & p=$!; \
             until grep -q enabled /sys/kernel/sched_ext/state; do sleep 1; \
             [ -e /proc/$p/exe ] || {{ cat /tmp/hold.log; exit 1; }}; done",
            program.command(),
            mechanism(other)
        );
        let output = host.exec(&hold, CELL_TIMEOUT).map_err(failed)?;
        match output.status {
            0 => Ok(Self { host }),
            _ => Err(Failure::run(format!("{other}: {}", output.stdout))),
        }
    }

    fn end(self) -> Outcome {
        let end =
            "rm /tmp/held; while grep -q enabled /sys/kernel/sched_ext/state; do sleep 0.2; done";
        self.host.sh(end).map_err(failed)?;
        Ok(())
    }
}

fn failed(e: viola_lab::Error) -> Failure {
    Failure::run(e.to_string())
}

const OTHERS: [&str; 2] = [LAVD, BPFLAND];

/// The other schedulers that are built, with their paths.
fn others() -> BTreeMap<&'static str, PathBuf> {
    let built = std::env::var_os("VIOLA_SCHEDULERS_BUILD");
    let built = built.map_or_else(|| PathBuf::from("build/schedulers"), PathBuf::from);
    let of = |name: &'static str| (name, built.join("bin").join(name));
    OTHERS
        .map(of)
        .into_iter()
        .filter(|(_, path)| path.is_file())
        .collect()
}

fn boot(
    folder: &Path,
    core: usize,
    shift: u32,
    others: &BTreeMap<&'static str, PathBuf>,
) -> Outcome<(QemuVm, Program)> {
    let here = std::env::current_dir().ok();
    let me = crate::harness::program::lab()?;
    let starts = here.iter().map(|f| f.as_path()).chain([me.as_path()]);
    let image = Image::find_from(starts, "new").map_err(failed)?;
    let mut beside: Vec<PathBuf> = others.values().cloned().collect();
    beside.push(crate::harness::program::viola()?);
    let program = Program::pack_beside(&me, &beside, folder).map_err(failed)?;
    let mut spec = program.disk(VmSpec::new("scx").cpus(3).memory(768).icount(shift));
    spec.cores = vec![core];
    let host = QemuVm::start(&spec, &image, folder).map_err(failed)?;
    program.unpack(&host).map_err(failed)?;
    // scx_lavd and scx_bpfland need debugfs, and files of /boot that they read as the kernel configuration.
    let prepare = "mount -t debugfs debugfs /sys/kernel/debug && rm -f /boot && mkdir /boot && \
                   cp /lib/modules/$(uname -r)/config /boot/config-$(uname -r)";
    host.sh(prepare).map_err(failed)?;
    Ok((host, program))
}

fn rows(found: &Measurements) -> Vec<Row> {
    let mut rows = Vec::new();
    let side = |row: Row, cell: &'static str, of: &dyn Fn(&Reading) -> f64| {
        SIDES.into_iter().fold(row, |row, side| {
            let readings = found.get(&(cell, side)).into_iter().flatten();
            row.side(side, readings.map(of))
        })
    };
    for Cell {
        name: cell, what, ..
    } in CELLS
    {
        let name = |what: &str| format!("{cell}, {what}");
        let answer = |row: Row, of: &dyn Fn(&Reading) -> f64| {
            side(row, cell, of)
                .against(SCHED_EXT, SLOTS)
                .goal(Goal::AtMost(1.0), SCHED_EXT)
        };
        let all = Row::new(name("all four together"), "%");
        match what {
            Quantity::Answers => {
                rows.push(answer(Row::new(name("answer p50"), "us"), &|r| r.p50_us));
                rows.push(answer(Row::new(name("answer p99"), "us"), &|r| r.p99_us));
                let share = Row::new(name("share of the one that is asked"), "%");
                rows.push(side(share, cell, &|r| {
                    r.shares.first().copied().unwrap_or(0.0)
                }));
                rows.push(side(all, cell, &Reading::all).against(SCHED_EXT, SLOTS));
            }
            Quantity::Shares => {
                let far = Row::new(name("farthest from an equal share"), "points");
                let far = side(far, cell, &Reading::unfair).against(SCHED_EXT, SLOTS);
                rows.push(far.goal(Goal::FigureAtMost(1.0), SCHED_EXT));
                rows.push(side(all, cell, &Reading::all).against(SCHED_EXT, SLOTS));
            }
            // The order of service differs by design, so there is no goal.
            Quantity::Beside => rows.push(side(all, cell, &|r| {
                r.all() - r.shares.last().copied().unwrap_or(0.0)
            })),
        }
    }
    rows.retain(Row::is_measured);
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reading_is_the_last_line_of_a_run_whose_scheduler_survived() {
        let text = "pids 1 2\n{\"answer_p50_us\":1.5,\"answer_p99_us\":2.0,\"shares_percent\":[25.0,75.0],\"ended\":[]}\n";
        let reading = Reading::parse(text).unwrap();
        assert_eq!((reading.p50_us, reading.p99_us), (1.5, 2.0));
        assert_eq!(reading.shares, [25.0, 75.0]);
        assert!(Reading::parse(&text.replace("[]", "[\"why\"]")).is_none());
        assert!(Reading::parse("pids 1 2").is_none());
        let unasked = Reading::parse(&text.replace("1.5", "null")).unwrap();
        assert!(unasked.p50_us.is_nan());
        assert_eq!((reading.all(), reading.unfair()), (100.0, 25.0));
    }

    #[test]
    fn each_cell_has_its_rows_with_sched_ext_against_slots() {
        let mut found = Measurements::new();
        for (side, p50_us) in [(SLOTS, 4.0), (SCHED_EXT, 3.0)] {
            let reading = Reading {
                p50_us,
                p99_us: 9.0,
                shares: vec![25.0; 4],
            };
            found.insert(("LSVM busy", side), vec![reading]);
        }
        let rows = rows(&found);
        assert_eq!(rows.len(), 4);
        assert_eq!((rows[0].ratio, rows[0].met), (Some(0.75), Some(true)));
        assert_eq!(rows[3].median(SCHED_EXT), Some(100.0));
    }
}
