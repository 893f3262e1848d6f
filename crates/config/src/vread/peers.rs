// SPDX-License-Identifier: Apache-2.0
//! `[[vread.peer]]`: other hosts, and the entries of `allow` that name them.

use std::net::SocketAddr;
use std::ops::Range;

use serde::Deserialize;
use toml::Spanned;
use viola_vread::pattern;

use super::ValueError;
use viola_cli::quantities::quoted;

/// Entries of `[[vread.peer]]`.
const MAX_PEERS: usize = 256;
/// Length of a host's name.
const MAX_NAME_BYTES: usize = 64;
/// Hexadecimal digits of a SHA-256 fingerprint.
const FINGERPRINT_DIGITS: usize = 64;

/// Another host and the keys of its daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Name of the host in this configuration.
    pub name: String,
    /// SHA-256 fingerprints of its certificates, 64 hexadecimal digits each; several while its key is replaced.
    pub fingerprints: Vec<String>,
    /// Its address, `HOST:PORT`; `None` when this host never connects to it.
    pub address: Option<String>,
    /// Patterns of the DataNode VMs whose blocks it is asked for.
    pub datanodes: Vec<String>,
}

/// An entry of `allow` with `host`: readers on that host may read blocks of DataNode VMs of this one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowHost {
    /// The other host's name in `[[vread.peer]]`.
    pub host: String,
    /// Pattern of names of readers on that host.
    pub reader: String,
    /// Pattern of names or identities of DataNode VMs of this host.
    pub datanode: String,
    /// Patterns of block pools.
    pub pools: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawPeer {
    name: Spanned<String>,
    fingerprint: Spanned<OneOrMore>,
    address: Option<Spanned<String>>,
    datanodes: Option<Vec<Spanned<String>>>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a fingerprint in quotes, or a list of them")]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

/// The port of an address, `None` when the text is not an address: `10.0.0.2:7670`, `[fd00::2]:7670`, `hostb:7670`.
#[must_use]
pub fn port(address: &str) -> Option<u16> {
    let (host, port) = address.rsplit_once(':')?;
    let is_bare = !host.is_empty() && !host.contains([':', ' ', '/', '[', ']']);
    let is_address = address.parse::<SocketAddr>().is_ok();
    let port = port.parse().ok().filter(|p| *p > 0)?;
    (is_bare || is_address).then_some(port)
}

/// Checks all `[[vread.peer]]`.
pub(super) fn validate(raw: Vec<RawPeer>) -> Result<Vec<Peer>, ValueError> {
    let mut peers: Vec<Peer> = Vec::new();
    for raw in raw {
        let span = raw.name.span();
        if peers.len() == MAX_PEERS {
            return Err((span, format!("peer: more than {MAX_PEERS} other hosts")));
        }
        let peer = raw.validate()?;
        if peers.iter().any(|p| p.name == peer.name) {
            let what = format!("name: a second [[vread.peer]] for {}", quoted(&peer.name));
            return Err((span, what));
        }
        let same = |p: &&Peer| {
            let theirs = |f: &String| peer.fingerprints.contains(f);
            p.fingerprints.iter().any(theirs)
        };
        if let Some(other) = peers.iter().find(same) {
            let what = format!(
                "fingerprint: {} and {} have the same one; each host needs its own key",
                quoted(&other.name),
                quoted(&peer.name)
            );
            return Err((span, what));
        }
        peers.push(peer);
    }
    Ok(peers)
}

impl RawPeer {
    fn validate(self) -> Result<Peer, ValueError> {
        let name = host(self.name.get_ref()).map_err(|what| (self.name.span(), what))?;
        let at = self.fingerprint.span();
        let fingerprints = match self.fingerprint.into_inner() {
            OneOrMore::One(one) => vec![one],
            OneOrMore::More(more) => more,
        };
        if fingerprints.is_empty() {
            return Err((at, missing(&name)));
        }
        let fingerprints = fingerprints
            .iter()
            .map(|f| fingerprint(f).map_err(|what| (at.clone(), what)))
            .collect::<Result<Vec<_>, ValueError>>()?;
        if let Some(address) = &self.address
            && port(address.get_ref()).is_none()
        {
            let what = format!(
                "address: {} is not an address; write HOST:PORT, for example \"10.0.0.2:7670\"",
                quoted(address.get_ref())
            );
            return Err((address.span(), what));
        }
        let mut datanodes = Vec::new();
        for pattern in self.datanodes.into_iter().flatten() {
            if pattern.get_ref().trim().is_empty() {
                let what =
                    "datanodes: empty; write the name, identity or pattern of DataNode VMs".into();
                return Err((pattern.span(), what));
            }
            datanodes.push(pattern.into_inner());
        }
        if datanodes.is_empty() {
            datanodes.push("*".into());
        }
        Ok(Peer {
            name,
            fingerprints,
            address: self.address.map(Spanned::into_inner),
            datanodes,
        })
    }
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
        "name: {} is not a host name; letters, digits, - . and _ are allowed, 1 to {MAX_NAME_BYTES} of them",
        quoted(name)
    ))
}

fn missing(name: &str) -> String {
    format!(
        "fingerprint: missing; run viola keys show on {} and copy it",
        quoted(name)
    )
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
        "fingerprint: {} is not a fingerprint; it has {FINGERPRINT_DIGITS} hexadecimal digits, as viola keys show prints them",
        quoted(text)
    ))
}

/// Parses the address to listen on.
pub(super) fn listen(text: &Spanned<String>) -> Result<SocketAddr, ValueError> {
    text.get_ref()
        .parse::<SocketAddr>()
        .ok()
        .filter(|a| a.port() > 0)
        .ok_or_else(|| {
            let what = format!(
                "listen: {} is not an address; write IP:PORT, for example \"10.0.0.1:7670\" or \"[::]:7670\"",
                quoted(text.get_ref())
            );
            (text.span(), what)
        })
}

/// Checks that each host in `allow` has its `[[vread.peer]]`, and that this host listens for it.
pub(super) fn check_allow(
    allow: &[(AllowHost, Range<usize>)],
    peers: &[Peer],
    listens: bool,
) -> Result<(), ValueError> {
    for (line, span) in allow {
        if !peers.iter().any(|p| p.name == line.host) {
            let what = format!(
                "host: no [[vread.peer]] has the name {}",
                quoted(&line.host)
            );
            return Err((span.clone(), what));
        }
        if !listens {
            let what = format!(
                "host: {} cannot connect, because this host does not listen; set listen in [vread]",
                quoted(&line.host)
            );
            return Err((span.clone(), what));
        }
    }
    Ok(())
}

impl super::Vread {
    /// Whether `allow` is empty.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.allow.is_empty() && self.hosts.is_empty()
    }

    /// Whether `allow` has a reader on another host for blocks of this VM.
    #[must_use]
    pub fn is_remote_datanode(&self, vm: &super::Named) -> bool {
        self.hosts.iter().any(|a| vm.matches(&a.datanode))
    }

    /// What readers of another host may read of a VM: pattern of their names, patterns of block pools.
    #[must_use]
    pub fn grants(&self, host: &str, vm: &super::Named) -> Vec<(String, Vec<String>)> {
        self.hosts
            .iter()
            .filter(|a| a.host == host && vm.matches(&a.datanode))
            .map(|a| (a.reader.clone(), a.pools.clone()))
            .collect()
    }

    /// What a reader of this host (as the file names it) may read on other hosts: peer, patterns of DataNode VMs, patterns
    /// of block pools.
    #[must_use]
    pub fn sources(&self, reader: &str) -> Vec<(String, Vec<String>, Vec<String>)> {
        let mut sources = Vec::new();
        for peer in self.peers.iter().filter(|p| p.address.is_some()) {
            for allow in self.allow.iter().filter(|a| a.reader == reader) {
                let datanodes = narrow(&peer.datanodes, &allow.datanode);
                if !datanodes.is_empty() {
                    sources.push((peer.name.clone(), datanodes, allow.pools.clone()));
                }
            }
        }
        sources
    }

    /// Ports of other hosts that this one connects to.
    #[must_use]
    pub fn ports(&self) -> Vec<u16> {
        let addresses = self.peers.iter().filter_map(|p| p.address.as_deref());
        let mut ports: Vec<u16> = addresses.filter_map(port).collect();
        ports.sort_unstable();
        ports.dedup();
        ports
    }
}

/// The patterns of `some` narrowed by `pattern`: of two patterns of which one matches the other's text, the narrower one.
/// Patterns that only overlap give nothing, which denies access.
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
