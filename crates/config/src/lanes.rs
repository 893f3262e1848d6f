// SPDX-License-Identifier: Apache-2.0
//! `[lanes]` and `[vm.lane]`: pools of VFs, the guests that may have one, and when a VF moves.

use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use viola_policy::lanes as policy;
use viola_proto::lanes::LaneSetting;

use crate::Conflict;
use crate::value::{duration, fraction, number, parsed};
use viola_cli::quantities::{self, quoted};

const MS: u64 = 1_000_000;
const S: u64 = 1_000 * MS;

/// Longest hold, release and retry times, ns.
const MAX_HOLD: u64 = 3_600 * S;

/// `[lanes]`
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Lanes {
    /// NICs with VFs; empty when lanes are off.
    #[serde(rename = "pool")]
    pub pools: Vec<Pool>,
    /// Network namespaces that may have a VF.
    #[serde(rename = "guest")]
    pub guests: Vec<NetnsGuest>,
    #[serde(deserialize_with = "duration::<_, { 50 * MS }, { 60 * S }>")]
    sample: u64,
    /// Number of samples in the window of a decision, 1 to 10,000.
    #[serde(deserialize_with = "number::<_, 10_000>")]
    pub samples: u32,
    #[serde(deserialize_with = "fraction::<_, 1>")]
    alpha: f64,
    #[serde(deserialize_with = "fraction::<_, 10_000>")]
    di2: f64,
    #[serde(deserialize_with = "fraction::<_, 100>")]
    freq: f64,
    #[serde(alias = "heavy", deserialize_with = "fraction::<_, 100>")]
    heavy_freq: f64,
    #[serde(deserialize_with = "fraction::<_, 100>")]
    margin: f64,
    #[serde(deserialize_with = "duration::<_, 0, MAX_HOLD>")]
    hold: u64,
    hold_per_attach: u32,
    #[serde(deserialize_with = "number::<_, 256>")]
    moves: u32,
    #[serde(deserialize_with = "release")]
    release: Option<u64>,
    #[serde(deserialize_with = "duration::<_, 0, MAX_HOLD>")]
    retry: u64,
    #[serde(alias = "patience", deserialize_with = "duration::<_, S, { 600 * S }>")]
    release_timeout: u64,
}

// No value is NaN: `fraction` checks the range of each.
impl Eq for Lanes {}

impl Default for Lanes {
    fn default() -> Self {
        let policy = policy::Config::default();
        Self {
            pools: Vec::new(),
            guests: Vec::new(),
            sample: 500 * MS,
            samples: 20,
            alpha: policy.alpha,
            di2: policy.di2,
            freq: policy.freq,
            heavy_freq: policy.heavy_freq,
            margin: policy.margin,
            hold: policy.hold,
            hold_per_attach: policy.hold_per_attach,
            moves: policy.moves as u32,
            release: policy.release,
            retry: policy.retry,
            release_timeout: 10 * S,
        }
    }
}

impl Lanes {
    /// Interval between two samples of a guest, 50 ms to 60 s.
    pub fn sample(&self) -> Duration {
        Duration::from_nanos(self.sample)
    }

    /// Time in which a guest has to release a VF before the daemon takes it, 1 s to 600 s.
    pub fn release_timeout(&self) -> Duration {
        Duration::from_nanos(self.release_timeout)
    }

    /// Thresholds of the policy (paper 004, sections 3.2 to 3.6).
    pub fn policy(&self) -> policy::Config {
        policy::Config {
            alpha: self.alpha,
            di2: self.di2,
            freq: self.freq,
            heavy_freq: self.heavy_freq,
            margin: self.margin,
            hold: self.hold,
            hold_per_attach: self.hold_per_attach,
            moves: self.moves as usize,
            release: self.release,
            retry: self.retry,
        }
    }

    /// Checks the pools and guests against each other.
    pub(super) fn check(&self) -> Result<(), Conflict> {
        for (i, pool) in self.pools.iter().enumerate() {
            let earlier = &self.pools[..i];
            let wrong = |key: &str, what: String| {
                Err(Conflict {
                    path: format!("lanes.pool.{i}.{key}"),
                    what: format!("{key}: {what}"),
                })
            };
            if earlier.iter().any(|p| p.pf == pool.pf) {
                return wrong("pf", format!("a second pool for {}", quoted(&pool.pf)));
            }
            let other = earlier.iter().find(|p| p.bridge == pool.bridge);
            if other.is_some_and(|p| p.vlan != pool.vlan) {
                let bridge = quoted(&pool.bridge);
                let what =
                    format!("another pool on {bridge} has another VLAN; a bridge is one network");
                return wrong("vlan", what);
            }
            if pool.vlan > 4094 {
                let what = format!("{} is out of range; 0 to 4094 is allowed", pool.vlan);
                return wrong("vlan", what);
            }
            if pool.mbit == 0 && (pool.reserve_mbit > 0 || pool.vf_mbit > 0) {
                return wrong("mbit", "missing; write the bandwidth of the NIC".into());
            }
            if pool.mbit > 0 && pool.vf_mbit == 0 {
                let what = "missing; write the bandwidth that each VF keeps";
                return wrong("vf_mbit", what.into());
            }
        }
        for (i, guest) in self.guests.iter().enumerate() {
            let same = |g: &&NetnsGuest| g.name == guest.name || g.netns == guest.netns;
            if let Some(other) = self.guests[..i].iter().find(same) {
                return Err(Conflict {
                    path: format!("lanes.guest.{i}.name"),
                    what: format!("name: a second [[lanes.guest]] for {}", quoted(&other.name)),
                });
            }
        }
        Ok(())
    }
}

/// `[[lanes.pool]]`: the VFs of a NIC.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pool {
    /// Network interface of the PF.
    pub pf: String,
    /// Number of VFs to create, 1 to 256.
    #[serde(deserialize_with = "number::<_, 256>")]
    pub vfs: u32,
    /// Bridge that connects the guests' paravirtual NICs to the network of this NIC.
    pub bridge: String,
    /// VLAN of that network, 0 to 4094; 0 for untagged.
    #[serde(default)]
    pub vlan: u32,
    /// Bandwidth of the NIC, Mbit/s; 0 grants all VFs without a rate limit.
    #[serde(default)]
    pub mbit: u32,
    /// Bandwidth reserved for the paravirtual NICs, Mbit/s.
    #[serde(default)]
    pub reserve_mbit: u32,
    /// Bandwidth that each VF keeps when all VFs are busy, Mbit/s.
    #[serde(default)]
    pub vf_mbit: u32,
}

/// `[[lanes.guest]]`: a network namespace that may have a VF.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetnsGuest {
    /// Name of the guest.
    pub name: String,
    /// The namespace: a path, or a name under `/run/netns`.
    #[serde(deserialize_with = "netns")]
    pub netns: PathBuf,
    /// Host end of its veth pair, a port of the bridge.
    pub host: String,
    /// Name of its bond.
    #[serde(default = "bond")]
    pub bond: String,
    /// Port of the bond on the paravirtual path.
    #[serde(default = "port")]
    pub port: String,
    /// Control group of its processes, from which DI2 is computed; without one the guest counts as bound by I/O.
    #[serde(default)]
    pub cgroup: Option<PathBuf>,
    /// Whether it may have a VF.
    #[serde(default)]
    pub lane: LaneSetting,
}

/// `[vm.lane]`: what viola cannot find out about a QEMU VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VmLane {
    /// Whether it may have a VF.
    pub set: LaneSetting,
    /// QMP socket for hot-plug; by default the last but one of three or more, else the last one.
    pub qmp: Option<PathBuf>,
    /// PCIe root port to plug into; by default a free one.
    pub port: Option<String>,
}

fn bond() -> String {
    "bond0".into()
}

fn port() -> String {
    "eth0".into()
}

fn netns<'de, D: Deserializer<'de>>(d: D) -> Result<PathBuf, D::Error> {
    let text = String::deserialize(d)?;
    match (text.is_empty(), text.contains('/')) {
        (true, _) => Err(D::Error::custom(
            "empty; write the name or path of a network namespace",
        )),
        (false, true) if !text.starts_with('/') => Err(D::Error::custom(format!(
            "{} is not an absolute path",
            quoted(&text)
        ))),
        (false, true) => Ok(text.into()),
        (false, false) => Ok(PathBuf::from("/run/netns").join(text)),
    }
}

/// A duration, or `none`.
fn release<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
    let wanted = "a duration with its unit in quotes, or \"none\"";
    parsed(d, wanted, |t| match t {
        "none" => Ok(None),
        t => quantities::duration_in(t, &(0..=MAX_HOLD))
            .map(Some)
            .map_err(|e| e.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::Config;

    fn parse(text: &str) -> Result<Lanes, String> {
        let config = Config::parse(Path::new("v.toml"), text);
        config.map(|c| c.lanes).map_err(|e| e.to_string())
    }

    #[test]
    fn a_pool_and_its_guests_are_read() {
        let lanes = parse(
            "[lanes]\nhold = \"5s\"\nrelease = \"60s\"\n[[lanes.pool]]\npf = \"eth0\"\nvfs = 7\nbridge = \"br0\"\n\
             [[lanes.guest]]\nname = \"n1\"\nnetns = \"n1\"\nhost = \"v1\"\nlane = \"pin\"\n",
        )
        .unwrap();
        assert_eq!((lanes.pools[0].vfs, lanes.pools[0].vlan), (7, 0));
        assert_eq!(lanes.guests[0].netns, Path::new("/run/netns/n1"));
        assert_eq!(lanes.guests[0].lane, LaneSetting::Pin);
        assert_eq!(
            (lanes.policy().hold, lanes.policy().release),
            (5 * S, Some(60 * S))
        );
        let none = parse("").unwrap();
        assert!(none.pools.is_empty());
        assert_eq!(none.policy(), policy::Config::default());
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_line() {
        let pool = |more: &str| {
            parse(&format!(
                "[[lanes.pool]]\npf = \"eth0\"\nvfs = 7\nbridge = \"br0\"\n{more}"
            ))
            .unwrap_err()
        };
        let twice = pool("[[lanes.pool]]\npf = \"eth0\"\nvfs = 1\nbridge = \"br1\"\n");
        assert!(twice.contains("a second pool for"), "{twice}");
        assert!(twice.starts_with("v.toml:6"), "{twice}");
        let vlan = pool("[[lanes.pool]]\npf = \"eth1\"\nvfs = 1\nbridge = \"br0\"\nvlan = 5\n");
        assert!(vlan.contains("has another VLAN"), "{vlan}");
        assert!(pool("mbit = 1000\n").contains("vf_mbit"));
        assert!(pool("[lanes.x]\n").contains("unknown"));
        assert!(
            parse("[lanes]\nalpha = 2.0\n")
                .unwrap_err()
                .contains("v.toml:2: alpha: 2 is out of range; 0 to 1 is allowed")
        );
        assert!(
            parse("[lanes]\nsample = \"1ms\"\n")
                .unwrap_err()
                .contains("sample")
        );
        let netns = "[[lanes.guest]]\nname = \"a\"\nnetns = \"x/y\"\nhost = \"v1\"\n";
        assert!(
            parse(netns)
                .unwrap_err()
                .contains("is not an absolute path")
        );
    }
}
