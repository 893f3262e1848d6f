// SPDX-License-Identifier: Apache-2.0
//! The line about other hosts.

use viola_proto::{Row, RowState};

use crate::vread::keys::Identity;
use viola_config::Vread;

/// What can be said about other hosts; nothing where the configuration knows none.
pub fn row(daemon: Option<&viola_proto::vread::Vread>, config: &Vread) -> Option<Row> {
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
            "; {} connections refused, of hosts with another key",
            host.strangers
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
    fn without_a_daemon_the_key_is_looked_at() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        let said = row(None, &config).unwrap();
        assert!(said.state == RowState::No && said.why.contains("viola keys init makes it"));
        let made = Identity::make("a").unwrap();
        made.write(&config.key, &config.certificate).unwrap();
        let said = row(None, &config).unwrap();
        assert!(said.why.contains(&made.fingerprint), "{said:?}");
        assert!(row(None, &Vread::default()).is_none());
    }

    #[test]
    fn a_host_that_is_away_is_told_with_its_reason() {
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
        let said = row(Some(&shown), &config).unwrap();
        assert_eq!(said.state, RowState::No);
        assert_eq!(
            said.why,
            "connected to 0 of 1, 0 of 1 connected to this one; 2 connections refused, of hosts with another key; \
             b: connection refused"
        );
        shown.peers[0].connected = true;
        assert_eq!(row(Some(&shown), &config).unwrap().state, RowState::Yes);
    }
}
