// SPDX-License-Identifier: Apache-2.0
//! Test bed: four guests with two vCPUs each. It measures the first one.

use std::path::Path;
use std::time::{Duration, Instant};

use viola_host::{CpuSet, attrs, proc};
use viola_lab::load::{self, Arrivals, Client, Http, Ping, TcpBulk, TcpRr, UdpFlood};
use viola_lab::wire::Workload;
use viola_lab::{Guest, Lab, Paths, Spec};

use super::agent;
use super::files::{self, Files};
use super::spec::{self, IO};
use super::{Comparison, Measure, Measures, Times};
use crate::harness::calendar::{self, Calendar, ResponseTimes};
use crate::harness::cpu::ThreadSampler;
use crate::harness::folder::Folder;
use crate::harness::groups::Groups;
use crate::harness::guests::{self, OWN_WORK, other_core, shell};
use crate::harness::load::ask;
use crate::harness::side::{Active, Guests as Settings, Side, lab_failure};
use crate::harness::vmm::GuestKind;
use viola_cli::error::{Failure, Outcome};
use viola_report::stats::Sorted;

/// Packets per second of the floods.
pub(super) const RATES: [u32; 3] = [5_000, 20_000, 50_000];
/// Web pages per second of the open loop, which the guest's share serves on all sides.
const PAGE_RATE: f64 = 25.0;
/// Upper bound on requests; no cell has time for more.
const MAX_REQUESTS: usize = 1_000_000;
/// Rate of the papers' link, bytes per second.
const GIGABIT: u32 = 125_000_000;
/// Settling time on a side.
const SETTLE_TIME: Duration = Duration::from_millis(500);

/// Result of a cell, as far as it was measured. Latencies are in milliseconds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reading {
    /// Ping round trips; the guest's kernel replies.
    pub ping: Sorted,
    /// TCP connect times.
    pub connect: Sorted,
    /// From connect to the last byte of a web page of 5 KiB, in a closed loop.
    pub page: Sorted,
    /// The same in an open loop at [`PAGE_RATE`], from when it was due.
    pub open_page: Sorted,
    /// Round trips of one byte to a program.
    pub rr: Sorted,
    /// Such round trips per second, one after the other.
    pub rr_per_s: Option<f64>,
    /// Flood packets that a program received, percent of those sent, by [`RATES`].
    pub udp: [Option<f64>; RATES.len()],
    /// TCP throughput at a program, MB/s.
    pub tcp: Option<f64>,
    /// Time in which the sender waited for the receiver's window, percent; and retransmissions per MB.
    pub tcp_waits: Option<(f64, f64)>,
    /// As `tcp`, over a link of 1 Gbit/s.
    pub tcp_gigabit: Option<f64>,
    /// Disk writes with fsync, MB/s.
    pub disk: Option<f64>,
    /// Disk reads without the page cache, MB/s.
    pub read: Option<f64>,
    /// Files copied by scp, written and read over NFS, MB/s.
    pub files: [Option<f64>; 3],
    /// Replies of a web application with its database.
    pub web: Option<ResponseTimes>,
    /// CPU use of the guest over the cell, percent of a core.
    pub io_share: f64,
    /// Work units per second of the other guests.
    pub others: Option<f64>,
    /// CPU use of viola's controllers, as a part of a core.
    pub controller: f64,
}

/// Running guests.
pub struct TestBed {
    /// Dropped before the guests.
    files: Option<Files>,
    calendar: Option<Calendar>,
    lab: Lab,
    kind: GuestKind,
    core: usize,
    load_core: usize,
    sampler: ThreadSampler,
    folder: Folder,
}

impl TestBed {
    /// Boots the guests on `core`. The caller keeps its own process off it (see
    /// [`crate::harness::guests::split_cores`]).
    pub(super) fn boot(
        core: usize,
        kind: GuestKind,
        times: &Times,
        measures: &Measures,
    ) -> Outcome<Self> {
        let folder = Folder::new(format!("/dev/shm/viola-bench.{}", std::process::id()).into())?;
        let has_files = measures.0.iter().any(|kind| kind.is_of_files());
        if has_files {
            files::image(&folder.0.join("files.img"), times.file)?;
        }
        let paths = Paths::find_from([Path::new(".")]).map_err(lab_failure)?;
        let has_calendar = measures.has(Measure::Calendar);
        if has_calendar {
            calendar::disk(&folder.0.join("calendar.img"), &paths.image)?;
        }
        let text = spec::text(core, kind, has_files, has_calendar);
        let spec = Spec::from_toml(&text, "bench-turbo", &folder.0).map_err(lab_failure)?;
        let lab = Lab::up(&spec, &paths).map_err(lab_failure)?;
        let mut bed = Self {
            files: None,
            calendar: None,
            lab,
            kind,
            core,
            load_core: other_core(core)?,
            sampler: ThreadSampler::new()?,
            folder,
        };
        if has_files {
            let (io, to) = (bed.io(), bed.address()?);
            let folders = (&*bed.folder.0, &*paths.image);
            let started = Files::start(
                &bed.lab,
                io,
                to,
                folders,
                &kind.disk(spec::FILES),
                times.file,
            )?;
            bed.files = Some(started);
        }
        if has_calendar {
            let (io, to) = (bed.io(), bed.address()?);
            let disk = kind.disk(spec::calendar(has_files));
            let started = Calendar::start(&bed.lab, io, to, &disk, &bed.folder.0)?;
            bed.calendar = Some(started);
        }
        bed.shell(OWN_WORK)?;
        Ok(bed)
    }

    fn io(&self) -> &Guest {
        &self.lab.guests()[0]
    }

    fn shell(&self, line: &str) -> Outcome<String> {
        let output = shell(self.io(), line)?;
        Ok(output.stdout + &output.stderr)
    }

    /// Version of the guest kernel.
    pub fn kernel(&self) -> Outcome<String> {
        Ok(format!("{} with two vCPUs", guests::kernel(&self.lab)?))
    }

    /// Allows all threads of the guests on these cores.
    fn allow(&self, cores: &[usize]) -> Outcome {
        let cores: CpuSet = cores
            .iter()
            .filter_map(|c| u32::try_from(*c).ok())
            .collect();
        // A new thread inherits the affinity of one that was not moved yet, so set it twice.
        for _ in 0..2 {
            for guest in self.lab.guests() {
                let mut pids = vec![guest.pid()];
                pids.extend(proc::children(guest.pid()).map_err(|e| Failure::run(e.one_line()))?);
                for pid in pids {
                    for tid in proc::thread_ids(pid).unwrap_or_default() {
                        let _ = attrs::set_affinity(tid, &cores).map_err(Failure::run)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Sets the neighbours' load, and the agent or its buffers in the guest. New sockets use the buffers.
    fn set_up(&mut self, setting: Comparison, end: bool) -> Outcome {
        let io = self.io();
        match (setting.has_agent(), setting.has_buffers(), end) {
            (true, _, false) => agent::start(io)?,
            (true, _, true) => agent::stop(io)?,
            (_, true, false) => agent::buffers(io)?,
            (_, true, true) => agent::no_buffers(io)?,
            (false, false, _) => {}
        }
        if setting.has_agent() || setting.has_buffers() {
            io.stop("sink").map_err(lab_failure)?;
            let started = io.start("sink", Workload::sink());
            started.map_err(lab_failure)?;
            if let Some(files) = &mut self.files {
                files.connect(&self.lab, &self.lab.guests()[0])?;
            }
        }
        if setting == Comparison::Alone {
            for guest in &self.lab.guests()[1..] {
                match end {
                    true => guest.start("hog", Workload::hog()).map_err(lab_failure)?,
                    false => drop(guest.stop("hog").map_err(lab_failure)?),
                }
            }
        }
        Ok(())
    }

    /// Measures everything on one side.
    pub fn measure(
        &mut self,
        setting: Comparison,
        times: &Times,
        measures: &Measures,
        seed: u64,
    ) -> Outcome<Reading> {
        self.set_up(setting, false)?;
        let side = match setting {
            Comparison::Credit => Side::Credit,
            // The core of the load, because there are only two.
            Comparison::Turbo => Side::Turbo(self.load_core),
            _ => Side::Stock,
        };
        match setting {
            Comparison::Turbo | Comparison::Pinned => self.allow(&[self.load_core, self.core])?,
            _ => self.allow(&[self.core])?,
        }
        let guests = self.lab.guests();
        let groups = match setting {
            Comparison::Pinned => Some(Groups::pinned(guests, self.load_core, self.core)?),
            Comparison::Alone => Some(Groups::part_of_core(self.io(), guests.len() as u32)?),
            _ => None,
        };
        let active = Active::start(side, &Settings::equal(self.core, IO), &self.lab)?;
        std::thread::sleep(SETTLE_TIME);
        let read = self.read(&active, times, measures, seed, setting != Comparison::Alone);
        active.stop()?;
        drop(groups);
        self.allow(&[self.core])?;
        self.set_up(setting, true)?;
        read
    }

    fn read(
        &mut self,
        active: &Active,
        times: &Times,
        measures: &Measures,
        seed: u64,
        others: bool,
    ) -> Outcome<Reading> {
        let pids: Vec<u32> = self.lab.guests().iter().map(Guest::pid).collect();
        let (before, controller, started) = (
            self.sampler.vms(&pids)?,
            active.controller_ns()?,
            Instant::now(),
        );
        let work = others.then(|| self.work()).transpose()?;
        let mut reading = Reading::default();
        self.answers(&mut reading, times, measures, seed)?;
        for (k, rate) in RATES.into_iter().enumerate() {
            if measures.has(Measure::Udp(k)) {
                reading.udp[k] = Some(self.flood(rate, times.bulk)?);
            }
        }
        if measures.has(Measure::Tcp) {
            let (rate, waits) = self.stream(times.stream, None)?;
            (reading.tcp, reading.tcp_waits) = (Some(rate), Some(waits));
        }
        if measures.has(Measure::TcpGigabit) {
            reading.tcp_gigabit = Some(self.stream(times.stream, Some(GIGABIT))?.0);
        }
        if measures.has(Measure::Write) {
            reading.disk = Some(self.write(times.disk)?);
        }
        if measures.has(Measure::Read) {
            reading.read = Some(self.read_disk(times.disk)?);
        }
        if let Some(files) = &self.files {
            let io = self.io();
            for (kind, figure) in [Measure::Scp, Measure::NfsWrite, Measure::NfsRead]
                .into_iter()
                .zip(&mut reading.files)
            {
                *figure = match kind {
                    _ if !measures.has(kind) => None,
                    Measure::Scp => Some(files.scp(&self.lab, io)?),
                    Measure::NfsWrite => Some(files.nfs_write(&self.lab, io)?),
                    _ => Some(files.nfs_read(&self.lab, io)?),
                };
            }
        }
        if let Some(calendar) = &self.calendar {
            reading.web = Some(calendar.measure(&self.lab, times.web, seed)?);
        }
        let seconds = started.elapsed().as_secs_f64();
        let ns = active.controller_ns()?.saturating_sub(controller);
        reading.controller = ns as f64 / 1e9 / seconds;
        if let Some(before) = work {
            reading.others = rate(&before, &self.work()?);
        }
        let used = self.sampler.vms(&pids)?.since(&before);
        reading.io_share = used.first().map_or(0.0, |u| u.share * 100.0);
        Ok(reading)
    }

    fn answers(
        &self,
        reading: &mut Reading,
        times: &Times,
        measures: &Measures,
        seed: u64,
    ) -> Outcome {
        let to = self.address()?;
        // Real-time priority, so that the load's own waits do not count.
        let client = Client {
            core: Some(self.load_core),
            seed,
            ..Client::real_time()
        };
        let ms = |us: &[f64]| Sorted::new(us.iter().map(|us| us / 1e3).collect());
        let pings = Ping {
            count: (times.answers.as_secs_f64() / 0.0075) as usize,
            interval: (Duration::from_millis(3), Duration::from_millis(12)),
            client,
            ..Ping::default()
        };
        if measures.has(Measure::Ping) {
            reading.ping = ms(&load::ping(&self.lab, to, &pings).map_err(lab_failure)?.us);
        }
        let http = |arrivals, connections| Http {
            requests: MAX_REQUESTS,
            arrivals,
            connections,
            limit: times.answers,
            client,
            ..Http::default()
        };
        if measures.has(Measure::Connect) {
            let pause = (Duration::from_millis(2), Duration::from_millis(8));
            let found = ask(&self.lab, to, &http(Arrivals::Closed { pause }, 1))?;
            reading.connect = ms(&found.connect_us);
            reading.page = ms(&found.us);
        }
        if measures.has(Measure::OpenPage) {
            let found = ask(&self.lab, to, &http(Arrivals::poisson(PAGE_RATE), 64))?;
            // The figures of a generator that was late itself are left out.
            if found.check_punctual(1).is_ok() {
                reading.open_page = ms(&found.us);
            }
        }
        let rr = TcpRr {
            count: MAX_REQUESTS,
            limit: times.answers,
            client,
            ..TcpRr::default()
        };
        if measures.has(Measure::RoundTrips) {
            let found = load::tcp_rr(&self.lab, to, &rr).map_err(lab_failure)?;
            reading.rr = ms(&found.us);
            reading.rr_per_s = Some(found.rate());
        }
        Ok(())
    }

    fn address(&self) -> Outcome<std::net::Ipv4Addr> {
        guests::address(self.io())
    }

    /// A client at normal priority on the load's core, so that it cannot block a turbo vCPU there.
    fn normal_client(&self) -> Client {
        Client {
            core: Some(self.load_core),
            ..Client::default()
        }
    }

    /// Percent of a flood's packets that the guest's program received.
    fn flood(&self, rate: u32, time: Duration) -> Outcome<f64> {
        let before = self.io().stat("sink").map_err(lab_failure)?.units;
        let flood = UdpFlood {
            rate,
            time,
            client: self.normal_client(),
            ..UdpFlood::default()
        };
        let sent = load::udp_flood(&self.lab, self.address()?, &flood).map_err(lab_failure)?;
        std::thread::sleep(Duration::from_millis(300));
        let after = self.io().stat("sink").map_err(lab_failure)?.units;
        Ok(100.0 * after.saturating_sub(before) as f64 / sent.sent.max(1) as f64)
    }

    /// MB/s; percent of the time with a full window; retransmissions per MB.
    fn stream(&self, time: Duration, pace: Option<u32>) -> Outcome<(f64, (f64, f64))> {
        let before = self.io().stat("sink").map_err(lab_failure)?.bytes;
        let started = Instant::now();
        let bulk = TcpBulk {
            time,
            pace,
            client: self.normal_client(),
            ..TcpBulk::default()
        };
        let sent = load::tcp_stream(&self.lab, self.address()?, &bulk).map_err(lab_failure)?;
        let after = self.io().stat("sink").map_err(lab_failure)?.bytes;
        let mb = after.saturating_sub(before) as f64 / 1e6;
        let again = f64::from(sent.retransmits) / mb.max(1e-3);
        Ok((
            mb / started.elapsed().as_secs_f64(),
            (sent.window_full * 100.0, again),
        ))
    }

    /// MB/s of a write with fsync.
    fn write(&self, mib: u32) -> Outcome<f64> {
        let disk = self.kind.disk(spec::IO_DISK);
        self.dd(mib, &format!("if=/dev/zero of={disk} conv=fsync"))
    }

    /// MB/s of a read without the guest's page cache.
    fn read_disk(&self, mib: u32) -> Outcome<f64> {
        self.shell("echo 1 >/proc/sys/vm/drop_caches")?;
        let disk = self.kind.disk(spec::IO_DISK);
        self.dd(mib, &format!("if={disk} of=/dev/null"))
    }

    fn dd(&self, mib: u32, what: &str) -> Outcome<f64> {
        let line = format!(
            "read a x </proc/uptime; dd {what} bs=1M count={mib} 2>/dev/null; read b x </proc/uptime; echo $a $b"
        );
        let output_text = self.shell(&line)?;
        let seconds = seconds_of(&output_text)
            .ok_or_else(|| Failure::run(format!("in guest {IO}: {output_text}")))?;
        Ok(f64::from(mib) * 1.048_576 / seconds.max(0.01))
    }

    /// Work of the others so far: units, and each guest's own time in seconds.
    fn work(&self) -> Outcome<Vec<(u64, f64)>> {
        let others = self.lab.guests()[1..].iter();
        others
            .map(|guest| {
                let stat = guest.stat("hog").map_err(lab_failure)?;
                Ok((stat.units, stat.up_ms as f64 / 1e3))
            })
            .collect()
    }

    /// Shuts the guests down.
    pub fn down(self) -> Outcome {
        self.lab.down().map_err(lab_failure)
    }
}

/// Parses the time between two uptimes of the guest, in hundredths of a second.
fn seconds_of(output_text: &str) -> Option<f64> {
    let (before, after) = output_text.trim().split_once(' ')?;
    Some(after.parse::<f64>().ok()? - before.parse::<f64>().ok()?)
}

/// Work units per second of all guests together.
fn rate(before: &[(u64, f64)], after: &[(u64, f64)]) -> Option<f64> {
    let each = before.iter().zip(after);
    let rates: Vec<f64> = each
        .map(|((u0, t0), (u1, t1))| u1.saturating_sub(*u0) as f64 / (t1 - t0))
        .filter(|r| r.is_finite())
        .collect();
    (!rates.is_empty()).then(|| rates.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_write_is_between_two_of_the_guests_clock() {
        assert_eq!(seconds_of("12.25 12.75\n"), Some(0.5));
        assert_eq!(seconds_of("dd: no such device"), None);
    }

    #[test]
    fn work_is_counted_by_each_guests_own_clock() {
        let (before, after) = ([(0, 0.0), (10, 1.0)], [(100, 2.0), (30, 2.0)]);
        assert_eq!(rate(&before, &after), Some(70.0));
        assert_eq!(rate(&[], &[]), None);
    }
}
