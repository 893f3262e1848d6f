// SPDX-License-Identifier: Apache-2.0
//! `[lanes]` and `[vm.lane]`: pools of VFs, the guests that may have one, and when a VF moves.

use std::ops::{Range, RangeInclusive};
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use toml::Spanned;
use viola_policy::lanes as policy;
use viola_proto::lanes::LaneSetting;

use crate::value::{StringVisitor, duration};
use viola_cli::quantities::{self, quoted};

const MS: u64 = 1_000_000;
const S: u64 = 1_000 * MS;
/// Allowed intervals between two samples, ns.
const SAMPLE_INTERVAL: RangeInclusive<u64> = 50 * MS..=60 * S;
/// Allowed hold, release and retry times, ns.
const HOLD_TIME: RangeInclusive<u64> = 0..=3_600 * S;
/// Allowed times for a guest to release its VF, ns.
const RELEASE_TIMEOUT: RangeInclusive<u64> = S..=600 * S;

/// `[lanes]`
#[derive(Debug, Clone, PartialEq)]
pub struct Lanes {
    /// NICs with VFs; empty when lanes are off.
    pub pools: Vec<Pool>,
    /// Network namespaces that may have a VF.
    pub guests: Vec<NetnsGuest>,
    /// Interval between two samples of a guest.
    pub sample: Duration,
    /// Number of samples in the window of a decision.
    pub samples: usize,
    /// Time in which a guest has to release a VF before the daemon takes it.
    pub release_timeout: Duration,
    /// Thresholds of the policy (paper 004, sections 3.2 to 3.6).
    pub policy: policy::Config,
}

// No value is NaN: `validate` checks the range of each.
impl Eq for Lanes {}

/// `[[lanes.pool]]`: the VFs of a NIC.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pool {
    /// Network interface of the PF.
    pub pf: String,
    /// Number of VFs to create, 1 to 256.
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
    /// QMP socket for hot-plug; by default the last but one of the VM's three.
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
    pub(super) fn validate(self) -> Result<Lanes, (Range<usize>, String)> {
        let mut pools: Vec<Pool> = Vec::new();
        for pool in self.pool {
            let span = pool.span();
            let pool = pool.into_inner();
            let wrong = |what: String| Err((span.clone(), what));
            if pools.iter().any(|p| p.pf == pool.pf) {
                return wrong(format!("pf: a second pool for {}", quoted(&pool.pf)));
            }
            let other = pools.iter().find(|p| p.bridge == pool.bridge);
            if other.is_some_and(|p| p.vlan != pool.vlan) {
                return wrong(format!(
                    "vlan: another pool on {} has another VLAN; a bridge is one network",
                    quoted(&pool.bridge)
                ));
            }
            if !(1..=256).contains(&pool.vfs) {
                return wrong(format!(
                    "vfs: {} is out of range; 1 to 256 is allowed",
                    pool.vfs
                ));
            }
            if pool.vlan > 4094 {
                return wrong(format!(
                    "vlan: {} is out of range; 0 to 4094 is allowed",
                    pool.vlan
                ));
            }
            if pool.mbit == 0 && (pool.reserve_mbit > 0 || pool.vf_mbit > 0) {
                return wrong("mbit: missing; write the bandwidth of the NIC".into());
            }
            if pool.mbit > 0 && pool.vf_mbit == 0 {
                return wrong("vf_mbit: missing; write the bandwidth that each VF keeps".into());
            }
            pools.push(pool);
        }
        let mut guests: Vec<NetnsGuest> = Vec::new();
        for guest in self.guest {
            let span = guest.span();
            let guest = guest.into_inner();
            let same = |g: &&NetnsGuest| g.name == guest.name || g.netns == guest.netns;
            if let Some(other) = guests.iter().find(same) {
                let what = format!("name: a second [[lanes.guest]] for {}", quoted(&other.name));
                return Err((span, what));
            }
            guests.push(guest);
        }
        let within = |what: &str, value: f64, max: f64| match (0.0..=max).contains(&value) {
            true => Ok(value),
            false => Err((
                0..0,
                format!("{what}: {value} in [lanes] is out of range; 0 to {max} is allowed"),
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
            release_timeout: Duration::from_nanos(self.patience),
            policy,
        })
    }
}

fn sample<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    duration(d, &SAMPLE_INTERVAL)
}

fn wait<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    duration(d, &HOLD_TIME)
}

fn patience<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    duration(d, &RELEASE_TIMEOUT)
}

fn release<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
    d.deserialize_any(StringVisitor(
        "a duration with its unit in quotes, or \"none\"",
        |t: &str| match t {
            "none" => Ok(None),
            t => quantities::duration_in(t, &HOLD_TIME)
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
        assert!(twice.contains("a second pool for"), "{twice}");
        assert!(twice.starts_with("v.toml:5"), "{twice}");
        let vlan = pool("[[lanes.pool]]\npf = \"eth1\"\nvfs = 1\nbridge = \"br0\"\nvlan = 5\n");
        assert!(vlan.contains("has another VLAN"), "{vlan}");
        assert!(pool("mbit = 1000\n").contains("vf_mbit"));
        assert!(pool("[lanes.x]\n").contains("unknown"));
        assert!(
            parse("[lanes]\nalpha = 2.0\n")
                .unwrap_err()
                .contains("alpha: 2 in [lanes] is out of range; 0 to 1 is allowed")
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
