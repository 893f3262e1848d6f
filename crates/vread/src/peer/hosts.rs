// SPDX-License-Identifier: Apache-2.0
//! The other hosts: their fingerprints, their grants and their counts.

use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use super::tls::{Fingerprint, Pins, parse_fingerprint};
use super::wire::ErrorCode;
use crate::control::{Grant, PeerCounts, PeerSpec};
use crate::lock::{lock, read, write};
use crate::pattern;

/// Maximum number of other hosts.
const MAX_HOSTS: usize = 256;

/// Counts of one host since the worker's start.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) links_out: AtomicU64,
    pub(super) links_in: AtomicU64,
    pub(super) asked: AtomicU64,
    pub(super) answered: AtomicU64,
    pub(super) bytes_in: AtomicU64,
    pub(super) bytes_out: AtomicU64,
    unknown: AtomicU64,
    withdrawn: AtomicU64,
    io_errors: AtomicU64,
    pub(super) broken: AtomicU64,
    why: Mutex<String>,
}

pub(super) fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

pub(super) fn decrement(counter: &AtomicU64) {
    counter.fetch_sub(1, Ordering::Relaxed);
}

impl Counts {
    /// Counts a failed request.
    pub(super) fn failed(&self, code: ErrorCode) {
        add(
            match code {
                ErrorCode::Unknown => &self.unknown,
                ErrorCode::Withdrawn => &self.withdrawn,
                ErrorCode::Io | ErrorCode::Refused | ErrorCode::Gone => &self.io_errors,
            },
            1,
        );
    }

    /// Sets the reason why there is no connection; empty while there is one.
    pub(super) fn set_last_error(&self, why: String) {
        *lock(&self.why) = why;
    }

    fn snapshot(&self) -> PeerCounts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PeerCounts {
            links_out: get(&self.links_out),
            links_in: get(&self.links_in),
            asked: get(&self.asked),
            answered: get(&self.answered),
            bytes_in: get(&self.bytes_in),
            bytes_out: get(&self.bytes_out),
            unknown: get(&self.unknown),
            withdrawn: get(&self.withdrawn),
            io_errors: get(&self.io_errors),
            broken: get(&self.broken),
            why: lock(&self.why).clone(),
        }
    }
}

/// Another host.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) fingerprints: HashSet<Fingerprint>,
    pub(super) addresses: Vec<SocketAddr>,
    grants: RwLock<Vec<Grant>>,
    revoked: AtomicBool,
    pub(super) counts: Arc<Counts>,
}

impl Host {
    fn new(spec: &PeerSpec, counts: Arc<Counts>) -> Result<Self, String> {
        let name = &spec.name;
        let fingerprints: Option<HashSet<_>> = spec
            .fingerprints
            .iter()
            .map(|text| parse_fingerprint(text))
            .collect();
        let fingerprints = fingerprints.filter(|f| !f.is_empty()).ok_or_else(|| {
            format!("host `{name}` has no fingerprint, or one that is not 64 hexadecimal digits")
        })?;
        let parse = |text: &String| {
            text.parse()
                .map_err(|_| format!("host `{name}`: `{text}` is not ADDRESS:PORT"))
        };
        Ok(Self {
            fingerprints,
            addresses: spec.addresses.iter().map(parse).collect::<Result<_, _>>()?,
            grants: RwLock::new(spec.grants.clone()),
            revoked: AtomicBool::new(false),
            counts,
        })
    }

    /// Whether the host was removed, or replaced by one with other fingerprints or addresses.
    pub(super) fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::SeqCst)
    }

    /// Whether the host may read blocks of a pool of a DataNode VM for one of its readers.
    pub(super) fn may(&self, reader: &str, datanode: &str, pool: &str) -> bool {
        let grants = read(&self.grants);
        !self.is_revoked()
            && grants.iter().any(|grant| {
                grant.datanode == datanode
                    && pattern::matches(&grant.reader, reader)
                    && grant.pools.iter().any(|p| pattern::matches(p, pool))
            })
    }

    /// The plain name of a DataNode VM that the host may read.
    pub(super) fn plain_name(&self, datanode: &str) -> String {
        let grants = read(&self.grants);
        let grant = grants.iter().find(|grant| grant.datanode == datanode);
        grant.map(|grant| grant.name.clone()).unwrap_or_default()
    }
}

/// All other hosts.
#[derive(Debug, Default)]
pub(super) struct Hosts {
    by_name: RwLock<BTreeMap<String, Arc<Host>>>,
    /// Fingerprints of accepted client certificates.
    pub(super) pins: Pins,
    pub(super) strangers: AtomicU64,
    pub(super) over_limit: AtomicU64,
}

impl Hosts {
    /// Replaces the list of hosts.
    ///
    /// # Errors
    /// The first invalid host; the list is unchanged then.
    pub(super) fn set(&self, specs: &[PeerSpec]) -> Result<(), String> {
        if specs.len() > MAX_HOSTS {
            return Err(format!("more than {MAX_HOSTS} hosts"));
        }
        let mut by_name = write(&self.by_name);
        let mut new: BTreeMap<String, Arc<Host>> = BTreeMap::new();
        let mut pins = HashSet::new();
        let mut kept = Vec::new();
        for spec in specs {
            let old = by_name.get(&spec.name);
            let counts = old.map(|old| old.counts.clone()).unwrap_or_default();
            let mut host = Arc::new(Host::new(spec, counts)?);
            if let Some(same) = old.filter(|old| {
                old.fingerprints == host.fingerprints && old.addresses == host.addresses
            }) {
                kept.push((same.clone(), spec.grants.clone()));
                host = same.clone();
            }
            for fingerprint in &host.fingerprints {
                if !pins.insert(*fingerprint) {
                    return Err(format!(
                        "host `{}` has the same fingerprint as another host",
                        spec.name
                    ));
                }
            }
            if new.insert(spec.name.clone(), host).is_some() {
                return Err(format!("there are two hosts `{}`", spec.name));
            }
        }
        for (host, grants) in kept {
            *write(&host.grants) = grants;
        }
        *write(&self.pins) = pins;
        for (name, old) in by_name.iter() {
            if !new.get(name).is_some_and(|new| Arc::ptr_eq(new, old)) {
                old.revoked.store(true, Ordering::SeqCst);
            }
        }
        *by_name = new;
        Ok(())
    }

    pub(super) fn get(&self, name: &str) -> Option<Arc<Host>> {
        let by_name = read(&self.by_name);
        by_name.get(name).cloned()
    }

    pub(super) fn by_fingerprint(&self, fingerprint: Fingerprint) -> Option<Arc<Host>> {
        let by_name = read(&self.by_name);
        let mut hosts = by_name.values();
        hosts
            .find(|host| host.fingerprints.contains(&fingerprint))
            .cloned()
    }

    pub(super) fn snapshot(&self) -> BTreeMap<String, PeerCounts> {
        let by_name = read(&self.by_name);
        by_name
            .iter()
            .map(|(name, host)| (name.clone(), host.counts.snapshot()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: &str, digit: &str) -> PeerSpec {
        PeerSpec {
            name: name.into(),
            fingerprints: vec![digit.repeat(64)],
            addresses: vec!["10.0.0.1:7".into()],
            grants: vec![Grant {
                reader: "client*".into(),
                datanode: "uml:dn1".into(),
                name: "dn1".into(),
                pools: vec!["BP-1*".into()],
            }],
        }
    }

    #[test]
    fn only_what_a_grant_names_may_be_read() {
        let hosts = Hosts::default();
        hosts.set(&[spec("a", "1")]).unwrap();
        let a = hosts.get("a").unwrap();
        assert!(a.may("client1", "uml:dn1", "BP-17"));
        for (reader, datanode, pool) in [
            ("other", "uml:dn1", "BP-17"),
            ("client1", "uml:dn2", "BP-17"),
            ("client1", "uml:dn1", "BP-2"),
        ] {
            assert!(!a.may(reader, datanode, pool), "{reader} {datanode} {pool}");
        }
        assert_eq!(a.plain_name("uml:dn1"), "dn1");
    }

    #[test]
    fn other_grants_hold_at_once_and_another_key_ends_the_host() {
        let hosts = Hosts::default();
        hosts.set(&[spec("a", "1"), spec("b", "2")]).unwrap();
        let (a, b) = (hosts.get("a").unwrap(), hosts.get("b").unwrap());
        let mut without = spec("a", "1");
        without.grants.clear();
        hosts.set(&[without, spec("b", "3")]).unwrap();
        assert!(!a.is_revoked() && !a.may("client1", "uml:dn1", "BP-17"));
        assert!(b.is_revoked() && !b.may("client1", "uml:dn1", "BP-17"));
        assert!(
            hosts
                .by_fingerprint([0x33; 32])
                .is_some_and(|host| !host.is_revoked())
        );
        assert!(hosts.by_fingerprint([0x22; 32]).is_none());
        assert_eq!(hosts.pins.read().unwrap().len(), 2);
    }

    #[test]
    fn invalid_hosts_are_refused_and_change_nothing() {
        let hosts = Hosts::default();
        hosts.set(&[spec("a", "1")]).unwrap();
        let mut nameless = spec("b", "2");
        nameless.addresses = vec!["hostb:7".into()];
        let mut keyless = spec("b", "2");
        keyless.fingerprints.clear();
        for bad in [
            vec![spec("a", "x")],
            vec![spec("a", "1"), spec("b", "1")],
            vec![spec("a", "1"), spec("a", "2")],
            vec![nameless],
            vec![keyless],
        ] {
            assert!(hosts.set(&bad).is_err(), "{bad:?}");
        }
        assert!(hosts.get("a").is_some_and(|a| !a.is_revoked()));
    }
}
