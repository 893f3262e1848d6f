// SPDX-License-Identifier: Apache-2.0
//! What `viola check` says of the host itself: kernel, VMs, libvirt.

use viola_host::Vm;
use viola_host::facts::HostFacts;
use viola_proto::{Libvirt, Row, RowState};

use crate::host::users::group_id;
use viola_config::Config;

/// Why this host cannot do something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle {
    /// What stands in the way.
    pub why: String,
    /// What the operator can change, if anything.
    pub change: Option<String>,
}

impl Obstacle {
    /// An obstacle that the operator can remove.
    pub fn new(why: impl Into<String>, change: impl Into<String>) -> Self {
        Self {
            why: why.into(),
            change: Some(change.into()),
        }
    }

    /// An obstacle for which no change is known.
    pub fn fixed(why: impl Into<String>) -> Self {
        Self {
            why: why.into(),
            change: None,
        }
    }

    /// Why, and what to change, in one sentence.
    pub fn sentence(&self) -> String {
        match &self.change {
            Some(change) => format!("{}: {change}", self.why),
            None => self.why.clone(),
        }
    }
}

/// The row about the kernel.
pub fn kernel(facts: &HostFacts) -> Row {
    let name = format!("kernel {}.{}", facts.kernel.major, facts.kernel.minor);
    if facts.kernel.has_fair_server() {
        return Row {
            name,
            state: RowState::Yes,
            value: "ok".into(),
            why: String::new(),
            change: None,
        };
    }
    Row {
        name,
        state: RowState::No,
        value: "old".into(),
        why: "slices need Linux 6.12".into(),
        change: Some("run Linux 6.12 or later".into()),
    }
}

/// The row about VMs: how many, of which hypervisors, and of how many the vCPU threads are known.
pub fn vms(vms: &[Vm]) -> Row {
    let mut kinds: Vec<(String, usize)> = Vec::new();
    for vm in vms {
        let name = vm.hypervisor.to_string();
        match kinds.iter_mut().find(|(k, _)| *k == name) {
            Some((_, n)) => *n += 1,
            None => kinds.push((name, 1)),
        }
    }
    let kinds: Vec<String> = kinds.iter().map(|(k, n)| format!("{n} {k}")).collect();
    let readable = vms.iter().filter(|vm| !vm.vcpus.is_empty()).count();
    let told = vms.iter().filter(|vm| vm.libvirt).count();
    let told = match told {
        0 => String::new(),
        n => format!(" ({n} of libvirt)"),
    };
    let doubtful = vms.iter().filter(|vm| vm.confirmed.is_none()).count();
    let why = if vms.is_empty() {
        "no UML or QEMU guest runs here".to_owned()
    } else {
        let doubt = match doubtful {
            0 => String::new(),
            n => format!("; nothing confirms {n}"),
        };
        format!(
            "{}{told}; vCPU threads of {readable} are known{doubt}",
            kinds.join(", ")
        )
    };
    Row {
        name: "VMs".into(),
        state: RowState::Info,
        value: vms.len().to_string(),
        why,
        change: None,
    }
}

/// The row about libvirt. Only a running daemon is connected to it.
pub fn libvirt(daemon: Option<&Libvirt>, config: &Config) -> Row {
    let row = |state, value: &str, why: String| Row {
        name: "libvirt".into(),
        state,
        value: value.into(),
        why,
        change: None,
    };
    match daemon {
        _ if !config.daemon.libvirt => row(
            RowState::Info,
            "off",
            "switched off (libvirt = false in [daemon])".into(),
        ),
        None => row(RowState::Info, "-", "no daemon runs".into()),
        Some(told) if told.connected => {
            let domains = match told.domains {
                1 => "1 domain runs".to_owned(),
                n => format!("{n} domains run"),
            };
            let why = format!("{domains}; events report starts, stops and new quotas");
            row(RowState::Yes, "yes", why)
        }
        Some(told) => {
            let why = format!("{}; VMs are found in /proc", told.why);
            row(RowState::Info, "no", why)
        }
    }
}

/// The row about the read socket: who may look without the right to change anything.
pub fn read_socket(config: &Config) -> Row {
    let row = |value: &str, why: String, change: Option<String>| Row {
        name: "read socket".into(),
        state: RowState::Info,
        value: value.into(),
        why,
        change,
    };
    let group = &config.daemon.read_group;
    match config.daemon.read_socket() {
        None => row(
            "off",
            "switched off (read_socket = \"none\" in [daemon])".into(),
            None,
        ),
        Some(path) if group_id(group).is_some() => row(
            "yes",
            format!(
                "members of group {group} may look through {}, and change nothing",
                path.display()
            ),
            None,
        ),
        Some(path) => row(
            "root",
            format!(
                "there is no group {group}; only root may use {}",
                path.display()
            ),
            Some(format!("groupadd --system {group}, then restart viola")),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn config(text: &str) -> Config {
        Config::parse(Path::new("v.toml"), text).unwrap()
    }

    #[test]
    fn a_host_without_libvirt_is_no_error() {
        let mut told = Libvirt {
            on: true,
            why: "libvirt's daemon does not run".into(),
            ..Libvirt::default()
        };
        let on = config("");
        let said = libvirt(Some(&told), &on);
        assert_eq!((said.state, said.value.as_str()), (RowState::Info, "no"));
        assert!(
            said.why.contains("does not run; VMs are found in /proc"),
            "{said:?}"
        );
        (told.connected, told.domains) = (true, 1);
        let said = libvirt(Some(&told), &on);
        assert_eq!((said.state, said.value.as_str()), (RowState::Yes, "yes"));
        assert!(said.why.starts_with("1 domain runs;"), "{said:?}");
        assert_eq!(libvirt(None, &on).value, "-");
        let off = config("[daemon]\nlibvirt = false\n");
        assert_eq!(libvirt(Some(&Libvirt::default()), &off).value, "off");
    }

    #[test]
    fn vms_are_counted_by_hypervisor() {
        let mut silent = crate::testing::vm("b", 20, &[]);
        silent.vcpus.clear();
        let row = vms(&[crate::testing::vm("a", 10, &[&[1]]), silent]);
        assert_eq!(
            (row.value.as_str(), row.why.as_str()),
            ("2", "2 uml; vCPU threads of 1 are known")
        );
        let forged = Vm {
            confirmed: None,
            ..crate::testing::vm("c", 30, &[&[1]])
        };
        assert!(vms(&[forged]).why.ends_with("; nothing confirms 1"));
    }

    #[test]
    fn the_read_socket_names_its_group_and_how_to_make_it() {
        let missing = read_socket(&config("[daemon]\nread_group = \"no-such-group-here\"\n"));
        assert_eq!(
            (missing.value.as_str(), missing.change.as_deref()),
            (
                "root",
                Some("groupadd --system no-such-group-here, then restart viola")
            )
        );
        let there = read_socket(&config("[daemon]\nread_group = \"root\"\n"));
        assert_eq!(there.value, "yes");
        assert!(
            there.why.contains("/run/viola/viola-read.sock"),
            "{there:?}"
        );
        let off = read_socket(&config("[daemon]\nread_socket = \"none\"\n"));
        assert_eq!(off.value, "off");
    }
}
