// SPDX-License-Identifier: Apache-2.0
//! `viola lanes`

use viola_proto::lanes::{Lanes, Nic, Switch};

use super::vread::{row, size};
use crate::args;
use viola_cli::client::Client;
use viola_cli::error::Outcome;
use viola_cli::quantities::rounded;
use viola_cli::table::{align, print, print_json};

/// Number of switches shown.
const MAX_SWITCHES: usize = 10;

/// Shows which guest has which VF, and why.
pub fn lanes(args: &args::VreadArgs) -> Outcome {
    let lanes: Lanes = Client::new(&args.socket.path()).get("/lanes")?;
    if args.json {
        return print_json(&lanes);
    }
    print(&list(&lanes))
}

fn list(lanes: &Lanes) -> String {
    let mut text = match lanes.on {
        true => String::new(),
        false => format!("lanes are off: {}\n", lanes.why),
    };
    let mut pools = vec![row(&["NIC", "NETWORK", "VFS", "HELD", "WHY"])];
    pools.extend(lanes.pools.iter().map(|pool| {
        let held = pool.holders.iter().filter(|h| !h.is_empty()).count();
        vec![
            pool.pf.clone(),
            pool.bridge.clone(),
            pool.usable.to_string(),
            held.to_string(),
            pool.why.clone(),
        ]
    }));
    let mut nics = vec![row(&[
        "VM",
        "LANE",
        "VF",
        "KIND",
        "IF",
        "SENDS",
        "DI2",
        "PARAVIRTUAL",
        "ON VF",
        "WHY",
    ])];
    nics.extend(lanes.nics.iter().map(nic));
    for table in [pools, nics].into_iter().filter(|t| t.len() > 1) {
        text.push_str(&align(&table));
    }
    if !lanes.switches.is_empty() {
        let mut switches = vec![row(&["AGO", "VF", "VM", "WHAT", "TOOK", "WHY"])];
        switches.extend(lanes.switches.iter().take(MAX_SWITCHES).map(switch));
        text.push_str(&align(&switches));
    }
    text
}

fn nic(nic: &Nic) -> Vec<String> {
    vec![
        nic.guest.clone(),
        nic.lane.to_string(),
        match &nic.vf {
            Some((pf, vf)) => format!("{pf}/{vf}"),
            None => "-".into(),
        },
        nic.kind.clone(),
        format!("{:.0}", nic.intensity),
        format!("{:.0} %", nic.freq),
        nic.di2.map_or("-".into(), |di2| format!("{di2:.2}")),
        size(nic.bytes),
        size(nic.vf_bytes),
        nic.why.clone(),
    ]
}

fn switch(switch: &Switch) -> Vec<String> {
    let what = match (switch.granted, switch.done) {
        (true, true) => "granted",
        (true, false) => "not granted",
        (false, true) => "taken back",
        (false, false) => "not given back",
    };
    vec![
        rounded(switch.ago_ns),
        format!("{}/{}", switch.pf, switch.vf),
        switch.guest.clone(),
        what.into(),
        rounded(switch.took_ns),
        switch.why.clone(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_proto::lanes::Pool;

    #[test]
    fn holders_and_the_last_switches_are_listed_with_their_reasons() {
        let none = Lanes {
            why: "the configuration has no [[lanes.pool]]".into(),
            ..Lanes::default()
        };
        assert_eq!(
            list(&none),
            "lanes are off: the configuration has no [[lanes.pool]]\n"
        );
        let lanes = Lanes {
            on: true,
            pools: vec![Pool {
                pf: "eth0".into(),
                bridge: "br0".into(),
                usable: 7,
                holders: vec![String::new(), "netns:n1".into()],
                ..Pool::default()
            }],
            nics: vec![Nic {
                guest: "netns:n1".into(),
                vf: Some(("eth0".into(), 1)),
                intensity: 812.4,
                freq: 95.0,
                why: "it holds a VF".into(),
                ..Nic::default()
            }],
            switches: vec![Switch {
                pf: "eth0".into(),
                vf: 1,
                guest: "netns:n1".into(),
                granted: true,
                done: true,
                took_ns: 120_000_000,
                ago_ns: 4_000_000_000,
                why: "IF 812, and a VF was free".into(),
            }],
            ..Lanes::default()
        };
        let text = list(&lanes);
        for word in [
            "eth0/1",
            "812",
            "95 %",
            "granted",
            "120 ms",
            "a VF was free",
        ] {
            assert!(text.contains(word), "{word}: {text}");
        }
    }
}
