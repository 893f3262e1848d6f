// SPDX-License-Identifier: Apache-2.0
//! What the control socket shows of lanes.

use std::time::Instant;

use viola_lanes::VfDevice;
use viola_policy::lanes as policy;
use viola_proto::lanes as shown;

use super::manager::Manager;
use super::observe::guests::GuestNic;
use crate::lanes::pool::Pool;

impl Manager {
    /// Pools, NICs, switches and counts.
    pub(super) fn show(&self) -> shown::Lanes {
        let why = match (&self.stopped, self.pools.is_empty()) {
            (Some(by), _) => format!("{by}; viola start goes on"),
            (None, true) => "the configuration has no [[lanes.pool]]".to_owned(),
            (None, false) => String::new(),
        };
        let pool = |pool: &Pool| {
            let holder = |vf: &VfDevice| {
                let mut entries = self.journal.entries().iter();
                let found = entries.find(|e| e.pf == vf.pf.name && e.vf == vf.index);
                found.map(|e| e.guest.clone()).unwrap_or_default()
            };
            shown::Pool {
                pf: pool.config.pf.clone(),
                bridge: pool.config.bridge.clone(),
                usable: pool.usable(),
                holders: pool.vfs.iter().map(holder).collect(),
                why: pool.why.clone().unwrap_or_default(),
            }
        };
        let switch = |(at, switch): &(Instant, shown::Switch)| shown::Switch {
            ago_ns: at.elapsed().as_nanos() as u64,
            ..switch.clone()
        };
        shown::Lanes {
            on: why.is_empty(),
            why,
            pools: self.pools.iter().map(pool).collect(),
            nics: self.nics.iter().map(|n| self.nic_status(n)).collect(),
            switches: self.switches.iter().map(switch).collect(),
            counts: self.totals,
        }
    }

    fn nic_status(&self, nic: &GuestNic) -> shown::Nic {
        let number = self.numbers.get(&nic.id).copied();
        let network = self.network(&nic.bridge);
        let mut standings = self.decision.nics.iter();
        let is_it = |s: &&policy::NicStatus| Some(s.nic.vm) == number && s.nic.network == network;
        let standing = standings.find(is_it);
        let key = (nic.id.clone(), nic.interface.clone());
        let count = self.counts.get(&key);
        let (lane, source) = self.setting(nic);
        let bridge_of = |pf: &str| {
            let pool = self.pools.iter().find(|p| p.config.pf == pf);
            pool.map(|p| p.config.bridge.as_str())
        };
        let mut entries = self.journal.entries().iter();
        let entry = entries.find(|e| e.guest == nic.id && bridge_of(&e.pf) == Some(&nic.bridge));
        shown::Nic {
            guest: nic.id.clone(),
            name: nic.name.clone(),
            interface: nic.interface.clone(),
            bridge: nic.bridge.clone(),
            lane,
            source,
            kind: standing.map(|s| s.kind.to_string()).unwrap_or_default(),
            intensity: standing.map_or(0.0, |s| s.intensity),
            freq: count.map_or(0.0, |c| c.samples.traffic().freq),
            di2: nic.di2,
            vf: entry.map(|e| (e.pf.clone(), e.vf)),
            why: standing
                .map(|s| self.reason_text(s.why))
                .unwrap_or_default(),
            packets: nic.counters.packets(),
            bytes: nic.counters.bytes(),
            vf_packets: count.map_or(0, |c| c.vf.packets()),
            vf_bytes: count.map_or(0, |c| c.vf.bytes()),
        }
    }
}
