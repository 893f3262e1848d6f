// SPDX-License-Identifier: Apache-2.0
//! The loop of lanes: check the NICs, sample their traffic, decide, move VFs.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::time::{Duration, Instant};

use viola_host::{Vm, VmId};
use viola_lanes::{Entry, Eswitch, Journal, Mac, PfEswitch, Presence, VfDevice};
use viola_netdev::Link;
use viola_policy::lanes::{self as policy, CpuTime, Decision, Vf};
use viola_proto::lanes::{self as shown, Counts, LaneSetting};

use super::Overrides;
use super::observe::counters::{NicCounter, vf_counters};
use super::observe::guests::{CgroupTimes, GuestNic, NicFinder};
use super::pool::Pool;
use super::restore::take_back_one;
use crate::background::Steps;
use viola_cli::log::{self, Level};
use viola_config::{Accelerator, Config};

/// The daemon checks this often whether guests still have their VFs.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// Switches that `viola lanes` shows.
pub(super) const MAX_SWITCHES: usize = 64;
/// DI2 of a guest whose CPU time is unknown: it counts as waiting for I/O.
pub(super) const DI2_UNKNOWN: f64 = 10_000.0;
/// Time between two steps before there is a configuration.
const IDLE_INTERVAL: Duration = Duration::from_millis(500);
/// Lines that are logged once, at most.
const MAX_LOGGED: usize = 1000;
/// The holder of a VF that another program uses has this number, less the index of the VF.
pub(super) const FOREIGN: u32 = u32::MAX;

/// State of lanes.
pub struct Manager {
    pub(super) journal: Journal,
    pub(super) config: Option<Config>,
    pub(super) policy: policy::VfScheduler,
    pub(super) pools: Vec<Pool>,
    pub(super) vms: Vec<Vm>,
    pub(super) cpus: BTreeMap<VmId, Vec<CpuTime>>,
    /// Whether the VMs of this host are known.
    pub(super) has_vms: bool,
    pub(super) overrides: Overrides,
    pub(super) cgroups: CgroupTimes,
    pub(super) nics: Vec<GuestNic>,
    pub(super) left_out: Vec<String>,
    /// Number of each identity, for the policy.
    pub(super) numbers: BTreeMap<String, u32>,
    pub(super) counts: BTreeMap<(String, String), NicCounter>,
    pub(super) decision: Decision,
    pub(super) switches: VecDeque<(Instant, shown::Switch)>,
    pub(super) totals: Counts,
    pub(super) stopped: Option<String>,
    pub(super) started: Instant,
    pub(super) checked: Option<Instant>,
    /// When the next step is due.
    due: Instant,
    /// Lines that were logged.
    pub(super) logged: BTreeSet<String>,
    /// Guests that got a VF since the last check: when, the NIC's switch, and their MAC address.
    pub(super) granted: Vec<(Instant, PfEswitch, Mac)>,
    /// VFs of NICs outside the configuration that the daemon tried to take back.
    pub(super) others: BTreeSet<(String, u32)>,
}

impl Manager {
    /// Reads the journal of an earlier daemon. Changes nothing before the first step.
    pub fn new(journal: &Path) -> Self {
        let (journal, warning) = Journal::read(journal);
        if let Some(warning) = warning {
            log::line(Level::Warning, format!("lanes: {warning}"));
        }
        Self {
            journal,
            config: None,
            policy: policy::VfScheduler::new(policy::Config::default()),
            pools: Vec::new(),
            vms: Vec::new(),
            cpus: BTreeMap::new(),
            has_vms: false,
            overrides: Overrides::new(),
            cgroups: CgroupTimes::default(),
            nics: Vec::new(),
            left_out: Vec::new(),
            numbers: BTreeMap::new(),
            counts: BTreeMap::new(),
            decision: Decision::default(),
            switches: VecDeque::new(),
            totals: Counts::default(),
            stopped: None,
            started: Instant::now(),
            checked: None,
            due: Instant::now(),
            logged: BTreeSet::new(),
            granted: Vec::new(),
            others: BTreeSet::new(),
        }
    }

    /// Takes a configuration. When a pool changed, all VFs are taken back first.
    pub fn configure(&mut self, config: &Config) {
        let same = |pool: &Pool| config.lanes.pools.contains(&pool.config);
        if !self.pools.iter().all(same) {
            self.take_all("the configuration has another pool");
            self.pools.clear();
        }
        if self.pools.len() != config.lanes.pools.len() {
            self.take_all("the configuration has another pool");
            self.pools = config.lanes.pools.iter().cloned().map(Pool::new).collect();
        }
        self.policy.set_config(config.lanes.policy());
        self.counts.clear();
        self.config = Some(config.clone());
    }

    /// Takes the VMs of this host, and how each vCPU spent its time.
    pub fn set_vms(&mut self, vms: Vec<Vm>, cpus: BTreeMap<VmId, Vec<CpuTime>>) {
        self.vms = vms;
        self.cpus = cpus;
        self.has_vms = true;
    }

    /// Takes the lane settings of `viola set`.
    pub fn set_overrides(&mut self, overrides: Overrides) {
        self.overrides = overrides;
    }

    /// Takes all VFs back, and grants none until [`Manager::resume`].
    pub fn stop(&mut self, why: &str) {
        self.stopped = Some(why.to_owned());
        self.take_all(why);
    }

    /// Starts again after [`Manager::stop`].
    pub fn resume(&mut self) {
        self.stopped = None;
    }

    /// Checks the NICs, samples their traffic, decides, and moves VFs.
    fn sample_and_move(&mut self) {
        let Some(config) = self.config.clone() else {
            return;
        };
        let has_work = !config.lanes.pools.is_empty() || !self.journal.entries().is_empty();
        if !self.has_vms || !has_work {
            return;
        }
        let links = match viola_netdev::links() {
            Ok(links) => links,
            Err(e) => return self.log_once(format!("interfaces: {e}")),
        };
        let finder = NicFinder {
            config: &config,
            vms: &self.vms,
            cpus: &self.cpus,
            links: &links,
        };
        (self.nics, self.left_out) = finder.nics(&mut self.cgroups);
        self.leave_out_duplicates();
        for what in self.left_out.clone() {
            self.log_once(what);
        }
        self.check_pools(&links);
        self.take_from_other_nics(&config, &links);
        self.sample(config.lanes.samples as usize);
        self.check_guests();
        if self.stopped.is_none() {
            self.decide();
        }
    }

    /// Logs a warning once.
    pub(super) fn log_once(&mut self, what: String) {
        if self.logged.len() < MAX_LOGGED && self.logged.insert(what.clone()) {
            log::line(Level::Warning, format!("lanes: {what}"));
        }
    }

    /// Leaves out guests with the same MAC address in one network: a VF of one would get the packets of the other.
    pub(super) fn leave_out_duplicates(&mut self) {
        let mut seen: BTreeMap<(String, Mac), Vec<String>> = BTreeMap::new();
        for nic in &self.nics {
            let key = (nic.bridge.clone(), nic.mac);
            seen.entry(key).or_default().push(nic.name.clone());
        }
        for ((bridge, mac), names) in seen.into_iter().filter(|(_, names)| names.len() > 1) {
            self.nics.retain(|n| n.bridge != bridge || n.mac != mac);
            let mac = viola_lanes::format_mac(mac);
            let names = names.join(" and ");
            self.left_out
                .push(format!("{names} have the same address {mac} at {bridge}"));
        }
    }

    pub(super) fn network(&self, bridge: &str) -> u32 {
        let at = self.pools.iter().position(|p| p.config.bridge == bridge);
        at.map_or(u32::MAX, |at| at as u32)
    }

    pub(super) fn number(&mut self, id: &str) -> u32 {
        let next = self.numbers.len() as u32;
        *self.numbers.entry(id.to_owned()).or_insert(next)
    }

    pub(super) fn name(&self, number: u32) -> String {
        let has = |(_, n): &(&String, &u32)| **n == number;
        let found = self.numbers.iter().find(has);
        found.map_or_else(|| "another program".to_owned(), |(id, _)| id.clone())
    }

    pub(super) fn check_pools(&mut self, links: &[Link]) {
        let now = Instant::now();
        for at in 0..self.pools.len() {
            let changed = self.pools[at].check(now, links);
            let pf = self.pools[at].config.pf.clone();
            match changed {
                Some(true) => {
                    let what = format!("lanes: {pf}: {} VFs", self.pools[at].vfs.len());
                    log::line(Level::Notice, what);
                    self.adopt(at);
                }
                Some(false) => {
                    let why = self.pools[at].why.clone().unwrap_or_default();
                    log::line(Level::Warning, format!("lanes: {pf}: {why}"));
                    self.give_up(at);
                }
                None => {
                    if let Some(why) = self.pools[at].why.clone() {
                        self.log_once(format!("{pf}: {why}"));
                    }
                }
            }
            let bridge = self.pools[at].config.bridge.clone();
            let without =
                |n: &&GuestNic| n.bridge == bridge && self.entry_of(&n.id, None).is_none();
            let macs: Vec<Mac> = self.nics.iter().filter(without).map(|n| n.mac).collect();
            if let Err(e) = self.pools[at].announce(macs.into_iter()) {
                self.log_once(e.to_string());
            }
        }
    }

    /// Takes back VFs of the journal whose NIC is not in the configuration.
    fn take_from_other_nics(&mut self, config: &Config, links: &[Link]) {
        let is_ours = |e: &Entry| config.lanes.pools.iter().any(|p| p.pf == e.pf);
        for entry in self.journal.entries().to_vec() {
            if !is_ours(&entry) && self.others.insert((entry.pf.clone(), entry.vf)) {
                let done = take_back_one(&mut self.journal, &entry, links);
                log::line(Level::Notice, format!("lanes: {done}"));
            }
        }
    }

    /// The journal's entry of a guest, or of its VF of one NIC.
    fn entry_of(&self, id: &str, pf: Option<&str>) -> Option<&Entry> {
        let mut entries = self.journal.entries().iter();
        entries.find(|e| e.guest == id && pf.is_none_or(|pf| e.pf == pf))
    }

    pub(super) fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    fn sample(&mut self, samples: usize) {
        let interrupts = std::fs::read_to_string("/proc/interrupts").unwrap_or_default();
        let mut by_pf = BTreeMap::new();
        for pool in self.pools.iter().filter(|p| !p.vfs.is_empty()) {
            let vfs = viola_netdev::vfs(&pool.config.pf).unwrap_or_default();
            by_pf.insert(pool.config.pf.clone(), vfs);
        }
        for nic in &self.nics {
            let network = self.network(&nic.bridge);
            let entry = self.entry_of(&nic.id, None);
            let held = entry.and_then(|e| {
                let at = self.pools.iter().position(|p| p.config.pf == e.pf)?;
                let same = self.network(&self.pools[at].config.bridge) == network;
                let vf = self.pools[at].vfs.iter().find(|v| v.index == e.vf)?;
                let vfs = by_pf.get(&e.pf);
                let by_driver = vfs.and_then(|v| v.iter().find(|v| v.index == e.vf));
                let by_driver = by_driver.map(|v| v.counters);
                let counters = vf_counters(&nic.access, vf, by_driver, &interrupts);
                same.then_some((at as u32, e.vf, counters))
            });
            let key = (nic.id.clone(), nic.interface.clone());
            let count = self
                .counts
                .entry(key)
                .or_insert_with(|| NicCounter::new(samples));
            count.add(nic.counters, held);
        }
        let nics = &self.nics;
        let is_there =
            |key: &(String, String)| nics.iter().any(|n| n.id == key.0 && n.interface == key.1);
        self.counts.retain(|key, _| is_there(key));
    }

    /// Checks whether guests still have their VFs.
    fn check_guests(&mut self) {
        let now = Instant::now();
        if self.checked.is_some_and(|at| now - at < CHECK_INTERVAL) {
            return;
        }
        self.checked = Some(now);
        self.announce_granted(now);
        for entry in self.journal.entries().to_vec() {
            let Some((at, vf)) = self.place_of(&entry) else {
                continue;
            };
            let mut guest = entry.access.clone();
            match guest.attachment().presence(&vf) {
                Ok(Presence::Absent) => {}
                // The link of the VF was down, and the guest uses its paravirtual NIC.
                Ok(Presence::Idle) => {
                    if let Err(e) = guest.attachment().resume(&vf) {
                        self.log_once(format!("{}: {e}", entry.guest));
                    }
                    continue;
                }
                Ok(Presence::InUse) | Err(_) => continue,
            }
            self.lost(at, &vf, &entry);
            let place = Vf {
                pool: at as u32,
                index: vf.index,
            };
            self.policy.grant_failed(self.now(), place);
        }
    }

    /// Lets the bridge forget guests with a new VF again: until the VF was up, the guest sent on its paravirtual NIC, and the bridge
    /// learned its address there.
    fn announce_granted(&mut self, now: Instant) {
        let (due, later) = std::mem::take(&mut self.granted)
            .into_iter()
            .partition::<Vec<_>, _>(|(at, _, _)| now - *at >= CHECK_INTERVAL);
        self.granted = later;
        for (_, card, mac) in due {
            if self.journal.entries().iter().any(|e| e.mac == mac) {
                card.forget_port(mac);
            }
        }
    }

    /// The NIC of a guest in the network of a pool.
    pub(super) fn nic_of(&self, at: usize, id: &str) -> Option<&GuestNic> {
        let bridge = &self.pools[at].config.bridge;
        let mut nics = self.nics.iter();
        nics.find(|n| n.id == id && n.bridge == *bridge)
    }

    pub(super) fn place_of(&self, entry: &Entry) -> Option<(usize, VfDevice)> {
        let at = self.pools.iter().position(|p| p.config.pf == entry.pf)?;
        let vf = self.pools[at].vfs.iter().find(|v| v.index == entry.vf)?;
        Some((at, vf.clone()))
    }

    /// Whether the configuration allows viola to choose who gets a VF.
    fn may_choose(&self) -> bool {
        (self.config.as_ref()).is_none_or(|config| config.allows(Accelerator::Lanes))
    }

    /// The lane setting of a guest, and its source.
    pub(super) fn setting(&self, nic: &GuestNic) -> (LaneSetting, Option<viola_proto::Source>) {
        match (self.overrides.get(&nic.id), nic.setting) {
            (Some((lane, source)), _) => (*lane, Some(*source)),
            (None, Some(lane)) => (lane, Some(viola_proto::Source::Config)),
            (None, None) => match self.may_choose() {
                true => (LaneSetting::Auto, None),
                false => (LaneSetting::Never, None),
            },
        }
    }
}

impl Steps for Manager {
    type Status = shown::Lanes;

    fn due(&self) -> Instant {
        self.due
    }

    fn step(&mut self) {
        let start = Instant::now();
        self.sample_and_move();
        let interval = self.config.as_ref().map(|c| c.lanes.sample());
        self.due = start + interval.unwrap_or(IDLE_INTERVAL);
    }

    fn status(&self) -> shown::Lanes {
        self.show()
    }
}

#[cfg(test)]
mod tests;
