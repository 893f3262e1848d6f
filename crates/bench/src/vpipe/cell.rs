// SPDX-License-Identifier: Apache-2.0
//! Cells of the benchmark.

use std::time::Duration;

use super::bed::{MAX_FILE_BYTES, Side};
use super::servers::Work;
use crate::harness::row::Goal;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// Number of double turns per round of both sides for small files.
const DOUBLE_TURNS: usize = 2;

/// A load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cell {
    /// Whether the three neighbours are busy.
    pub busy: bool,
    /// The work.
    pub work: Work,
    /// Size of the file, bytes; one of [`super::bed::SIZES`].
    pub size: usize,
    /// Number of persistent connections.
    pub connections: usize,
}

impl Cell {
    /// Files whose hand-over is timed, bytes.
    pub const TIMED_SIZES: [usize; 3] = [256 * KIB, 2 * MIB, 16 * MIB];

    /// Files that are served without a guest, bytes.
    pub const NATIVE: [usize; 4] = [256 * KIB, 2 * MIB, 16 * MIB, MAX_FILE_BYTES];

    /// All cells; those with busy neighbours come last.
    pub fn all() -> Vec<Self> {
        let nginx = [4 * KIB, 64 * KIB, MIB, 16 * MIB, MAX_FILE_BYTES]
            .into_iter()
            .flat_map(|size| [(Work::Nginx, size, 1), (Work::Nginx, size, 32)]);
        let others = [
            (Work::Written, MAX_FILE_BYTES, 1),
            (Work::Beside, MAX_FILE_BYTES, 1),
            (Work::Lighttpd, 64 * KIB, 32),
            (Work::Lighttpd, 16 * MIB, 1),
            (Work::Lighttpd, 16 * MIB, 32),
            (Work::Lighttpd, MAX_FILE_BYTES, 1),
            (Work::Proxy, 64 * KIB, 32),
            (Work::Proxy, 16 * MIB, 1),
            (Work::Proxy, MAX_FILE_BYTES, 1),
            (Work::Upload, MIB, 1),
            (Work::Upload, MAX_FILE_BYTES, 1),
            (Work::Backup, 16 * MIB, 1),
            (Work::Backup, MAX_FILE_BYTES, 1),
            (Work::Given, 256 * KIB, 1),
            (Work::Given, MIB, 1),
            (Work::Given, 4 * MIB, 1),
            (Work::Given, 64 * MIB, 1),
            (Work::Wrk, 64 * KIB, 32),
            (Work::Wrk, 16 * MIB, 32),
            (Work::Curl, MAX_FILE_BYTES, 1),
        ];
        let times = Self::TIMED_SIZES.map(|size| (Work::Times, size, 1));
        let native = Self::TIMED_SIZES.map(|size| (Work::Native, size, 1));
        let native = native
            .into_iter()
            .chain([(Work::NativeWeb, MAX_FILE_BYTES, 1)]);
        let cells: Vec<_> = nginx.chain(others).chain(times).chain(native).collect();
        let mut all = Vec::new();
        for busy in [false, true] {
            // Native cells have no guest and so no neighbours.
            let cells = cells.iter().filter(|cell| !busy || !cell.0.is_native());
            all.extend(cells.map(|&(work, size, connections)| Self {
                busy,
                work,
                size,
                connections,
            }));
        }
        all
    }

    /// Name in results.
    pub fn name(&self) -> String {
        let size = match self.size {
            size if size < MIB => format!("{} KiB", size / KIB),
            size => format!("{} MiB", size / MIB),
        };
        let connections = match self.connections {
            1 => "1 connection".to_owned(),
            n => format!("{n} connections"),
        };
        let what = match self.work {
            Work::Beside => "4 KiB beside 256 MiB".into(),
            Work::Upload | Work::Backup | Work::Times | Work::Native => size,
            Work::Given => format!("{size}, given away, {connections}"),
            Work::Wrk => format!("{size}, wrk, {connections}"),
            Work::Curl => format!("{size}, curl"),
            Work::Written => format!("{size}, read and written"),
            Work::Nginx | Work::Lighttpd | Work::NativeWeb | Work::Proxy => {
                format!("{size}, {connections}")
            }
        };
        let busy = if self.busy { ", busy neighbours" } else { "" };
        format!("{}, {what}{busy}", self.work.name())
    }

    /// Duration of a side per round.
    fn round_length(&self, side: Side, quick: bool) -> Duration {
        let ms = match (self.work, self.busy) {
            (Work::Given, false) => 600,
            (Work::Given, true) => 1200,
            // wrk counts whole seconds.
            (Work::Wrk, _) if quick => return Duration::from_secs(1),
            (Work::Wrk, false) => 1000,
            (Work::Wrk, true) => 2000,
            (Work::Curl, _) => 500,
            (Work::Times | Work::Native, false) => 1000,
            (Work::Times | Work::Native, true) => 2000,
            (_, false) => 1200,
            (_, true) => 3000,
        };
        let ms = match (self.work, side) {
            // The stock side needs only half the time.
            (Work::Times | Work::Native, Side::Stock) => ms / 2,
            _ => ms,
        };
        Duration::from_millis(if quick { ms / 2 } else { ms })
    }

    /// Duration of one turn of a side.
    pub fn length(&self, side: Side, quick: bool) -> Duration {
        let length = self.round_length(side, quick);
        match self.work {
            // wrk counts whole seconds.
            Work::Wrk => length,
            _ if self.is_given_away() => length,
            _ => length / (2 * DOUBLE_TURNS as u32),
        }
    }

    /// Turns of a round, each for [`Cell::length`]. Where the difference is smaller than the drift of the machine
    /// within a round, the sides alternate back and forth several times; each turn is a figure of its own.
    pub fn turns(&self, round: usize) -> Vec<Side> {
        let mut sides = self.sides();
        let by = round % sides.len();
        sides.rotate_left(by);
        if !self.is_given_away() {
            sides.extend(sides.clone().into_iter().rev());
            sides = sides.repeat(DOUBLE_TURNS);
        }
        sides
    }

    /// Whether the file is large enough for the library, which then lets the host send it.
    pub fn is_given_away(&self) -> bool {
        let least = match self.work {
            Work::Proxy => 32 * MIB,
            Work::Given | Work::Times | Work::Native => 1,
            _ => 2 * MIB,
        };
        self.size >= least
    }

    /// Servers of the cell.
    pub fn sides(&self) -> Vec<Side> {
        let mut sides = vec![Side::Stock, Side::Viola];
        if self.size == MAX_FILE_BYTES && self.connections == 1 && self.work == Work::Nginx {
            sides.push(Side::Host);
        }
        sides
    }

    /// Goal for the throughput.
    pub fn goal(&self) -> Option<Goal> {
        if matches!(
            self.work,
            Work::Given
                | Work::Written
                | Work::Wrk
                | Work::Curl
                | Work::Times
                | Work::Native
                | Work::NativeWeb
        ) {
            return None;
        }
        if !self.busy || !self.is_given_away() {
            return Some(Goal::AtLeast(0.98));
        }
        Some(Goal::AtLeast(match self.work {
            Work::Proxy | Work::Upload => 2.0,
            Work::Backup => 3.0,
            _ => 3.4,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::bed::SIZES;
    use super::*;

    #[test]
    fn names_say_what_is_measured() {
        let all = Cell::all();
        assert_eq!(all.len(), 70);
        let names: Vec<String> = all.iter().map(Cell::name).collect();
        assert_eq!(names[0], "nginx, 4 KiB, 1 connection");
        for name in [
            "nginx, 1 MiB, given away, 1 connection",
            "nginx, 16 MiB, wrk, 32 connections",
            "nginx, 256 MiB, curl, busy neighbours",
            "vpipe_file, 2 MiB",
            "vpipe_file natively, 2 MiB",
            "lighttpd natively, 256 MiB, 1 connection",
        ] {
            assert!(names.iter().any(|one| one == name), "{name}: {names:?}");
        }
        let busy = names
            .iter()
            .filter(|name| name.ends_with(", busy neighbours"));
        assert_eq!(busy.count(), 33);
        let mut once = names.clone();
        once.sort();
        once.dedup();
        assert_eq!(once.len(), names.len());
    }

    #[test]
    fn every_requested_file_exists() {
        for cell in Cell::all() {
            assert!(SIZES.contains(&cell.size), "{}", cell.name());
        }
    }

    #[test]
    fn small_files_alternate_back_and_forth() {
        let cell = |size| Cell {
            busy: false,
            work: Work::Nginx,
            size,
            connections: 32,
        };
        let (a, b) = (Side::Stock, Side::Viola);
        assert_eq!(cell(MIB).turns(0), [a, b, b, a, a, b, b, a]);
        assert_eq!(cell(MIB).turns(1), [b, a, a, b, b, a, a, b]);
        assert_eq!(cell(16 * MIB).turns(3), [b, a]);
        let length = |size| cell(size).length(a, false).as_millis();
        assert_eq!((length(MIB), length(16 * MIB)), (300, 1200));
    }

    #[test]
    fn wrk_runs_whole_seconds() {
        for cell in Cell::all()
            .into_iter()
            .filter(|cell| cell.work == Work::Wrk)
        {
            for quick in [false, true] {
                let length = cell.length(Side::Viola, quick);
                assert!(length.as_secs() >= 1 && length.subsec_nanos() == 0);
            }
        }
    }
}
