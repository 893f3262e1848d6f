// SPDX-License-Identifier: Apache-2.0
//! `[[vread.peer]]`: other hosts, and the entries of `allow` that name them.

use std::net::SocketAddr;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use viola_vread::pattern;

use crate::Conflict;
use crate::value::parsed;
use viola_cli::quantities::quoted;

/// Most entries of `[[vread.peer]]`.
const MAX_PEERS: usize = 256;
/// Longest name of a host, bytes.
const MAX_NAME_BYTES: usize = 64;
/// Hexadecimal digits of a SHA-256 fingerprint.
const FINGERPRINT_DIGITS: usize = 64;

/// Another host and the keys of its daemon.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peer {
    /// Name of the host in this configuration.
    #[serde(deserialize_with = "host_name")]
    pub name: String,
    /// SHA-256 fingerprints of its certificates, 64 hexadecimal digits each; several while its key is replaced.
    #[serde(rename = "fingerprint", deserialize_with = "fingerprints")]
    pub fingerprints: Vec<String>,
    /// Its address, `HOST:PORT`; `None` when this host never connects to it.
    #[serde(default, deserialize_with = "address")]
    pub address: Option<String>,
    /// Patterns of the DataNode VMs whose blocks this host asks it for.
    #[serde(default = "all", deserialize_with = "datanodes")]
    pub datanodes: Vec<String>,
}

/// The pattern that matches every name.
pub(super) fn all() -> Vec<String> {
    vec!["*".into()]
}

fn host_name<'de, D: Deserializer<'de>>(d: D) -> Result<String, D::Error> {
    parsed(d, "a name in quotes", host)
}

fn fingerprints<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a fingerprint in quotes, or a list of them")]
    enum OneOrMore {
        One(String),
        More(Vec<String>),
    }
    let texts = match OneOrMore::deserialize(d)? {
        OneOrMore::One(one) => vec![one],
        OneOrMore::More(more) => more,
    };
    if texts.is_empty() {
        return Err(D::Error::custom(
            "missing; run viola keys show on that host and copy it",
        ));
    }
    let parsed = texts.iter().map(|text| fingerprint(text));
    parsed.collect::<Result<_, _>>().map_err(D::Error::custom)
}

fn address<'de, D: Deserializer<'de>>(d: D) -> Result<Option<String>, D::Error> {
    parsed(d, "an address in quotes", |t| match port(t) {
        Some(_) => Ok(Some(t.to_owned())),
        None => Err(format!(
            "{} is not an address; write HOST:PORT, for example \"10.0.0.2:7670\"",
            quoted(t)
        )),
    })
}

fn datanodes<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<String>, D::Error> {
    let patterns = Vec::<String>::deserialize(d)?;
    match patterns.iter().any(|pattern| pattern.trim().is_empty()) {
        true => Err(D::Error::custom(
            "empty; write the name, identity or pattern of DataNode VMs",
        )),
        false if patterns.is_empty() => Ok(all()),
        false => Ok(patterns),
    }
}

/// The port of an address, `None` when the text is not an address: `10.0.0.2:7670`, `[fd00::2]:7670`, `hostb:7670`.
pub fn port(address: &str) -> Option<u16> {
    let (host, port) = address.rsplit_once(':')?;
    let is_bare = !host.is_empty() && !host.contains([':', ' ', '/', '[', ']']);
    let is_address = address.parse::<SocketAddr>().is_ok();
    let port = port.parse().ok().filter(|p| *p > 0)?;
    (is_bare || is_address).then_some(port)
}

/// Checks all `[[vread.peer]]` against each other.
pub(super) fn check(peers: &[Peer]) -> Result<(), Conflict> {
    let wrong = |i: usize, what: String| {
        Err(Conflict {
            path: format!("vread.peer.{i}.name"),
            what,
        })
    };
    for (i, peer) in peers.iter().enumerate() {
        if i == MAX_PEERS {
            return wrong(i, format!("peer: more than {MAX_PEERS} other hosts"));
        }
        let name = quoted(&peer.name);
        for other in &peers[..i] {
            if other.name == peer.name {
                return wrong(i, format!("name: a second [[vread.peer]] for {name}"));
            }
            let theirs = |f: &String| other.fingerprints.contains(f);
            if peer.fingerprints.iter().any(theirs) {
                let other = quoted(&other.name);
                let what = format!(
                    "fingerprint: {other} and {name} have the same one; each host needs its own key"
                );
                return wrong(i, what);
            }
        }
    }
    Ok(())
}

/// Parses the name of a host: letters, digits, `-`, `_` and `.`.
///
/// # Errors
/// A sentence that says what is allowed.
pub fn host(text: &str) -> Result<String, String> {
    let name = text.trim();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if (1..=MAX_NAME_BYTES).contains(&name.len()) && name.chars().all(plain) {
        return Ok(name.to_owned());
    }
    Err(format!(
        "{} is not a host name; letters, digits, - . and _ are allowed, 1 to {MAX_NAME_BYTES} of them",
        quoted(name)
    ))
}

/// Reads a fingerprint as `viola keys show` or openssl print it.
///
/// # Errors
/// A sentence that says what is allowed.
pub fn fingerprint(text: &str) -> Result<String, String> {
    let digits: String = text
        .trim()
        .trim_start_matches("sha256:")
        .chars()
        .filter(|c| *c != ':')
        .collect::<String>()
        .to_ascii_lowercase();
    if digits.len() == FINGERPRINT_DIGITS && digits.chars().all(|c| c.is_ascii_hexdigit()) {
        return Ok(digits);
    }
    Err(format!(
        "{} is not a fingerprint; it has {FINGERPRINT_DIGITS} hexadecimal digits, as viola keys show prints them",
        quoted(text)
    ))
}

impl super::Vread {
    /// What readers of another host may read of a VM: pattern of their names, patterns of block pools.
    pub fn grants(&self, host: &str, vm: &super::Named) -> Vec<(String, Vec<String>)> {
        let entries = self.allow.iter();
        entries
            .filter(|a| a.host.as_deref() == Some(host) && vm.matches(&a.datanode))
            .map(|a| {
                let reader = a.reader.as_deref().unwrap_or("*");
                (reader.to_owned(), a.pools.clone())
            })
            .collect()
    }

    /// What a reader of this host (as the file names it) may read on other hosts: peer, patterns of DataNode VMs, patterns
    /// of block pools.
    pub fn sources(&self, reader: &str) -> Vec<(String, Vec<String>, Vec<String>)> {
        let mut sources = Vec::new();
        for peer in self.peers.iter().filter(|p| p.address.is_some()) {
            for allow in self.allow.iter().filter(|a| a.is_for(reader)) {
                let datanodes = narrow(&peer.datanodes, &allow.datanode);
                if !datanodes.is_empty() {
                    sources.push((peer.name.clone(), datanodes, allow.pools.clone()));
                }
            }
        }
        sources
    }

    /// Ports of other hosts that this one connects to.
    pub fn ports(&self) -> Vec<u16> {
        let addresses = self.peers.iter().filter_map(|p| p.address.as_deref());
        let mut ports: Vec<u16> = addresses.filter_map(port).collect();
        ports.sort_unstable();
        ports.dedup();
        ports
    }
}

/// Narrows each pattern of `some` by `pattern`: where one of the two matches the text of the other,
/// the narrower one stays. Where they only overlap, neither stays, so access is denied.
fn narrow(some: &[String], pattern: &str) -> Vec<String> {
    let mut narrowed: Vec<String> = Vec::new();
    for other in some {
        if pattern::matches(other, pattern) {
            return vec![pattern.to_owned()];
        }
        if pattern::matches(pattern, other) {
            narrowed.push(other.clone());
        }
    }
    narrowed
}

#[cfg(test)]
mod tests;
