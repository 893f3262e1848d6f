// SPDX-License-Identifier: Apache-2.0
//! `[lanes]`: pools of VFs, who may have one, and when it changes hands.

use std::ops::{Range, RangeInclusive};
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use toml::Spanned;
use viola_policy::lanes as policy;
use viola_proto::lanes::LaneSetting;

use super::{Text, duration};
use viola_cli::quantities::{self, quoted};

const MS: u64 = 1_000_000;
const S: u64 = 1_000 * MS;
/// Time between two samples.
const SAMPLE: RangeInclusive<u64> = 50 * MS..=60 * S;
/// Time for everything that is waited for.
const WAIT: RangeInclusive<u64> = 0..=3_600 * S;
/// A guest's time to give its VF back.
const PATIENCE: RangeInclusive<u64> = S..=600 * S;

/// `[lanes]`
#[derive(Debug, Clone, PartialEq)]
pub struct Lanes {
    /// NICs with VFs; none: there are no lanes.
    pub pools: Vec<Pool>,
    /// Guests that are network namespaces.
    pub guests: Vec<NetnsGuest>,
    /// Time between two samples.
    pub sample: Duration,
    /// Samples that decisions are made by.
    pub samples: usize,
    /// How long a guest may take to give a VF back.
    pub patience: Duration,
    /// When a VF changes hands.
    pub policy: policy::Config,
}

// Equal files make equal settings; none of the numbers is "no number".
impl Eq for Lanes {}

/// `[[lanes.pool]]`: the VFs of a NIC.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pool {
    /// Interface of the PF.
    pub pf: String,
    /// VFs that there are to be.
    pub vfs: u32,
    /// The bridge with the paravirtual NICs of the network that the NIC's cable leads to.
    pub bridge: String,
    /// VLAN of that network on the cable, 0 for none.
    #[serde(default)]
    pub vlan: u32,
    /// What the NIC can send, Mbit/s; 0: all VFs may be granted, without a limit.
    #[serde(default)]
    pub mbit: u32,
    /// What of it is left to the paravirtual NICs, Mbit/s.
    #[serde(default)]
    pub reserve_mbit: u32,
    /// What each VF is to keep when all are busy, Mbit/s.
    #[serde(default)]
    pub vf_mbit: u32,
}

/// `[[lanes.guest]]`: a network namespace that may have a VF.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetnsGuest {
    /// What it is called.
    pub name: String,
    /// The namespace: a path, or a name under `/run/netns`.
    #[serde(deserialize_with = "netns")]
    pub netns: PathBuf,
    /// The host's end of its veth, a port of the bridge.
    pub host: String,
    /// Its bond.
    #[serde(default = "bond")]
    pub bond: String,
    /// The bond's port on the paravirtual path.
    #[serde(default = "port")]
    pub port: String,
    /// Control group of its processes, by which DI2 is found; without one it counts as waiting for I/O.
    #[serde(default)]
    pub cgroup: Option<PathBuf>,
    /// Whether it may have a VF.
    #[serde(default)]
    pub lane: LaneSetting,
}

/// `[vm.lane]`: what viola cannot find out about a QEMU guest itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VmLane {
    /// Whether it may have a VF.
    pub set: LaneSetting,
    /// A QMP socket for plugging; without it the last but one of three.
    pub qmp: Option<PathBuf>,
    /// Root port to plug into; without it one that is free.
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
        (true, _) => Err(D::Error::custom("the namespace's name or path is missing")),
        (false, true) if !text.starts_with('/') => Err(D::Error::custom(format!(
            "{} does not begin with /",
            quoted(&text)
        ))),
        (false, true) => Ok(text.into()),
        (false, false) => Ok(PathBuf::from("/run/netns").join(text)),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Raw {
    pool: Vec<Spanned<Pool>>,
    guest: Vec<Spanned<NetnsGuest>>,
    #[serde(deserialize_with = "sample")]
    sample: u64,
    samples: usize,
    alpha: f64,
    di2: f64,
    freq: f64,
    heavy: f64,
    margin: f64,
    #[serde(deserialize_with = "wait")]
    hold: u64,
    hold_per_attach: u32,
    moves: usize,
    #[serde(deserialize_with = "release")]
    release: Option<u64>,
    #[serde(deserialize_with = "wait")]
    retry: u64,
    #[serde(deserialize_with = "patience")]
    patience: u64,
}

impl Default for Raw {
    fn default() -> Self {
        let policy = policy::Config::default();
        Self {
            pool: Vec::new(),
            guest: Vec::new(),
            sample: 500 * MS,
            samples: 20,
            alpha: policy.alpha,
            di2: policy.di2,
            freq: policy.freq,
            heavy: policy.heavy,
            margin: policy.margin,
            hold: policy.hold,
            hold_per_attach: policy.hold_per_attach,
            moves: policy.moves,
            release: policy.release,
            retry: policy.retry,
            patience: 10 * S,
        }
    }
}

impl Raw {
    pub(super) fn checked(self) -> Result<Lanes, (Range<usize>, String)> {
        let mut pools: Vec<Pool> = Vec::new();
        for pool in self.pool {
            let span = pool.span();
            let pool = pool.into_inner();
            let wrong = |what: String| Err((span.clone(), what));
            if pools.iter().any(|p| p.pf == pool.pf) {
                return wrong(format!("pf: {} has its pool already", quoted(&pool.pf)));
            }
            let other = pools.iter().find(|p| p.bridge == pool.bridge);
            if other.is_some_and(|p| p.vlan != pool.vlan) {
                return wrong(format!(
                    "vlan: {} is one network, and has another VLAN in another pool",
                    quoted(&pool.bridge)
                ));
            }
            if !(1..=256).contains(&pool.vfs) {
                return wrong(format!("vfs: {} is not in 1 to 256", pool.vfs));
            }
            if pool.vlan > 4094 {
                return wrong(format!("vlan: {} is not in 0 to 4094", pool.vlan));
            }
            if pool.mbit == 0 && (pool.reserve_mbit > 0 || pool.vf_mbit > 0) {
                return wrong("mbit: the NIC's own is missing".into());
            }
            if pool.mbit > 0 && pool.vf_mbit == 0 {
                return wrong("vf_mbit: what each VF is to keep is missing".into());
            }
            pools.push(pool);
        }
        let mut guests: Vec<NetnsGuest> = Vec::new();
        for guest in self.guest {
            let span = guest.span();
            let guest = guest.into_inner();
            let same = |g: &&NetnsGuest| g.name == guest.name || g.netns == guest.netns;
            if let Some(other) = guests.iter().find(same) {
                let what = format!("name: {} has its entry already", quoted(&other.name));
                return Err((span, what));
            }
            guests.push(guest);
        }
        let within = |what: &str, value: f64, most: f64| match (0.0..=most).contains(&value) {
            true => Ok(value),
            false => Err((
                0..0,
                format!("lanes: {what}: {value} is not in 0 to {most}"),
            )),
        };
        let policy = policy::Config {
            alpha: within("alpha", self.alpha, 1.0)?,
            di2: within("di2", self.di2, 10_000.0)?,
            freq: within("freq", self.freq, 100.0)?,
            heavy: within("heavy", self.heavy, 100.0)?,
            margin: within("margin", self.margin, 100.0)?,
            hold: self.hold,
            hold_per_attach: self.hold_per_attach,
            moves: self.moves.max(1),
            release: self.release,
            retry: self.retry,
        };
        Ok(Lanes {
            pools,
            guests,
            sample: Duration::from_nanos(self.sample),
            samples: self.samples.clamp(1, 10_000),
            patience: Duration::from_nanos(self.patience),
            policy,
        })
    }
}

fn sample<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    duration(d, &SAMPLE)
}

fn wait<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    duration(d, &WAIT)
}

fn patience<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    duration(d, &PATIENCE)
}

fn release<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
    d.deserialize_any(Text(
        "a duration with its unit in quotes, or \"none\"",
        |t: &str| match t {
            "none" => Ok(None),
            t => quantities::duration_in(t, &WAIT)
                .map(Some)
                .map_err(|e| e.to_string()),
        },
    ))
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
            (lanes.policy.hold, lanes.policy.release),
            (5 * S, Some(60 * S))
        );
        let none = parse("").unwrap();
        assert!(none.pools.is_empty());
        assert_eq!(none.policy, policy::Config::default());
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
        assert!(twice.contains("has its pool already"), "{twice}");
        assert!(twice.starts_with("v.toml:5"), "{twice}");
        let vlan = pool("[[lanes.pool]]\npf = \"eth1\"\nvfs = 1\nbridge = \"br0\"\nvlan = 5\n");
        assert!(vlan.contains("another VLAN in another pool"), "{vlan}");
        assert!(pool("mbit = 1000\n").contains("vf_mbit"));
        assert!(pool("[lanes.x]\n").contains("unknown"));
        assert!(
            parse("[lanes]\nalpha = 2.0\n")
                .unwrap_err()
                .contains("alpha: 2 is not in 0 to 1")
        );
        assert!(
            parse("[lanes]\nsample = \"1ms\"\n")
                .unwrap_err()
                .contains("sample")
        );
        let netns = "[[lanes.guest]]\nname = \"a\"\nnetns = \"x/y\"\nhost = \"v1\"\n";
        assert!(parse(netns).unwrap_err().contains("does not begin with /"));
    }
}
