// SPDX-License-Identifier: Apache-2.0
//! The loop of lanes: look after the NICs, sample, decide, move.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::time::{Duration, Instant};

use viola_host::{Vm, VmId};
use viola_lanes::{
    Attachment, Entry, Eswitch, Journal, LaneError, Mac, PfEswitch, Presence, VfDevice,
};
use viola_netdev::Link;
use viola_policy::lanes::{self as policy, Action, CpuTime, Decision, NicObservation, Reason, Vf};
use viola_proto::lanes::{self as shown, Counts, LaneSetting};

use crate::lanes::Said;
use crate::lanes::observe::guests::{Count, Groups, Nic, Sight, vf_counters};
use crate::lanes::pool::Pool;
use crate::lanes::restore::take_one;
use viola_cli::log::{self, Level};
use viola_config::Config;

/// Time between two looks whether guests still have their VFs.
const LOOK_AGAIN: Duration = Duration::from_secs(2);
/// Switches that are remembered.
pub(super) const REMEMBERED: usize = 64;
/// DI2 of a guest of which it cannot be found: it counts as waiting for I/O.
const DI2_UNKNOWN: f64 = 10_000.0;
/// VFs that somebody else has taken: number of their holder, less the VF's.
pub(super) const FOREIGN: u32 = u32::MAX;

/// Everything that the loop knows.
pub struct Keeper {
    pub(super) journal: Journal,
    pub(super) config: Option<Config>,
    pub(super) policy: policy::VfScheduler,
    pub(super) pools: Vec<Pool>,
    pub(super) vms: Vec<Vm>,
    pub(super) cpus: BTreeMap<VmId, Vec<CpuTime>>,
    /// Whether it is known what VMs there are.
    pub(super) seen: bool,
    pub(super) said: Said,
    pub(super) groups: Groups,
    pub(super) nics: Vec<Nic>,
    pub(super) left_out: Vec<String>,
    /// Of identities, for the policy.
    pub(super) numbers: BTreeMap<String, u32>,
    pub(super) counts: BTreeMap<(String, String), Count>,
    pub(super) decision: Decision,
    pub(super) switches: VecDeque<(Instant, shown::Switch)>,
    pub(super) totals: Counts,
    pub(super) stopped: Option<String>,
    pub(super) begun: Instant,
    pub(super) looked: Option<Instant>,
    pub(super) told: BTreeSet<String>,
    /// Guests that got a VF a moment ago, when, and their addresses.
    pub(super) went: Vec<(Instant, PfEswitch, Mac)>,
    /// VFs of other NICs that were tried to be taken back.
    pub(super) others: BTreeSet<(String, u32)>,
}

impl Keeper {
    /// Reads what an earlier daemon left; nothing is touched before [`Keeper::step`].
    pub fn new(journal: &Path) -> Self {
        let (journal, said) = Journal::read(journal);
        if let Some(said) = said {
            log::line(Level::Warning, format!("lanes: {said}"));
        }
        Self {
            journal,
            config: None,
            policy: policy::VfScheduler::new(policy::Config::default()),
            pools: Vec::new(),
            vms: Vec::new(),
            cpus: BTreeMap::new(),
            seen: false,
            said: Said::new(),
            groups: Groups::default(),
            nics: Vec::new(),
            left_out: Vec::new(),
            numbers: BTreeMap::new(),
            counts: BTreeMap::new(),
            decision: Decision::default(),
            switches: VecDeque::new(),
            totals: Counts::default(),
            stopped: None,
            begun: Instant::now(),
            looked: None,
            told: BTreeSet::new(),
            went: Vec::new(),
            others: BTreeSet::new(),
        }
    }

    /// Time between two steps.
    pub fn interval(&self) -> Duration {
        let sample = |c: &Config| c.lanes.sample;
        self.config
            .as_ref()
            .map_or(Duration::from_millis(500), sample)
    }

    /// Takes another configuration. Pools that are as before go on; of those that are gone all VFs are taken back.
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
        self.policy.set_config(config.lanes.policy);
        self.counts.clear();
        self.config = Some(config.clone());
    }

    /// What VMs there are.
    pub fn see(&mut self, vms: Vec<Vm>, cpus: BTreeMap<VmId, Vec<CpuTime>>) {
        self.vms = vms;
        self.cpus = cpus;
        self.seen = true;
    }

    /// What was said by `viola set`.
    pub fn said(&mut self, said: Said) {
        self.said = said;
    }

    /// Takes all VFs back, and gives none until [`Keeper::go_on`].
    pub fn stop(&mut self, why: &str) {
        self.stopped = Some(why.to_owned());
        self.take_all(why);
    }

    /// Goes on.
    pub fn go_on(&mut self) {
        self.stopped = None;
    }

    /// One sample, and what follows from it.
    pub fn step(&mut self) {
        let Some(config) = self.config.clone() else {
            return;
        };
        let has_work = !config.lanes.pools.is_empty() || !self.journal.entries().is_empty();
        if !self.seen || !has_work {
            return;
        }
        let links = match viola_netdev::links() {
            Ok(links) => links,
            Err(e) => return self.tell(format!("interfaces: {e}")),
        };
        let sight = Sight {
            config: &config,
            vms: &self.vms,
            cpus: &self.cpus,
            links: &links,
        };
        (self.nics, self.left_out) = sight.nics(&mut self.groups);
        self.leave_out_twins();
        for what in self.left_out.clone() {
            self.tell(what);
        }
        self.look_after_pools(&links);
        self.take_from_others(&config, &links);
        self.sample(config.lanes.samples);
        self.look_again();
        if self.stopped.is_none() {
            self.decide();
        }
    }

    /// Says something once.
    pub(super) fn tell(&mut self, what: String) {
        if self.told.len() < 1000 && self.told.insert(what.clone()) {
            log::line(Level::Warning, format!("lanes: {what}"));
        }
    }

    /// Two guests with one address in one network: a VF of one would take the other's packets.
    fn leave_out_twins(&mut self) {
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
        found.map_or_else(|| "somebody else".to_owned(), |(id, _)| id.clone())
    }

    fn look_after_pools(&mut self, links: &[Link]) {
        let now = Instant::now();
        for at in 0..self.pools.len() {
            let changed = self.pools[at].look_after(now, links);
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
                        self.tell(format!("{pf}: {why}"));
                    }
                }
            }
            let bridge = self.pools[at].config.bridge.clone();
            let without = |n: &&Nic| n.bridge == bridge && self.entry_of(&n.id, None).is_none();
            let macs: Vec<Mac> = self.nics.iter().filter(without).map(|n| n.mac).collect();
            if let Err(e) = self.pools[at].see(macs.into_iter()) {
                self.tell(e.to_string());
            }
        }
    }

    /// Takes back VFs of NICs that the configuration no longer has, from what an earlier daemon noted.
    fn take_from_others(&mut self, config: &Config, links: &[Link]) {
        let is_ours = |e: &Entry| config.lanes.pools.iter().any(|p| p.pf == e.pf);
        for entry in self.journal.entries().to_vec() {
            if !is_ours(&entry) && self.others.insert((entry.pf.clone(), entry.vf)) {
                let done = take_one(&mut self.journal, &entry, links);
                log::line(Level::Notice, format!("lanes: {done}"));
            }
        }
    }

    /// What the journal has of a guest, or of its VF of one NIC.
    fn entry_of(&self, id: &str, pf: Option<&str>) -> Option<&Entry> {
        let mut entries = self.journal.entries().iter();
        entries.find(|e| e.guest == id && pf.is_none_or(|pf| e.pf == pf))
    }

    pub(super) fn now(&self) -> u64 {
        self.begun.elapsed().as_nanos() as u64
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
                let told = vfs.and_then(|v| v.iter().find(|v| v.index == e.vf));
                let told = told.map(|v| v.counters);
                let counters = vf_counters(&nic.access, vf, told, &interrupts);
                same.then_some((at as u32, e.vf, counters))
            });
            let key = (nic.id.clone(), nic.interface.clone());
            let count = self
                .counts
                .entry(key)
                .or_insert_with(|| Count::new(samples));
            count.take(nic.counters, held);
        }
        let nics = &self.nics;
        let is_there =
            |key: &(String, String)| nics.iter().any(|n| n.id == key.0 && n.interface == key.1);
        self.counts.retain(|key, _| is_there(key));
    }

    /// Whether guests still have what they were given.
    fn look_again(&mut self) {
        let now = Instant::now();
        if self.looked.is_some_and(|at| now - at < LOOK_AGAIN) {
            return;
        }
        self.looked = Some(now);
        self.forget_again(now);
        for entry in self.journal.entries().to_vec() {
            let Some((at, vf)) = self.place_of(&entry) else {
                continue;
            };
            let mut guest = entry.access.clone();
            match guest.presence(&vf) {
                Ok(Presence::Absent) => {}
                // its link was down, and the guest went over by itself
                Ok(Presence::Idle) => {
                    if let Err(e) = guest.resume(&vf) {
                        self.tell(format!("{}: {e}", entry.guest));
                    }
                    continue;
                }
                Ok(Presence::InUse) | Err(_) => continue,
            }
            self.let_go(at, &vf, &entry);
            let place = Vf {
                pool: at as u32,
                index: vf.index,
            };
            self.policy.grant_failed(self.now(), place);
        }
    }

    /// What a guest sent while its VF was there and not up yet has told the bridge again that it is at its paravirtual path.
    fn forget_again(&mut self, now: Instant) {
        let (due, later) = std::mem::take(&mut self.went)
            .into_iter()
            .partition::<Vec<_>, _>(|(at, _, _)| now - *at >= LOOK_AGAIN);
        self.went = later;
        for (_, card, mac) in due {
            if self.journal.entries().iter().any(|e| e.mac == mac) {
                card.forget_port(mac);
            }
        }
    }

    /// A guest's NIC in the network of a pool.
    pub(super) fn nic_of(&self, at: usize, id: &str) -> Option<&Nic> {
        let bridge = &self.pools[at].config.bridge;
        let mut nics = self.nics.iter();
        nics.find(|n| n.id == id && n.bridge == *bridge)
    }

    pub(super) fn place_of(&self, entry: &Entry) -> Option<(usize, VfDevice)> {
        let at = self.pools.iter().position(|p| p.config.pf == entry.pf)?;
        let vf = self.pools[at].vfs.iter().find(|v| v.index == entry.vf)?;
        Some((at, vf.clone()))
    }

    /// What holds for a guest, and who said so.
    pub(super) fn setting(&self, nic: &Nic) -> (LaneSetting, Option<viola_proto::Source>) {
        match (self.said.get(&nic.id), nic.setting) {
            (Some((lane, source)), _) => (*lane, Some(*source)),
            (None, Some(lane)) => (lane, Some(viola_proto::Source::Config)),
            (None, None) => (LaneSetting::Auto, None),
        }
    }

    fn observed(&mut self) -> Vec<NicObservation> {
        let mut observed = Vec::new();
        for nic in self.nics.clone() {
            let vm = self.number(&nic.id);
            let key = (nic.id.clone(), nic.interface.clone());
            let Some(count) = self.counts.get(&key) else {
                continue;
            };
            observed.push(NicObservation {
                nic: policy::Nic {
                    vm,
                    network: self.network(&nic.bridge),
                },
                di2: nic.di2.unwrap_or(DI2_UNKNOWN),
                traffic: count.samples.traffic(),
                setting: match self.setting(&nic).0 {
                    LaneSetting::Auto => policy::Setting::Auto,
                    LaneSetting::Pin => policy::Setting::Pin,
                    LaneSetting::Never => policy::Setting::Never,
                },
                // a guest's pair has one VF in it
                max_vfs: 1,
                attach_time: count.attach,
            });
        }
        let foreign = self
            .policy
            .holders()
            .filter(|(_, nic)| nic.vm > FOREIGN - 1000);
        observed.extend(foreign.map(|(_, nic)| NicObservation {
            nic,
            di2: 0.0,
            traffic: policy::Traffic::default(),
            setting: policy::Setting::Pin,
            max_vfs: 1,
            attach_time: 0,
        }));
        observed
    }

    fn decide(&mut self) {
        let pools: Vec<policy::Pool> = (0..)
            .zip(&self.pools)
            .filter(|(_, p)| !p.vfs.is_empty())
            .map(|(id, p)| policy::Pool {
                id,
                network: self.network(&p.config.bridge),
                vfs: p.usable(),
            })
            .collect();
        let observed = self.observed();
        self.decision = self.policy.decide(self.now(), &pools, &observed);
        let mut stuck = BTreeSet::new();
        for action in self.decision.actions.clone() {
            match action {
                Action::Revoke { vf, nic, why } => {
                    if let Err(e) = self.revoke(vf, &self.words(why)) {
                        stuck.insert(vf);
                        self.policy.revoke_failed(self.now(), vf, nic);
                        if matches!(e, LaneError::ReleaseTimeout { .. }) {
                            self.totals.kept += 1;
                        }
                    }
                }
                Action::Grant { vf, .. } if stuck.contains(&vf) => {}
                Action::Grant { vf, nic, why } => {
                    if self.grant(vf, nic, &self.words(why)).is_err() {
                        self.totals.failed += 1;
                        self.policy.grant_failed(self.now(), vf);
                    }
                }
            }
        }
    }

    /// The policy's reason with names for numbers.
    pub(super) fn words(&self, why: Reason) -> String {
        match why {
            Reason::Exchanged {
                intensity,
                from,
                lowest,
            } if lowest >= 0.0 => {
                let from = self.name(from);
                format!("IF {intensity:.0} against {lowest:.0} of {from}")
            }
            Reason::Exchanged {
                intensity, from, ..
            } => {
                let from = self.name(from);
                format!("IF {intensity:.0}, and {from} had no use for its VF")
            }
            Reason::GaveWay { to } => format!("{} gains more from it", self.name(to)),
            why => why.to_string(),
        }
    }
}

#[cfg(test)]
mod tests;
