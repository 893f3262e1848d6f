// SPDX-License-Identifier: Apache-2.0
//! What `viola check` says of lanes.

use std::path::Path;

use viola_lanes::Pf;
use viola_proto::lanes::Lanes;
use viola_proto::{Row, RowState};

use viola_config::Config;

/// The row about lanes. `daemon` is what a running daemon shows.
pub fn row(daemon: Option<&Lanes>, config: &Config) -> Row {
    let pools = &config.lanes.pools;
    let (state, value, why, change) = match daemon {
        _ if pools.is_empty() => (
            RowState::Info,
            "off",
            able(Path::new("/sys")),
            Some("see [[lanes.pool]]"),
        ),
        Some(lanes) => of_daemon(lanes),
        None => {
            let no = pools.iter().find_map(|p| {
                let made = Pf::new(&p.pf).num_vfs();
                made.err().map(|e| format!("{}: {e}", p.pf))
            });
            match no {
                Some(why) => (RowState::No, "no", why, None),
                None => {
                    let why = format!("{} NICs; no daemon runs", pools.len());
                    (RowState::Info, "-", why, None)
                }
            }
        }
    };
    Row {
        name: "lanes".into(),
        state,
        value: value.into(),
        why,
        change: change.map(str::to_owned),
    }
}

fn of_daemon(lanes: &Lanes) -> (RowState, &'static str, String, Option<&'static str>) {
    if let Some(pool) = lanes.pools.iter().find(|p| !p.why.is_empty()) {
        let why = format!("{}: {}", pool.pf, pool.why);
        return (RowState::No, "no", why, None);
    }
    if !lanes.on {
        return (RowState::No, "no", lanes.why.clone(), None);
    }
    let vfs: u32 = lanes.pools.iter().map(|p| p.usable).sum();
    let held = lanes.nics.iter().filter(|n| n.vf.is_some()).count();
    let why = format!("{held} of {vfs} VFs held, {} guests", lanes.nics.len());
    (RowState::Yes, "yes", why, None)
}

/// NICs of this host that could have VFs.
fn able(sys: &Path) -> String {
    let nics = std::fs::read_dir(sys.join("class/net"));
    let names = nics.into_iter().flatten().flatten();
    let names = names.map(|nic| nic.file_name().to_string_lossy().into_owned());
    let makes_vfs = |nic: &String| Pf::at(sys, nic).max_vfs().is_ok_and(|vfs| vfs > 0);
    let mut able: Vec<String> = names.filter(makes_vfs).collect();
    able.sort();
    match able.is_empty() {
        true => "no NIC of this host has SR-IOV".into(),
        false => format!("no pool is named; {} could have VFs", able.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_proto::lanes::{Nic, Pool};

    #[test]
    fn a_nic_that_could_have_vfs_is_named_where_none_is_used() {
        let top = tempfile::tempdir().unwrap();
        assert!(able(top.path()).starts_with("no NIC"));
        let device = top.path().join("class/net/p0/device");
        std::fs::create_dir_all(&device).unwrap();
        std::fs::write(device.join("sriov_totalvfs"), "0\n").unwrap();
        assert!(able(top.path()).starts_with("no NIC"));
        std::fs::write(device.join("sriov_totalvfs"), "7\n").unwrap();
        assert!(able(top.path()).contains("p0 could have VFs"));
    }

    #[test]
    fn a_pool_that_does_not_work_makes_a_no_with_its_reason() {
        let mut lanes = Lanes {
            on: true,
            pools: vec![Pool {
                pf: "p0".into(),
                usable: 7,
                ..Pool::default()
            }],
            nics: vec![Nic {
                vf: Some(("p0".into(), 1)),
                ..Nic::default()
            }],
            ..Lanes::default()
        };
        let said = of_daemon(&lanes);
        assert_eq!(
            (said.1, said.2.as_str()),
            ("yes", "1 of 7 VFs held, 1 guests")
        );
        lanes.pools[0].why = "there is no interface p0".into();
        assert_eq!(of_daemon(&lanes).1, "no");
    }
}
