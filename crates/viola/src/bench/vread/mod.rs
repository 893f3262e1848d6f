// SPDX-License-Identifier: Apache-2.0
//! `viola bench vread`: HDFS in guests, read over TCP and through the host in turn, beside the client's own disk
//! and HDFS on the host itself.

mod bed;
mod daemon;
mod remote;
mod rows;
mod usage;
mod work;

use std::path::Path;
use std::time::Duration;

use bed::{Bed, Cores, Ground};
use daemon::Daemon;
use rows::{Found, Reading};
use usage::Moment;
use work::{SCRATCH, Side, Sizes, Work};

use super::Options;
use super::cpu::Eye;
use super::progress::{Progress, clock};
use super::result::{Causes, Results};
use super::row;
use super::side::lab_failure;
use crate::error::{Failure, Outcome};
use crate::table;

/// Images and the host's own HDFS.
const FOLDER: &str = "build/bench/vread";
/// Guests, HDFS and the file.
const START: Duration = Duration::from_secs(90);
/// One measurement with what goes before it.
const CELL: Duration = Duration::from_secs(6);

/// Runs it, prints the table and writes the result.
pub fn run(options: &Options) -> Outcome {
    let cores = cores(options.core)?;
    let sizes = Sizes::new(options.quick);
    let works: Vec<Work> = Work::ALL
        .into_iter()
        .filter(|work| wanted(options, &work.name()))
        .collect();
    let remote = remote::works(|name| wanted(options, name));
    if works.is_empty() && remote.is_empty() {
        let only = options.only.as_deref().unwrap_or_default();
        return Err(Failure::usage(format!(
            "no work has `{only}` in its name; try sequential, random, delay, neighbours, write or other host"
        )));
    }
    let rounds = options.rounds();
    let cells: usize = works.iter().map(|work| work.sides().len()).sum();
    let local = match works.is_empty() {
        true => Duration::ZERO,
        false => START + CELL * (cells * rounds) as u32,
    };
    let apart = match remote.is_empty() {
        true => Duration::ZERO,
        false => remote::time(&remote, rounds),
    };
    let mut progress = Progress::new(local + apart);
    let about = clock(local + apart);
    progress.say(&format!("vread: {rounds} rounds, about {about}"));
    let mut rows = Vec::new();
    if !works.is_empty() {
        rows.extend(here(&works, rounds, cores, &sizes, &mut progress)?.rows());
    }
    if !remote.is_empty() {
        let folder = Path::new(FOLDER);
        rows.extend(remote::run(
            &remote,
            rounds,
            cores,
            &sizes,
            folder,
            &mut progress,
        )?);
    }
    drop(progress);

    let guests = "User Mode Linux; DataNode and client on a core each, daemon and workers on any";
    let mut results = Results::new(rounds, guests, rows);
    results.explain(&Causes::read("bench/why-vread.toml".as_ref())?);
    let path = options.path(
        "vread",
        options.only.is_none() && !options.quick && rounds >= 5,
    );
    results.write(&path)?;
    table::print(&row::table(&results.rows).text())?;
    table::print(&verdict(&results, &path))
}

/// All on one host.
fn here(
    works: &[Work],
    rounds: usize,
    cores: Cores,
    sizes: &Sizes,
    progress: &mut Progress,
) -> Outcome<Found> {
    progress.step("HDFS on the host and in guests", START);
    let mut ground = Ground::new(Path::new(FOLDER))?;
    if works
        .iter()
        .any(|work| work.sides().contains(&Side::Loopback))
    {
        ground.start_loopback(sizes)?;
    }
    let daemon = Daemon::start(bed::CLIENT, bed::NODE)?;
    let lab = ground.boot(cores, Some(&daemon), sizes)?;
    let mut bed = ground.bed(&lab, Some(&daemon), sizes)?;
    let mut found = Found::default();
    let mut eye = Eye::new()?;
    for round in 0..rounds {
        for work in works {
            for side in turn(&bed.sides(*work), round) {
                let label = format!(
                    "round {} of {rounds}: {}, {}",
                    round + 1,
                    work.name(),
                    side.name()
                );
                progress.step(&label, CELL);
                let reading = measure(&mut bed, &mut eye, *work, side, sizes, round)?;
                found.add(*work, side, reading);
            }
        }
    }
    drop(bed);
    lab.down().map_err(lab_failure)?;
    Ok(found)
}

/// One cell.
fn measure(
    bed: &mut Bed<'_>,
    eye: &mut Eye,
    work: Work,
    side: Side,
    sizes: &Sizes,
    round: usize,
) -> Outcome<Reading> {
    // before anything is written: what is appended to at once has no name yet, as in use
    bed.choose_agent(work, side)?;
    // what is appended to or deleted has to be there
    if matches!(work, Work::Append | Work::Delete) {
        bed.ask(side, &Work::Write.request(side, sizes, round))?;
    }
    bed.prepare(work, side, sizes)?;
    let whose = bed.whose(side)?;
    let before = Moment::now(eye, whose)?;
    let answer = bed.ask(side, &work.request(side, sizes, round))?;
    let usage = Moment::now(eye, whose)?.since(&before);
    bed.tidy(work)?;
    if matches!(work, Work::Write | Work::Append) {
        bed.ask(side, &format!("{} delete {SCRATCH}", side.word()))?;
    }
    if !work.writes() && side.is_local() && answer.local < answer.bytes {
        return Err(Failure::run(format!(
            "{}, {}: {} of {} bytes came from the DataNode",
            work.name(),
            side.name(),
            answer.bytes - answer.local,
            answer.bytes
        )));
    }
    Ok(Reading { answer, usage })
}

/// Whether a work of this name was asked for; patterns are separated by commas.
fn wanted(options: &Options, name: &str) -> bool {
    let any = |only: &String| only.split(',').any(|part| name.contains(part.trim()));
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

/// The client's core, and another for the DataNode. Daemon, workers and the host's own HDFS may use all.
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

fn verdict(results: &Results, path: &Path) -> String {
    let judged = results.rows.iter().filter(|r| r.met.is_some()).count();
    let missed: Vec<_> = results
        .rows
        .iter()
        .filter(|r| r.met == Some(false))
        .collect();
    let mut text = format!(
        "\n{} of {judged} goals reached; {}\n",
        judged - missed.len(),
        path.display()
    );
    for row in missed {
        let why = row
            .why
            .as_deref()
            .unwrap_or("not explained yet (bench/why-vread.toml)");
        text.push_str(&format!("missed: {}: {why}\n", row.name));
    }
    text
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
    fn works_are_chosen_by_parts_of_their_names() {
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
                .filter(|w| wanted(&options(only), &w.name()))
                .count()
        };
        assert_eq!(chosen("sequential, random 4"), 3);
        assert_eq!(chosen("write"), 1);
        assert_eq!(chosen("none"), 0);
    }
}
