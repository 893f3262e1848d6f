// SPDX-License-Identifier: Apache-2.0
//! The thread of a lane.

use std::io;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use viola_netdev::{Link, LinkMonitor, links, set_active_port, set_master, set_up};
use viola_proto::lanes::guest::{LaneReply, LaneRequest, VfAction};

use super::bond::{self, BOND_ALIAS, release_vf};
use super::host::HostPort;
use super::plan::{Action, Pair, Plan};
use super::report::Report;
use super::settings::Settings;
use crate::io::channel::Address;
use crate::io::service::{Published, Service};

/// Time between two reads of the interfaces without an event.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// The same while a VF in the bond has no link: some drivers send no event.
const LINK_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Between two attempts to make the bond.
const BOND_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// A running lane. Dropping it restores everything.
pub type Lane = Service<Report>;

/// Starts the lane, if it is configured. A bond that cannot be made is reported, and tried again.
///
/// # Errors
/// When link events cannot be received, or no thread can be started.
pub fn start(settings: Option<&Settings>) -> io::Result<Option<Lane>> {
    let Some(settings) = settings else {
        return Ok(None);
    };
    let address = Address::parse(&settings.port).map_err(io::Error::other)?;
    let link_events = LinkMonitor::open()?;
    let mut lane = LaneThread {
        settings: settings.clone(),
        pair: None,
        retry: Instant::now(),
        plan: Plan::default(),
        host: HostPort::new(address),
        report: Report::default(),
    };
    let run = move |report: &Published<Report>, stop: &OwnedFd| {
        loop {
            let due = Instant::now() + lane.round();
            report.set(lane.report());
            if lane.wait(stop, &link_events, due) {
                break;
            }
        }
        lane.end();
    };
    Service::start("viola-lane", Report::default(), run).map(Some)
}

struct LaneThread {
    settings: Settings,
    pair: Option<Pair>,
    /// When to try again to make the bond.
    retry: Instant,
    plan: Plan,
    host: HostPort,
    report: Report,
}

impl LaneThread {
    fn report(&self) -> Report {
        let mut report = self.report.clone();
        if report.why.is_none() {
            report.why.clone_from(&self.host.why);
        }
        report
    }

    /// Makes the changes that are due. Returns the time until the next round.
    fn round(&mut self) -> Duration {
        if self.pair.is_none() && Instant::now() >= self.retry {
            match bond::find_or_make(&self.settings) {
                Ok(pair) => {
                    self.pair = Some(pair);
                    self.report.why = None;
                }
                Err(why) => {
                    self.retry = Instant::now() + BOND_RETRY_INTERVAL;
                    self.report.why = Some(why);
                }
            }
        }
        let Some(pair) = self.pair else {
            return BOND_RETRY_INTERVAL;
        };
        let mut all = match links() {
            Ok(all) => all,
            Err(e) => {
                self.report.why = Some(format!("interfaces: {e}"));
                return BOND_RETRY_INTERVAL;
            }
        };
        for action in self.plan.next(&pair, &all) {
            let (done, what) = match action {
                Action::AddPort(vf) => (add_port(&pair, vf), "cannot add the VF to the bond"),
                Action::Activate(vf) => {
                    let done = set_active_port(pair.bond, vf);
                    self.report.activations += u64::from(done.is_ok());
                    (done, "cannot activate the VF")
                }
            };
            self.report.why = done.err().map(|e| format!("{what}: {e}"));
            all = links().unwrap_or(all);
        }
        self.update_report(&pair, &all);
        if !all.iter().any(|l| l.index == pair.bond) {
            // the bond was removed by somebody else
            self.pair = None;
            self.retry = Instant::now() + BOND_RETRY_INTERVAL;
            self.report.why = Some("the bond was removed".into());
        }
        match self.plan.is_waiting_for_link(&pair, &all) {
            true => LINK_POLL_INTERVAL,
            false => POLL_INTERVAL,
        }
    }

    fn update_report(&mut self, pair: &Pair, all: &[Link]) {
        let of = |index: u32| all.iter().find(|l| l.index == index);
        let name = |index: Option<u32>| index.and_then(of).map(|l| l.name.clone());
        let bond = of(pair.bond);
        self.report.bond = bond.map(|b| b.name.clone()).unwrap_or_default();
        self.report.nic = name(Some(pair.nic)).unwrap_or_default();
        self.report.active = name(bond.and_then(|b| b.active)).unwrap_or_else(|| "none".into());
        self.report.made = bond.is_some_and(|b| b.alias.as_deref() == Some(BOND_ALIAS));
    }

    /// Waits for a link event, a request of the host, or `due`; `true` when the lane ends.
    fn wait(&mut self, stop: &OwnedFd, link_events: &LinkMonitor, due: Instant) -> bool {
        loop {
            let (host, limit) = self.host.poll_fd();
            let wait = limit.min(due.saturating_duration_since(Instant::now()));
            let limit = Timespec::try_from(wait).ok();
            let mut fds = vec![
                PollFd::new(stop, PollFlags::IN),
                PollFd::new(link_events, PollFlags::IN),
            ];
            fds.extend(host.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            // an interrupted wait is harmless
            let _ = poll(&mut fds, limit.as_ref());
            let over = !fds[0].revents().is_empty();
            let events = fds.get(2).map_or(PollFlags::empty(), |fd| fd.revents());
            drop(fds);
            let asked = self.host.receive(events);
            for asked in &asked {
                self.answer(asked);
            }
            // a poll of a closed port changes nothing
            if over || link_events.drain() || !asked.is_empty() || Instant::now() >= due {
                return over;
            }
        }
    }

    fn answer(&mut self, asked: &LaneRequest) {
        let n = asked.n;
        let ours = self.pair.filter(|pair| pair.mac == asked.mac);
        let all = links().map_err(|e| e.to_string());
        let (pair, all) = match (ours, all) {
            (Some(pair), Ok(all)) => (pair, all),
            (ours, all) => {
                let failed = match (ours, all) {
                    (_, Err(e)) => format!("interfaces: {e}"),
                    _ => "no bond has this Ethernet address".into(),
                };
                let failed = Some(failed);
                return self.host.reply(&LaneReply { n, failed });
            }
        };
        if asked.action == VfAction::Use {
            self.plan.keep();
            return self.host.reply(&LaneReply { n, failed: None });
        }
        let vfs = self.plan.reclaim(&pair, &all);
        let active = all.iter().find(|l| l.index == pair.bond);
        let active = active.and_then(|bond| bond.active);
        let failed = match active {
            Some(active) if active == pair.nic => None,
            _ => set_active_port(pair.bond, pair.nic).err(),
        };
        // the answer comes first: from now on the host may send all packets to the paravirtual NIC
        let failed = failed.map(|e| format!("cannot activate the paravirtual NIC: {e}"));
        self.report.releases += u64::from(failed.is_none());
        self.host.reply(&LaneReply { n, failed });
        vfs.into_iter().for_each(release_vf);
    }

    fn end(&mut self) {
        if let Some(pair) = self.pair.take() {
            self.report.why = bond::dismantle(&pair).err();
            if let Some(why) = &self.report.why {
                eprintln!("viola-agent: lane: {why}; `viola-agent restore` tries again");
            }
        }
    }
}

/// Adds a VF to the bond. The bond accepts only an interface that is down, and takes it up.
fn add_port(pair: &Pair, vf: u32) -> io::Result<()> {
    set_up(vf, false)?;
    set_master(vf, Some(pair.bond))
}
