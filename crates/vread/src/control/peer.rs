// SPDX-License-Identifier: Apache-2.0
//! Messages about other hosts.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A private key as PEM text. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// Another host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerSpec {
    /// Its name in the configuration.
    pub name: String,
    /// SHA-256 of its certificate in DER, 64 hexadecimal digits; two while its key is being changed.
    pub fingerprints: Vec<String>,
    /// Addresses on which it listens, `ADDRESS:PORT` in numbers, tried in order; empty if this host never asks it.
    pub addresses: Vec<String>,
    /// What it may read on this host.
    pub grants: Vec<Grant>,
}

/// A permission of another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Grant {
    /// Pattern of its readers' names, with `*` and `?`.
    pub reader: String,
    /// The DataNode VM on this host, exactly as [`super::Order::Datanode`] names it.
    pub datanode: String,
    /// The VM's plain name, for the other host's patterns and for messages.
    #[serde(default)]
    pub name: String,
    /// Patterns of block pools.
    pub pools: Vec<String>,
}

/// A host that a reader on this host may ask.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Name of the host.
    pub peer: String,
    /// Patterns of DataNode VMs whose blocks the reader accepts from it.
    pub datanodes: Vec<String>,
    /// Patterns of block pools that the reader asks it for.
    pub pools: Vec<String>,
}

/// Statistics of a peer worker. Counts begin at its start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerStat {
    /// Addresses on which the worker listens for other hosts.
    pub listening: Vec<String>,
    /// DataNode VMs of this host that other hosts may read within their grants.
    pub datanodes: Vec<String>,
    /// Numbers of the disk images in use, by DataNode VM.
    pub images: BTreeMap<String, Vec<u32>>,
    /// Readers of this host that may ask other hosts.
    pub askers: Vec<String>,
    /// Refused connections: the certificate was unknown, or no valid TLS handshake or hello came.
    pub strangers: u64,
    /// Refused connections: too many were open, of one address or in all.
    pub over_limit: u64,
    /// Counts by the other host's name.
    pub peers: BTreeMap<String, PeerCounts>,
}

/// Counts of one other host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerCounts {
    /// Ready connections to it, one for each reader of this host.
    pub links_out: u64,
    /// Ready connections from it.
    pub links_in: u64,
    /// Requests sent to it.
    pub asked: u64,
    /// Requests of it that this host answered.
    pub answered: u64,
    /// Block bytes received from it.
    pub bytes_in: u64,
    /// Block bytes sent to it.
    pub bytes_out: u64,
    /// Answers in either direction: block unknown or not allowed.
    pub unknown: u64,
    /// Answers in either direction: block withdrawn during the read.
    pub withdrawn: u64,
    /// Other errors in either direction.
    pub io_errors: u64,
    /// Connections to it that ended after they were ready.
    pub broken: u64,
    /// Why the last connection to it failed or ended; empty while it is connected.
    pub why: String,
}
