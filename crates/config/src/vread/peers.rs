// SPDX-License-Identifier: Apache-2.0
//! `[[vread.peer]]`: other hosts, and lines of `allow` that speak of them.

use std::net::SocketAddr;
use std::ops::Range;

use serde::Deserialize;
use toml::Spanned;
use viola_vread::pattern;

use super::Wrong;
use viola_cli::quantities::quoted;

/// Most other hosts.
const MAX_PEERS: usize = 256;
/// Bytes of a name.
const MAX_NAME: usize = 64;
/// Digits of a fingerprint.
const DIGITS: usize = 64;

/// Another host whose daemon is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// What it is called here.
    pub name: String,
    /// SHA-256 of the certificates by which it is known, 64 hexadecimal digits each; several while it changes its key.
    pub fingerprints: Vec<String>,
    /// Where it listens, `HOST:PORT`; none when it is never asked.
    pub address: Option<String>,
    /// Patterns of the DataNode VMs that are looked for there.
    pub datanodes: Vec<String>,
}

/// A line of `allow` with `host`: readers there may read blocks of a DataNode VM here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowHost {
    /// The other host, as its `[[vread.peer]]` calls it.
    pub host: String,
    /// Pattern of the names of the readers there.
    pub reader: String,
    /// Pattern of the names or identities of the DataNode VMs here.
    pub datanode: String,
    /// Patterns of the block pools.
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

/// The port, where an address is one at all: `10.0.0.2:7670`, `[fd00::2]:7670`, `hostb:7670`.
#[must_use]
pub fn port(address: &str) -> Option<u16> {
    let (host, port) = address.rsplit_once(':')?;
    let is_bare = !host.is_empty() && !host.contains([':', ' ', '/', '[', ']']);
    let is_address = address.parse::<SocketAddr>().is_ok();
    let port = port.parse().ok().filter(|p| *p > 0)?;
    (is_bare || is_address).then_some(port)
}

/// Checks all `[[vread.peer]]`.
pub(super) fn checked(raw: Vec<RawPeer>) -> Result<Vec<Peer>, Wrong> {
    let mut peers: Vec<Peer> = Vec::new();
    for raw in raw {
        let span = raw.name.span();
        if peers.len() == MAX_PEERS {
            return Err((span, format!("peer: more than {MAX_PEERS} other hosts")));
        }
        let peer = raw.checked()?;
        if peers.iter().any(|p| p.name == peer.name) {
            let what = format!(
                "name: {} has its [[vread.peer]] already",
                quoted(&peer.name)
            );
            return Err((span, what));
        }
        let same = |p: &&Peer| {
            let theirs = |f: &String| peer.fingerprints.contains(f);
            p.fingerprints.iter().any(theirs)
        };
        if let Some(other) = peers.iter().find(same) {
            let what = format!(
                "fingerprint: {} and {} cannot have the same one: each host needs a key of its own",
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
    fn checked(self) -> Result<Peer, Wrong> {
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
            .collect::<Result<Vec<_>, Wrong>>()?;
        if let Some(address) = &self.address
            && port(address.get_ref()).is_none()
        {
            let what = format!(
                "address: {} is none; write HOST:PORT, for example \"10.0.0.2:7670\"",
                quoted(address.get_ref())
            );
            return Err((address.span(), what));
        }
        let mut datanodes = Vec::new();
        for pattern in self.datanodes.into_iter().flatten() {
            if pattern.get_ref().trim().is_empty() {
                let what = "datanodes: a VM's name, identity or pattern is missing".into();
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

/// Reads the name of a host.
///
/// # Errors
/// A sentence when it is none.
pub fn host(text: &str) -> Result<String, String> {
    let name = text.trim();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if (1..=MAX_NAME).contains(&name.len()) && name.chars().all(plain) {
        return Ok(name.to_owned());
    }
    Err(format!(
        "name: {} is no name for a host; letters, digits, - . and _ are allowed, 1 to {MAX_NAME} of them",
        quoted(name)
    ))
}

fn missing(name: &str) -> String {
    format!(
        "fingerprint: without one {} cannot be told from others; viola keys show prints it there",
        quoted(name)
    )
}

/// Reads a fingerprint as `viola keys show` or openssl print it.
///
/// # Errors
/// A sentence when it is none.
pub fn fingerprint(text: &str) -> Result<String, String> {
    let digits: String = text
        .trim()
        .trim_start_matches("sha256:")
        .chars()
        .filter(|c| *c != ':')
        .collect::<String>()
        .to_ascii_lowercase();
    if digits.len() == DIGITS && digits.chars().all(|c| c.is_ascii_hexdigit()) {
        return Ok(digits);
    }
    Err(format!(
        "fingerprint: {} is none; it has {DIGITS} hexadecimal digits, as viola keys show prints them",
        quoted(text)
    ))
}

/// Whether a listening address can be one.
pub(super) fn listen(text: &Spanned<String>) -> Result<SocketAddr, Wrong> {
    text.get_ref()
        .parse::<SocketAddr>()
        .ok()
        .filter(|a| a.port() > 0)
        .ok_or_else(|| {
            let what = format!(
                "listen: {} is no address of this host; write IP:PORT, for example \"10.0.0.1:7670\" or \"[::]:7670\"",
                quoted(text.get_ref())
            );
            (text.span(), what)
        })
}

/// Whether lines of `allow` name hosts that are there, and these can connect.
pub(super) fn fits(
    allow: &[(AllowHost, Range<usize>)],
    peers: &[Peer],
    listens: bool,
) -> Result<(), Wrong> {
    for (line, span) in allow {
        if !peers.iter().any(|p| p.name == line.host) {
            let what = format!(
                "host: there is no [[vread.peer]] of name {}",
                quoted(&line.host)
            );
            return Err((span.clone(), what));
        }
        if !listens {
            let what = format!(
                "host: {} cannot connect, since this host does not listen; give listen in [vread]",
                quoted(&line.host)
            );
            return Err((span.clone(), what));
        }
    }
    Ok(())
}

impl super::Vread {
    /// Whether nobody may read anything, here or elsewhere.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.allow.is_empty() && self.hosts.is_empty()
    }

    /// Whether anybody on another host may read blocks of a VM.
    #[must_use]
    pub fn is_remote_datanode(&self, vm: &super::Named) -> bool {
        self.hosts.iter().any(|a| vm.matches(&a.datanode))
    }

    /// What readers of another host may read of a VM: pattern of their names, pools.
    #[must_use]
    pub fn granted(&self, host: &str, vm: &super::Named) -> Vec<(String, Vec<String>)> {
        self.hosts
            .iter()
            .filter(|a| a.host == host && vm.matches(&a.datanode))
            .map(|a| (a.reader.clone(), a.pools.clone()))
            .collect()
    }

    /// What a reader of this host, as it is named in the file, may look for elsewhere: for each peer that can be asked,
    /// patterns of DataNode VMs and of block pools.
    #[must_use]
    pub fn sources(&self, reader: &str) -> Vec<(String, Vec<String>, Vec<String>)> {
        let mut sources = Vec::new();
        for peer in self.peers.iter().filter(|p| p.address.is_some()) {
            for allow in self.allow.iter().filter(|a| a.reader == reader) {
                let datanodes = both(&peer.datanodes, &allow.datanode);
                if !datanodes.is_empty() {
                    sources.push((peer.name.clone(), datanodes, allow.pools.clone()));
                }
            }
        }
        sources
    }

    /// Ports of other hosts to which a connection is made.
    #[must_use]
    pub fn ports(&self) -> Vec<u16> {
        let addresses = self.peers.iter().filter_map(|p| p.address.as_deref());
        let mut ports: Vec<u16> = addresses.filter_map(port).collect();
        ports.sort_unstable();
        ports.dedup();
        ports
    }
}

/// Names that fit one of `some` and `pattern` too, as patterns. Where both have a `*`, the one that the other covers
/// as a text is the narrower one; of two that only overlap nothing is taken, which is the safe side.
fn both(some: &[String], pattern: &str) -> Vec<String> {
    let mut narrow: Vec<String> = Vec::new();
    for other in some {
        if pattern::matches(other, pattern) {
            return vec![pattern.to_owned()];
        }
        if pattern::matches(pattern, other) {
            narrow.push(other.clone());
        }
    }
    narrow
}

#[cfg(test)]
mod tests;
