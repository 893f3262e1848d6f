// SPDX-License-Identifier: Apache-2.0
//! What `viola check` says of vread: the VMs of this host, and other hosts.

use viola_proto::{Row, RowState};

use crate::vread::keys::Identity;
use viola_config::Vread;

/// The row about the DataNode VMs and readers of this host. `daemon` is what a running daemon shows.
pub fn row(daemon: Option<&viola_proto::vread::Vread>, config: &Vread) -> Row {
    let row = |state, value: String, why: String, change: Option<&str>| Row {
        name: "vread".into(),
        state,
        value,
        why,
        change: change.map(str::to_owned),
    };
    if config.is_off() {
        return row(
            RowState::Info,
            "off".into(),
            "no VM may read blocks of another VM".into(),
            Some("see allow in [vread]"),
        );
    }
    let readers = config.readers().len();
    let Some(daemon) = daemon else {
        let why = format!("{readers} VMs may read; no daemon runs");
        return row(RowState::Info, "-".into(), why, None);
    };
    if !daemon.on {
        return row(RowState::No, "no".into(), daemon.why.clone(), None);
    }
    let serving = daemon.datanodes.iter().filter(|d| d.serving).count();
    let connected = daemon.readers.iter().filter(|r| r.connected).count();
    let mut why = format!(
        "{serving} of {} DataNode VMs are served, {connected} of {readers} readers connected",
        daemon.datanodes.len()
    );
    if let Some(not) = daemon.datanodes.iter().find(|d| !d.serving) {
        why.push_str(&format!("; {}: {}", not.name, not.why));
    }
    let is_good = serving > 0 && serving == daemon.datanodes.len();
    let state = if is_good { RowState::Yes } else { RowState::No };
    row(state, if is_good { "yes" } else { "no" }.into(), why, None)
}

/// The row about other hosts, if the configuration names any.
pub fn other_hosts(daemon: Option<&viola_proto::vread::Vread>, config: &Vread) -> Option<Row> {
    if config.peers.is_empty() {
        return None;
    }
    let row = |state, value: &str, why: String, change: Option<&str>| Row {
        name: "vread: other hosts".into(),
        state,
        value: value.into(),
        why,
        change: change.map(str::to_owned),
    };
    let key = || Identity::read(&config.key, &config.certificate);
    let Some(daemon) = daemon else {
        return Some(match key() {
            Ok(identity) => row(
                RowState::Info,
                "-",
                format!(
                    "this host's fingerprint is {}; no daemon runs",
                    identity.fingerprint
                ),
                None,
            ),
            Err(why) => row(RowState::No, "no", why, None),
        });
    };
    let host = match &daemon.host {
        Some(host) if host.running => host,
        Some(host) => return Some(row(RowState::No, "no", host.why.clone(), None)),
        None => return Some(row(RowState::No, "no", daemon.why.clone(), None)),
    };
    let asked = daemon.peers.iter().filter(|p| !p.address.is_empty());
    let away: Vec<String> = asked
        .clone()
        .filter(|p| !p.connected && !p.why.is_empty())
        .map(|p| format!("{}: {}", p.name, p.why))
        .collect();
    let connected = asked.clone().filter(|p| p.connected).count();
    let incoming = daemon.peers.iter().filter(|p| p.incoming).count();
    let mut why = format!(
        "connected to {connected} of {}, {incoming} of {} connected to this one",
        asked.count(),
        daemon.peers.len()
    );
    if host.strangers > 0 {
        why.push_str(&format!(
            "; {} connections refused, of hosts with an unknown key",
            host.strangers
        ));
    }
    if host.over_limit > 0 {
        why.push_str(&format!(
            "; {} connections refused, since too many were open",
            host.over_limit
        ));
    }
    if away.is_empty() {
        return Some(row(RowState::Yes, "yes", why, None));
    }
    why = format!("{why}; {}", away.join("; "));
    Some(row(RowState::No, "no", why, None))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use viola_config::Config;
    use viola_proto::vread::{Host, Peer, Vread as Shown};

    fn config(dir: &Path) -> Vread {
        let text = format!(
            "[vread]\nkey = \"{0}/k\"\ncertificate = \"{0}/c\"\n\
             [[vread.peer]]\nname = \"b\"\naddress = \"10.0.0.2:7670\"\nfingerprint = \"{1}\"\n",
            dir.display(),
            "0".repeat(64)
        );
        Config::parse(Path::new("v.toml"), &text).unwrap().vread
    }

    #[test]
    fn without_a_daemon_the_key_is_checked() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        let said = other_hosts(None, &config).unwrap();
        assert!(said.state == RowState::No && said.why.contains("viola keys init makes it"));
        let made = Identity::make("a").unwrap();
        made.write(&config.key, &config.certificate).unwrap();
        let said = other_hosts(None, &config).unwrap();
        assert!(said.why.contains(&made.fingerprint), "{said:?}");
        assert!(other_hosts(None, &Vread::default()).is_none());
    }

    #[test]
    fn a_host_that_is_not_connected_is_shown_with_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        let mut shown = Shown {
            host: Some(Host {
                running: true,
                strangers: 2,
                ..Host::default()
            }),
            peers: vec![Peer {
                name: "b".into(),
                address: "10.0.0.2:7670".into(),
                why: "connection refused".into(),
                ..Peer::default()
            }],
            ..Shown::default()
        };
        let said = other_hosts(Some(&shown), &config).unwrap();
        assert_eq!(said.state, RowState::No);
        assert_eq!(
            said.why,
            "connected to 0 of 1, 0 of 1 connected to this one; 2 connections refused, of hosts with an unknown key; \
             b: connection refused"
        );
        shown.peers[0].connected = true;
        assert_eq!(
            other_hosts(Some(&shown), &config).unwrap().state,
            RowState::Yes
        );
    }

    #[test]
    fn the_row_is_off_without_allow_and_counts_datanodes_and_readers_with_it() {
        let config = |text: &str| {
            viola_config::Config::parse(std::path::Path::new("v.toml"), text)
                .unwrap()
                .vread
        };
        assert_eq!(row(None, &config("")).value, "off");
        let c = config("[vread]\nallow = [{ reader = \"a\", datanode = \"dn*\" }]");
        assert_eq!(row(None, &c).why, "1 VMs may read; no daemon runs");
        let mut daemon = Shown {
            on: true,
            ..Default::default()
        };
        daemon.datanodes.push(viola_proto::vread::Datanode {
            name: "dn1".into(),
            why: "it has no channel to an agent".into(),
            ..Default::default()
        });
        let shown = row(Some(&daemon), &c);
        assert_eq!(
            (shown.value.as_str(), shown.why.as_str()),
            (
                "no",
                "0 of 1 DataNode VMs are served, 0 of 1 readers connected; dn1: it has no channel to an agent"
            )
        );
        daemon.datanodes[0].serving = true;
        assert_eq!(row(Some(&daemon), &c).state, RowState::Yes);
    }
}
