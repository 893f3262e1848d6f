// SPDX-License-Identifier: Apache-2.0
//! A pool: one NIC and its VFs.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use viola_lanes::{Eswitch, LaneError, Mac, Pf, PfEswitch, VfDevice, VfSettings};
use viola_netdev::Link;
use viola_policy::lanes::sizing::{self, Capacity};

use super::observe::guests::GuestNic;
use viola_config::lanes as config;

/// A NIC that failed is tried again after this time.
const RETRY_DELAY: Duration = Duration::from_secs(5);

/// State of a pool.
#[derive(Debug)]
pub struct Pool {
    /// Its section of the configuration.
    pub config: config::Pool,
    /// Its VFs, by index; none while the NIC does not work.
    pub vfs: Vec<VfDevice>,
    /// Reason the NIC does not work.
    pub why: Option<String>,
    /// Whether the PF is a port of the bridge.
    uplink: bool,
    /// Guests that the NIC's switch knows behind the PF.
    behind: BTreeSet<Mac>,
    next: Option<Instant>,
}

impl Pool {
    /// A pool without VFs. The first [`Pool::check`] reads the NIC.
    pub fn new(config: config::Pool) -> Self {
        Self {
            config,
            vfs: Vec::new(),
            why: None,
            uplink: false,
            behind: BTreeSet::new(),
            next: None,
        }
    }

    fn pf(&self) -> Pf {
        Pf::new(&self.config.pf)
    }

    /// The NIC's switch.
    pub fn card(&self) -> PfEswitch {
        PfEswitch {
            pf: self.config.pf.clone(),
            uplink: self.uplink,
            port: None,
        }
    }

    /// The NIC's switch, with the bridge port of a guest's paravirtual NIC.
    pub fn card_of(&self, nic: Option<&GuestNic>) -> PfEswitch {
        PfEswitch {
            port: nic.map(|n| n.interface.clone()),
            ..self.card()
        }
    }

    fn capacity(&self) -> Capacity {
        const M: u64 = 1_000_000;
        Capacity {
            bandwidth: u64::from(self.config.mbit) * M,
            reserve: u64::from(self.config.reserve_mbit) * M,
            per_vf: u64::from(self.config.vf_mbit.max(1)) * M,
            created: self.vfs.len() as u32,
        }
    }

    /// Number of VFs that may be granted.
    pub fn usable(&self) -> u32 {
        match self.config.mbit {
            0 => self.vfs.len() as u32,
            _ => sizing::usable(self.capacity()),
        }
    }

    /// VLAN and rate limit (Mbit/s, 0 for none) of a granted VF.
    pub fn terms(&self) -> VfSettings {
        let mbit = sizing::rate(self.capacity()) / 1_000_000;
        VfSettings {
            vlan: self.config.vlan,
            max_rate: match self.config.mbit {
                0 => 0,
                _ => u32::try_from(mbit).unwrap_or(u32::MAX),
            },
        }
    }

    /// Checks the NIC: `Some(true)` when it works from now on, `Some(false)` when it no longer works.
    pub fn check(&mut self, now: Instant, links: &[Link]) -> Option<bool> {
        if !self.vfs.is_empty() {
            self.check_uplink(links);
            let why = match self.pf().num_vfs() {
                Ok(made) if made as usize >= self.vfs.len() => return None,
                Ok(_) => "its VFs were taken off".to_owned(),
                Err(e) => e.to_string(),
            };
            self.vfs.clear();
            self.behind.clear();
            self.why = Some(why);
            return Some(false);
        }
        if self.next.is_some_and(|next| now < next) {
            return None;
        }
        self.next = Some(now + RETRY_DELAY);
        match self.start(links) {
            Ok(vfs) => {
                self.vfs = vfs;
                self.why = None;
                Some(true)
            }
            Err(why) => {
                self.why = Some(why);
                None
            }
        }
    }

    /// The PF may become or stop being the uplink of the bridge at any time.
    fn check_uplink(&mut self, links: &[Link]) {
        let named = |name: &str| links.iter().find(|l| l.name == name);
        let (pf, bridge) = (named(&self.config.pf), named(&self.config.bridge));
        let (Some(pf), Some(bridge)) = (pf, bridge) else {
            return;
        };
        let uplink = pf.master == Some(bridge.index);
        if uplink != self.uplink {
            self.uplink = uplink;
            for mac in std::mem::take(&mut self.behind) {
                // The switch is told again when the PF becomes the uplink.
                let _ = viola_netdev::set_nic_fdb(pf.index, mac, false);
            }
        }
    }

    fn start(&mut self, links: &[Link]) -> Result<Vec<VfDevice>, String> {
        let named = |name: &str| links.iter().find(|l| l.name == name);
        let (name, bridge) = (&self.config.pf, &self.config.bridge);
        let pf = named(name).ok_or(format!("there is no interface {name}"))?;
        let bridge_link = named(bridge).ok_or(format!("there is no bridge {bridge}"))?;
        let filtering = Path::new("/sys/class/net")
            .join(bridge)
            .join("bridge/vlan_filtering");
        if std::fs::read_to_string(filtering).is_ok_and(|on| on.trim() == "1") {
            return Err(format!(
                "{bridge} filters VLANs, so its ports may be in different networks; use a bridge for each of them"
            ));
        }
        self.uplink = pf.master == Some(bridge_link.index);
        // The NIC sets the link state of its VFs while it is up.
        if !pf.up {
            return Err(format!("{name} is down; bring it up first"));
        }
        self.pf()
            .ensure_vfs(self.config.vfs)
            .map_err(|e| e.to_string())
    }

    /// Tells the NIC's switch that guests without a VF are behind the PF, where the PF is the
    /// uplink of the bridge. Without that, packets from VFs do not reach these guests.
    ///
    /// # Errors
    /// When the kernel refuses an address.
    pub fn announce(&mut self, guests: impl Iterator<Item = Mac>) -> Result<(), LaneError> {
        if !self.uplink || self.vfs.is_empty() {
            return Ok(());
        }
        let new: Vec<Mac> = guests.filter(|mac| !self.behind.contains(mac)).collect();
        for mac in new {
            self.behind.insert(mac);
            self.card().route_to_pf(mac)?;
        }
        Ok(())
    }

    /// Takes the address of a guest that lost its VF off that VF. Where the PF is the uplink of the
    /// bridge, the NIC's switch then sends the guest's packets to the PF.
    pub fn release(&self, vf: u32, mac: Mac) {
        // Both may fail, since the NIC may be gone, too.
        let _ = self.card().withdraw(vf, mac);
        if self.uplink {
            let _ = self.card().route_to_pf(mac);
        }
    }
}
