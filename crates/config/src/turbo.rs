// SPDX-License-Identifier: Apache-2.0
//! `[turbo]`: cores for the vCPUs that serve I/O (paper 002).

use serde::Deserialize;
use serde::de::Deserializer;
use viola_host::CpuSet;
use viola_policy::turbo::{TURBO_SLOT, TurboConfig};

use crate::value::{cores, duration, parsed};
use viola_cli::quantities;

/// Shortest slot, ns. A shorter one costs the controller more time than the vCPU gains.
const MIN_SLOT: u64 = 50_000;
const MAX_SLOT: u64 = 1_000_000;

/// `[turbo]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Turbo {
    /// Turbo cores; empty when turbo is off.
    #[serde(deserialize_with = "cores")]
    pub cores: CpuSet,
    /// Slot of a turbo vCPU, 50 us to 1 ms, in ns.
    #[serde(deserialize_with = "duration::<_, MIN_SLOT, MAX_SLOT>")]
    pub slot: u64,
    /// Thousandths of any 10 ms of a turbo core, 50 to 900, that VMs' real-time threads may use
    /// where the host runs on that core as well; `None` where only VMs run on turbo cores.
    #[serde(deserialize_with = "budget")]
    pub budget: Option<u32>,
    /// Thousandths of a VM's share, 0 to 900, that its regular vCPUs keep while they wait.
    #[serde(deserialize_with = "reserve")]
    pub reserve: u32,
}

impl Default for Turbo {
    fn default() -> Self {
        Self {
            cores: CpuSet::default(),
            slot: TURBO_SLOT,
            budget: None,
            reserve: TurboConfig::default().reserve,
        }
    }
}

impl Turbo {
    /// Why the host cannot have these turbo cores, if it cannot: `regular` are the cores of `[slices]`.
    pub(super) fn conflict(&self, online: &CpuSet, regular: &CpuSet) -> Option<String> {
        if self.cores.is_empty() {
            return None;
        }
        if let Some(cpu) = self.cores.iter().find(|&c| !online.contains(c)) {
            return Some(format!(
                "cores: CPU {cpu} is not online; this host has {online}"
            ));
        }
        if let Some(cpu) = self.cores.iter().find(|&c| regular.contains(c)) {
            return Some(format!(
                "cores: CPU {cpu} is also in cores of [slices]; a core is either regular or turbo"
            ));
        }
        if regular.is_empty() {
            return Some("cores: the VMs' other vCPUs have no cores; set cores in [slices]".into());
        }
        let all = |cpu| self.cores.contains(cpu) || regular.contains(cpu);
        if self.budget.is_none() && online.iter().all(all) {
            return Some(
                "cores: turbo and [slices] take all CPUs of the host; leave one out, or set a budget".into(),
            );
        }
        None
    }
}

/// Parses percent of a core, 5 to 90, into thousandths.
fn budget<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u32>, D::Error> {
    let wanted = "a share in quotes, for example \"50%\"";
    parsed(d, wanted, |t| {
        match quantities::cap(t).map_err(|e| e.to_string())? {
            Some(p) if (50..=900).contains(&p) => Ok(Some(p)),
            _ => Err("5% to 90% of a core is allowed".to_owned()),
        }
    })
}

/// Parses percent of a VM's share, 1 to 90, or `none`, into thousandths.
fn reserve<'de, D: Deserializer<'de>>(d: D) -> Result<u32, D::Error> {
    let wanted = "a part of a VM's share in quotes, for example \"30%\"";
    parsed(d, wanted, |t| {
        match quantities::cap(t).map_err(|e| e.to_string())? {
            None => Ok(0),
            Some(p) if p <= 900 => Ok(p),
            Some(_) => Err("1% to 90% of a VM's share, or none, is allowed".to_owned()),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use viola_policy::turbo::TurboConfig;

    use crate::{Config, ConfigError};

    fn checked(text: &str) -> Result<Config, ConfigError> {
        let config = Config::parse(Path::new("v.toml"), text)?;
        let online = "0-3".parse().map(|cpus| config.check_host(&cpus));
        online.expect("a list")?;
        Ok(config)
    }

    fn said(text: &str) -> String {
        checked(text).unwrap_err().to_string()
    }

    #[test]
    fn turbo_cores_have_slots_of_a_tenth_of_a_millisecond_unless_told_otherwise() {
        let turbo = checked("[slices]\ncores = \"2-3\"\n[turbo]\ncores = \"1\"\n")
            .unwrap()
            .turbo;
        assert_eq!(
            (turbo.cores.to_string().as_str(), turbo.slot, turbo.budget),
            ("1", 100_000, None)
        );
        let text = "[slices]\ncores = \"1-3\"\n[turbo]\ncores = \"0\"\nslot = \"200us\"\nbudget = \"50%\"\n";
        let turbo = checked(text).unwrap().turbo;
        assert_eq!((turbo.slot, turbo.budget), (200_000, Some(500)));
        assert_eq!(turbo.reserve, TurboConfig::default().reserve);
        let reserve = |text: &str| {
            let text = format!(
                "[slices]\ncores = \"2-3\"\n[turbo]\ncores = \"1\"\nreserve = \"{text}\"\n"
            );
            checked(&text)
                .map(|c| c.turbo.reserve)
                .map_err(|e| e.to_string())
        };
        assert_eq!((reserve("40%"), reserve("none")), (Ok(400), Ok(0)));
        assert!(reserve("95%").unwrap_err().contains("1% to 90%"));
        assert!(checked("").unwrap().turbo.cores.is_empty());
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_line_of_the_cores() {
        let turbo = |slices: &str, turbo: &str| {
            said(&format!(
                "[slices]\ncores = \"{slices}\"\n[turbo]\n{turbo}\n"
            ))
        };
        let both = turbo("1-2", "cores = \"2\"");
        assert!(
            both.starts_with("v.toml:4: cores: CPU 2 is also in cores of [slices]"),
            "{both}"
        );
        assert!(turbo("1-3", "cores = \"0\"").contains("take all CPUs of the host"));
        assert!(turbo("1", "cores = \"9\"").contains("not online"));
        assert!(said("[turbo]\ncores = \"1\"\n").contains("have no cores"));
        assert!(turbo("1", "slot = \"20us\"").contains("slot: "));
        assert!(turbo("1", "budget = \"95%\"").contains("5% to 90% of a core is allowed"));
        assert!(turbo("1", "budget = \"none\"").contains("5% to 90% of a core is allowed"));
    }
}
