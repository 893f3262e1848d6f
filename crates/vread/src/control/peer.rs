// SPDX-License-Identifier: Apache-2.0
//! What is said about other hosts.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A private key as PEM text. It is shown to nobody by accident.
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
    /// Where it listens, as `ADDRESS:PORT` with numbers only, tried one after the other; none if it is never asked.
    pub addresses: Vec<String>,
    /// What it may read here.
    pub grants: Vec<Grant>,
}

/// One permission of another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Grant {
    /// Its readers, as a pattern with `*` and `?`.
    pub reader: String,
    /// The DataNode VM here, exactly as [`super::Order::Datanode`] names it.
    pub datanode: String,
    /// Its plain name, for the other host's patterns and people.
    #[serde(default)]
    pub name: String,
    /// Block pools, as patterns.
    pub pools: Vec<String>,
}

/// A host that a reader of this host may ask.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Name of the host.
    pub peer: String,
    /// DataNode VMs whose blocks are taken from it, as patterns.
    pub datanodes: Vec<String>,
    /// Block pools that it is asked for, as patterns.
    pub pools: Vec<String>,
}

/// What a peer worker has done. Counts are since its start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerStat {
    /// Addresses on which other hosts are awaited.
    pub listening: Vec<String>,
    /// DataNode VMs of this host that other hosts may read, as far as grants say so.
    pub datanodes: Vec<String>,
    /// Numbers of the images in use, by DataNode VM.
    pub images: BTreeMap<String, Vec<u32>>,
    /// Readers of this host that may ask.
    pub askers: Vec<String>,
    /// Connections refused, because nobody here knows that certificate or there was no TLS to speak of.
    pub strangers: u64,
    /// By name of the other host.
    pub peers: BTreeMap<String, PeerCounts>,
}

/// What went on with one other host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerCounts {
    /// Connections to it that are ready, one for each reader of this host.
    pub links_out: u64,
    /// Connections from it that are ready.
    pub links_in: u64,
    /// Requests sent to it.
    pub asked: u64,
    /// Requests of it that were answered.
    pub answered: u64,
    /// Bytes of blocks that came from it.
    pub bytes_in: u64,
    /// Bytes of blocks that went to it.
    pub bytes_out: u64,
    /// Answers in either direction that a block is not known or not allowed.
    pub unknown: u64,
    /// Answers in either direction that a block was withdrawn while it was read.
    pub withdrawn: u64,
    /// Other errors in either direction.
    pub io_errors: u64,
    /// Connections to it that ended after they had been ready.
    pub broken: u64,
    /// Why the last connection to it could not be made, or ended; empty while all is well.
    pub why: String,
}
