// SPDX-License-Identifier: Apache-2.0
//! `viola-lab bench vread`: measures HDFS reads in guests over TCP and through the host in turn, beside the client's
//! own disk and HDFS on the host itself.

mod apps;
mod bed;
mod caches;
pub(super) mod daemon;
mod disk;
mod paper;
mod remote;
mod rows;
mod usage;
mod work;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use viola_lab::hadoop::JavaStack;

use bed::{Cores, Fixtures, TestBed};
use daemon::Daemon;
use rows::{Measurements, Reading};
use usage::CpuTotals;
pub(super) use usage::busy;
use work::{BLOCK, Phase, SCRATCH, SMALL_FILES, SMALL_FILES_FOLDER, Side, Sizes, Work};

use super::Options;
use crate::harness::cpu::ThreadSampler;
use crate::harness::progress::Progress;
use crate::harness::result::Results;
use crate::harness::side::lab_failure;
use viola_cli::error::{Failure, Outcome};
use viola_cli::table;

/// Folder of the images and of the host's own HDFS.
const FOLDER: &str = "build/bench/vread";
/// Maximum delay of the daemon's counters.
const COUNTER_DELAY: Duration = Duration::from_secs(5);
/// Maximum delay until the daemon reports what a worker served.
const STATUS_INTERVAL: Duration = Duration::from_millis(1500);

/// Options of `viola-lab bench vread`.
#[derive(Debug, Args)]
pub struct Vread {
    #[command(flatten)]
    options: Options,
    /// Do not measure. Print a result file as the book's table "paper | here".
    #[arg(long, value_name = "FILE", conflicts_with_all = ["rounds", "quick", "only", "output"])]
    table: Option<PathBuf>,
}

/// Runs the benchmark, prints the table and writes the result.
pub fn run(vread: &Vread) -> Outcome {
    if let Some(file) = &vread.table {
        return table::print(&paper::table(file)?);
    }
    super::need_root()?;
    let options = &vread.options;
    let cores = cores(options.core)?;
    let sizes = Sizes::new(options.quick);
    let works: Vec<Work> = Work::ALL
        .into_iter()
        .filter(|work| selected(options, &work.name()))
        .collect();
    let remote = remote::works(|name| selected(options, name));
    if works.is_empty() && remote.is_empty() {
        let only = options.only.as_deref().unwrap_or_default();
        return Err(Failure::usage(format!(
            "no work name begins with `{only}`; try sequential, random, delay, 1 MiB, write, append, delete, TestDFSIO, \
             HBase, Spark, hybrid, block device or other host"
        )));
    }
    let rounds = options.rounds();
    let mut plan = plan(&works, rounds, options.quick);
    if !remote.is_empty() {
        plan.push(remote::time(&remote, rounds));
    }
    let total = plan.iter().sum();
    let mut run = Run {
        rounds,
        quick: options.quick,
        sizes,
        sampler: ThreadSampler::new()?,
        progress: Progress::new(total),
    };
    run.progress.announce("vread", rounds);
    // A later failure must not lose earlier measurements.
    let mut rows = Vec::new();
    let mut failed = None;
    if !works.is_empty() {
        let mut found = Measurements::default();
        failed = run.here(&works, cores, &mut found).err();
        rows.extend(found.rows());
    }
    if failed.is_none() && !remote.is_empty() {
        let folder = Path::new(FOLDER);
        let progress = &mut run.progress;
        match remote::run(&remote, rounds, cores, &sizes, folder, progress) {
            Ok(more) => rows.extend(more),
            Err(e) => failed = Some(e),
        }
    }
    drop(run);
    // After an interrupt there is no result to write.
    viola_cli::interrupt::check()?;

    let guests = "User Mode Linux; DataNode and client on a core each, daemon and workers on any";
    let results = Results::new(rounds, guests, rows);
    let path = options.path(
        "vread",
        options.only.is_none() && !options.quick && rounds >= 5 && failed.is_none(),
    );
    results.publish("vread", &path)?;
    failed.map_or(Ok(()), Err)
}

/// Approximate time to boot the guests, start HDFS, write the file and warm up.
fn start(sizes: &Sizes) -> Duration {
    Duration::from_secs(45 + u64::from(4 * sizes.warm_s))
}

/// Approximate time until the first measurement, and of all measurements, phase by phase.
fn plan(works: &[Work], rounds: usize, quick: bool) -> Vec<Duration> {
    let sizes = Sizes::new(quick);
    let mut plan = Vec::new();
    if works.iter().any(|work| work.phase() != Phase::Device) {
        plan.push(start(&sizes));
    }
    for phase in Phase::ALL {
        let works = works.iter().filter(|work| work.phase() == phase);
        let round: f64 = works
            .map(|work| work.sides().len() as f64 * work.seconds(quick))
            .sum();
        if round > 0.0 {
            plan.push(phase.start(&sizes));
            plan.push(Duration::from_secs_f64(round * rounds as f64));
        }
    }
    plan
}

impl Phase {
    /// Approximate time to start what the phase needs.
    fn start(self, sizes: &Sizes) -> Duration {
        match self {
            Self::Plain => Duration::ZERO,
            Self::HBase => Duration::from_secs(90 + u64::from(sizes.rows / 800)),
            Self::Spark => Duration::from_secs(70),
            Self::Hybrid => Duration::from_secs(30),
            Self::Device => start(sizes),
        }
    }
}

/// State shared by all measurements.
struct Run {
    rounds: usize,
    quick: bool,
    sizes: Sizes,
    sampler: ThreadSampler,
    progress: Progress,
}

impl Run {
    /// All works on one host.
    fn here(&mut self, works: &[Work], cores: Cores, found: &mut Measurements) -> Outcome {
        let sizes = self.sizes;
        let mut fixtures = Fixtures::new(Path::new(FOLDER))?;
        for (phase, kit) in [
            (Phase::HBase, JavaStack::HBase),
            (Phase::Spark, JavaStack::Spark),
        ] {
            if works.iter().any(|work| work.phase() == phase) {
                fixtures.hadoop().require(kit).map_err(lab_failure)?;
            }
        }
        // The guests with a block device are started anew.
        let (device, file): (Vec<Work>, Vec<Work>) =
            works.iter().partition(|work| work.phase() == Phase::Device);
        let daemon = Daemon::start(bed::CLIENT, bed::NODE)?;
        for (works, what) in [(file, "in guests"), (device, "on a block device")] {
            if works.is_empty() {
                continue;
            }
            self.progress.step(&format!("HDFS {what}"), start(&sizes));
            match works
                .iter()
                .any(|work| work.sides().contains(&Side::Loopback))
            {
                true => fixtures.start_loopback(&sizes)?,
                false => fixtures.stop_loopback(),
            }
            let phases: Vec<Phase> = works.iter().map(|work| work.phase()).collect();
            let lab = fixtures.boot(cores, Some(&daemon), &sizes, &phases)?;
            let mut bed = fixtures.bed(&lab, Some(&daemon), &sizes)?;
            for phase in Phase::ALL {
                let works: Vec<Work> = works
                    .iter()
                    .copied()
                    .filter(|work| work.phase() == phase)
                    .collect();
                self.phase(&mut bed, phase, &works, found)?;
            }
            drop(bed);
            lab.down().map_err(lab_failure)?;
        }
        Ok(())
    }

    /// All rounds of the works of a phase.
    fn phase(
        &mut self,
        bed: &mut TestBed<'_>,
        phase: Phase,
        works: &[Work],
        found: &mut Measurements,
    ) -> Outcome {
        if works.is_empty() {
            return Ok(());
        }
        if !matches!(phase, Phase::Plain | Phase::Device) {
            let label = format!("{phase:?} in the guests");
            self.progress.step(&label, phase.start(&self.sizes));
        }
        bed.begin(phase, works, &self.sizes)?;
        for round in 0..self.rounds {
            for work in works {
                for side in turn(&bed.sides(*work), round) {
                    let label = format!(
                        "round {} of {}: {}, {}",
                        round + 1,
                        self.rounds,
                        work.name(),
                        side.name()
                    );
                    let about = Duration::from_secs_f64(work.seconds(self.quick));
                    self.progress.step(&label, about);
                    let reading = self.measure(bed, *work, side, round)?;
                    found.add(*work, side, reading);
                }
            }
        }
        bed.end(phase)
    }

    /// Measures one cell.
    fn measure(
        &mut self,
        bed: &mut TestBed<'_>,
        work: Work,
        side: Side,
        round: usize,
    ) -> Outcome<Reading> {
        let sizes = self.sizes;
        // Start the agent before any write: a file that is appended to at once has no name yet, as in production.
        bed.choose_agent(work, side)?;
        // The file to append to or the files to delete must exist.
        match work {
            Work::Append | Work::AppendNamed => {
                bed.ask(side, &Work::Write.request(side, &sizes, round))?;
            }
            Work::Delete => {
                let word = side.word();
                bed.ask(
                    side,
                    &format!(
                        "{word} litter {SMALL_FILES_FOLDER} {SMALL_FILES} {} {round}",
                        BLOCK >> 8
                    ),
                )?;
            }
            _ => {}
        }
        if matches!(work, Work::AppendNamed | Work::Delete) {
            bed.settle_named(side)?;
        }
        bed.prepare(work, side, &sizes, round)?;
        let processes = bed.processes(side)?;
        let served = match work.is_app() {
            true => settled(bed, side)?,
            false => bed.served(side)?,
        };
        let before = CpuTotals::now(&mut self.sampler, processes)?;
        let answer = bed.run(work, side, &sizes, round)?;
        let usage = CpuTotals::now(&mut self.sampler, processes)?.since(&before);
        bed.clean_up(work)?;
        if matches!(work, Work::Write | Work::Append | Work::AppendNamed) {
            bed.ask(side, &format!("{} delete {SCRATCH}", side.word()))?;
        }
        if work.is_app() {
            check_served(bed, work, side, served, &answer)?;
        } else if !work.writes() && side.is_local() {
            let expected = (answer.bytes as f64 * work.local_part()) as u64;
            if answer.local < expected {
                return Err(Failure::run(format!(
                    "{}, {}: {} of {expected} bytes came from the DataNode",
                    work.name(),
                    side.name(),
                    expected - answer.local,
                )));
            }
        }
        Ok(Reading { answer, usage })
    }
}

/// Bytes served by the daemon, after the counters of earlier reads have settled.
fn settled(bed: &TestBed<'_>, side: Side) -> Outcome<u64> {
    let mut served = bed.served(side)?;
    let started = Instant::now();
    while started.elapsed() < COUNTER_DELAY {
        std::thread::sleep(STATUS_INTERVAL);
        match bed.served(side)? {
            now if now == served => break,
            now => served = now,
        }
    }
    Ok(served)
}

/// Checks with the daemon where the bytes came from, which the program itself cannot tell.
fn check_served(
    bed: &TestBed<'_>,
    work: Work,
    side: Side,
    before: u64,
    answer: &viola_lab::hadoop::RequestStats,
) -> Outcome {
    let expected = match side.is_local() {
        true => ((answer.bytes as f64 * work.local_part()) as u64).max(1),
        false => 0,
    };
    let started = Instant::now();
    loop {
        let served = bed.served(side)?.saturating_sub(before);
        match side.is_local() {
            true if served >= expected => return Ok(()),
            false if served > 0 => {
                return Err(Failure::run(format!(
                    "{}, {}: viola served {served} bytes on a side that must not use it",
                    work.name(),
                    side.name()
                )));
            }
            false => return Ok(()),
            true if started.elapsed() > COUNTER_DELAY => {
                return Err(Failure::run(format!(
                    "{}, {}: viola served only {served} of {expected} bytes",
                    work.name(),
                    side.name()
                )));
            }
            true => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// Whether --only selects the work by the beginning of its name; commas separate several patterns.
fn selected(options: &Options, name: &str) -> bool {
    let any = |only: &String| only.split(',').any(|part| name.starts_with(part.trim()));
    options.only.as_ref().is_none_or(any)
}

/// Each round begins with another side.
fn turn(sides: &[Side], round: usize) -> Vec<Side> {
    let mut sides = sides.to_vec();
    if !sides.is_empty() {
        let by = round % sides.len();
        sides.rotate_left(by);
    }
    sides
}

/// Core of the client and core of the DataNode. Daemon, workers and the host's own HDFS may use all cores.
fn cores(client: usize) -> Outcome<Cores> {
    let allowed = rustix::thread::sched_getaffinity(None).map_err(Failure::run)?;
    if !allowed.is_set(client) {
        return Err(Failure::usage(format!(
            "there is no core {client} here; choose one with --core"
        )));
    }
    let node = (0..rustix::thread::CpuSet::MAX_CPU).find(|c| *c != client && allowed.is_set(*c));
    let node = node.ok_or_else(|| Failure::usage("this needs two cores: one for each guest"))?;
    Ok(Cores { client, node })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_side_is_always_first() {
        let sides = [Side::Stock, Side::Viola];
        assert_eq!(turn(&sides, 0), [Side::Stock, Side::Viola]);
        assert_eq!(turn(&sides, 1), [Side::Viola, Side::Stock]);
        assert_eq!(turn(&[], 3), []);
    }

    #[test]
    fn works_are_chosen_by_the_beginning_of_their_names() {
        let options = |only: &str| Options {
            rounds: None,
            quick: true,
            only: Some(only.into()),
            core: 1,
            output: None,
        };
        let chosen = |only| {
            Work::ALL
                .into_iter()
                .filter(|w| selected(&options(only), &w.name()))
                .count()
        };
        assert_eq!(chosen("sequential, random 4"), 4);
        assert_eq!(chosen("write"), 1);
        assert_eq!(chosen("HBase"), 3);
        assert_eq!(chosen("neighbours"), 0);
    }
}
