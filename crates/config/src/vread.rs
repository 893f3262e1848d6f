// SPDX-License-Identifier: Apache-2.0
//! `[vread]` and `[vm.vread]`: which VMs may read blocks of which DataNode VMs, and what viola cannot find out about a VM.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};
use viola_vread::control::{Format, Limits};
use viola_vread::pattern;

use crate::Conflict;
use crate::value::{absolute, name, number, parsed, some_absolute, some_name};
use viola_cli::quantities::quoted;

pub mod peers;

pub use peers::Peer;

/// Default path of this host's private key.
pub const DEFAULT_KEY: &str = "/etc/viola/host.key";
/// Default path of this host's certificate.
pub const DEFAULT_CERTIFICATE: &str = "/etc/viola/host.crt";
/// Most entries of `allow`.
const MAX_ALLOW_ENTRIES: usize = 1024;

/// An entry of `allow`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Allow {
    /// Name or identity of a reading VM of this host. With `host`, a pattern of names of readers on
    /// that host; `None` for all.
    #[serde(default, deserialize_with = "some_name")]
    pub reader: Option<String>,
    /// Name of the readers' host in `[[vread.peer]]`; `None` for a reader of this host.
    #[serde(default, deserialize_with = "some_name")]
    pub host: Option<String>,
    /// Pattern of names or identities of DataNode VMs of this host.
    #[serde(deserialize_with = "name")]
    pub datanode: String,
    /// Patterns of block pools.
    #[serde(default = "peers::all", deserialize_with = "pools")]
    pub pools: Vec<String>,
}

impl Allow {
    /// Whether the reader is a VM of this host.
    fn is_local(&self) -> bool {
        self.host.is_none()
    }

    /// Whether the entry is for blocks of this VM of this host.
    pub fn is_for_datanode(&self, name: &str) -> bool {
        pattern::matches(&self.datanode, name)
    }

    /// Whether the entry is for this reader of this host, as the file names it.
    fn is_for(&self, reader: &str) -> bool {
        self.is_local() && self.reader.as_deref() == Some(reader)
    }
}

/// `[vread]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Vread {
    /// Allowed pairs. Access is denied by default.
    pub allow: Vec<Allow>,
    /// Folder of the mounts' vhost-user sockets; `None` for `mounts` in the run directory.
    #[serde(deserialize_with = "some_absolute")]
    pub sockets: Option<PathBuf>,
    /// User of the VMMs, who may connect to the sockets; `None` for libvirt's.
    #[serde(deserialize_with = "some_name")]
    pub vmm_user: Option<String>,
    /// Numbers of users for the workers, one for each.
    #[serde(deserialize_with = "uid_range")]
    pub worker_uids: UidRange,
    /// One user for all workers instead; never root.
    #[serde(deserialize_with = "worker_user")]
    pub user: Option<String>,
    /// Owner of the files in the mount, as a uid of the reading VM.
    pub uid: u32,
    #[serde(deserialize_with = "number::<_, { 1 << 20 }>")]
    blocks: u32,
    #[serde(deserialize_with = "number::<_, { 1 << 24 }>")]
    extents: u32,
    #[serde(deserialize_with = "number::<_, 1_000_000>")]
    names_per_s: u32,
    /// Address on which other hosts connect; `None` to serve none.
    #[serde(deserialize_with = "listen")]
    pub listen: Option<SocketAddr>,
    /// File of this host's private key.
    #[serde(deserialize_with = "absolute")]
    pub key: PathBuf,
    /// File of this host's certificate.
    #[serde(deserialize_with = "absolute")]
    pub certificate: PathBuf,
    /// Other hosts that this one connects to or serves.
    #[serde(rename = "peer")]
    pub peers: Vec<Peer>,
}

impl Default for Vread {
    fn default() -> Self {
        let limits = Limits::default();
        Self {
            allow: Vec::new(),
            sockets: None,
            vmm_user: None,
            worker_uids: UidRange::default(),
            user: None,
            uid: 0,
            blocks: limits.blocks,
            extents: limits.extents,
            names_per_s: limits.names_per_s,
            listen: None,
            key: DEFAULT_KEY.into(),
            certificate: DEFAULT_CERTIFICATE.into(),
            peers: Vec::new(),
        }
    }
}

/// A file in the chain of a disk image.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// Path of the file or block device.
    #[serde(deserialize_with = "absolute")]
    pub path: PathBuf,
    /// Format of the image.
    pub format: Format,
}

/// A disk of a VM, configured by hand.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Image {
    /// Name of the device in the guest.
    pub device: String,
    /// Path of the file or block device that the VM writes to.
    #[serde(deserialize_with = "absolute")]
    pub path: PathBuf,
    /// Format of the image.
    pub format: Format,
    /// Backing files, the nearest first.
    #[serde(default)]
    pub backing: Vec<Layer>,
}

/// Transport of blocks to the reading VM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Both are offered; the VM's devices decide.
    #[default]
    Auto,
    /// Only virtio-fs, by shared memory.
    Virtiofs,
    /// Only a byte stream; no vhost-user socket is made.
    Stream,
}

/// `[vm.vread]`
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VmVread {
    /// Host end of the channel to the agent.
    #[serde(deserialize_with = "some_absolute")]
    pub agent: Option<PathBuf>,
    /// A QMP socket for viola's exclusive use, for events.
    #[serde(deserialize_with = "some_absolute")]
    pub qmp: Option<PathBuf>,
    /// Owner of the files in its mount; overrides `uid` of `[vread]`.
    pub uid: Option<u32>,
    /// Transport of blocks to it.
    pub transport: Transport,
    /// Host end of the stream through which it reads.
    #[serde(deserialize_with = "some_absolute")]
    pub stream: Option<PathBuf>,
    /// Its disks; empty to find them.
    pub image: Vec<Image>,
}

fn worker_user<'de, D: Deserializer<'de>>(d: D) -> Result<Option<String>, D::Error> {
    match name(d)? {
        user if user == "root" => Err(D::Error::custom(
            "root is not allowed, because the workers parse input of guests",
        )),
        user => Ok(Some(user)),
    }
}

/// Numbers of users, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UidRange {
    /// The lowest.
    pub first: u32,
    /// The highest.
    pub last: u32,
}

impl Default for UidRange {
    /// The first of those that systemd's list of ranges (UIDS-GIDS.md) calls unused.
    fn default() -> Self {
        Self {
            first: 1_879_048_192,
            last: 1_879_052_287,
        }
    }
}

impl fmt::Display for UidRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

/// Parses `FIRST-LAST`, without root and without the number that means none.
fn uid_range<'de, D: Deserializer<'de>>(d: D) -> Result<UidRange, D::Error> {
    parsed(d, "a range in quotes, for example \"200000-200999\"", |t| {
        let range = t.split_once('-').and_then(|(first, last)| {
            let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
            (1 <= first && first <= last && last < u32::MAX).then_some(UidRange { first, last })
        });
        range.ok_or_else(|| format!("{} is no range of user numbers above 0", quoted(t)))
    })
}

fn pools<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<String>, D::Error> {
    let pools = Vec::<String>::deserialize(d)?;
    match pools.iter().find(|pool| !pool.starts_with("BP-")) {
        Some(pool) => Err(D::Error::custom(format!(
            "{} is not a block pool; names of block pools begin with BP-",
            quoted(pool)
        ))),
        None if pools.is_empty() => Ok(peers::all()),
        None => Ok(pools),
    }
}

fn listen<'de, D: Deserializer<'de>>(d: D) -> Result<Option<SocketAddr>, D::Error> {
    parsed(d, "an address in quotes", |t| {
        match t.parse::<SocketAddr>().ok().filter(|a| a.port() > 0) {
            Some(address) => Ok(Some(address)),
            None => Err(format!(
                "{} is not an address; write IP:PORT, for example \"10.0.0.1:7670\" or \"[::]:7670\"",
                quoted(t)
            )),
        }
    })
}

/// Identity and name of a VM; the configuration may use either.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Named {
    /// Identity, such as `qemu:db01`.
    pub id: String,
    /// Name, such as `db01`.
    pub name: String,
}

impl Named {
    /// Whether the text is the VM's identity or name.
    pub fn is(&self, text: &str) -> bool {
        self.id == text || self.name == text
    }

    /// Whether the pattern matches the VM's identity or name.
    pub fn matches(&self, text: &str) -> bool {
        pattern::matches(text, &self.id) || pattern::matches(text, &self.name)
    }
}

impl Vread {
    /// Checks the entries of `allow` and the other hosts against each other.
    pub(super) fn check(&self) -> Result<(), Conflict> {
        if self.allow.len() > MAX_ALLOW_ENTRIES {
            return Err(Conflict {
                path: "vread.allow".into(),
                what: format!("allow: more than {MAX_ALLOW_ENTRIES} entries in [vread]"),
            });
        }
        for (i, entry) in self.allow.iter().enumerate() {
            if let Err((key, what)) = self.check_entry(entry) {
                return Err(Conflict {
                    path: format!("vread.allow.{i}.{key}"),
                    what: format!("{key}: {what}"),
                });
            }
        }
        peers::check(&self.peers)
    }

    fn check_entry(&self, entry: &Allow) -> Result<(), (&'static str, String)> {
        let wrong = |key: &'static str, what: String| Err((key, what));
        match (&entry.host, &entry.reader) {
            (Some(host), _) if self.peers.iter().all(|p| p.name != *host) => wrong(
                "host",
                format!("no [[vread.peer]] has the name {}", quoted(host)),
            ),
            (Some(host), _) if self.listen.is_none() => wrong(
                "host",
                format!(
                    "{} cannot connect, because this host does not listen; set listen in [vread]",
                    quoted(host)
                ),
            ),
            (Some(_), _) => Ok(()),
            (None, Some(reader)) if reader.contains(['*', '?']) => wrong(
                "reader",
                format!(
                    "{} is a pattern; name one VM, because its socket is made before it starts",
                    quoted(reader)
                ),
            ),
            (None, Some(_)) => Ok(()),
            (None, None) => wrong(
                "reader",
                "missing; write reader for a VM of this host, or host for readers of another host"
                    .into(),
            ),
        }
    }

    /// Bounds of what each agent may register.
    pub fn limits(&self) -> Limits {
        Limits {
            blocks: self.blocks,
            extents: self.extents,
            names_per_s: self.names_per_s,
        }
    }

    /// Whether `allow` is empty.
    pub fn is_off(&self) -> bool {
        self.allow.is_empty()
    }

    /// Readers of this host as the file names them, each once.
    pub fn readers(&self) -> Vec<&str> {
        let mut readers: Vec<&str> = Vec::new();
        let local = self.allow.iter().filter(|a| a.is_local());
        for reader in local.filter_map(|a| a.reader.as_deref()) {
            if !readers.contains(&reader) {
                readers.push(reader);
            }
        }
        readers
    }

    /// Whether `allow` has a reader, of this host or another one, for blocks of this VM.
    pub fn is_datanode(&self, vm: &Named) -> bool {
        self.allow.iter().any(|a| vm.matches(&a.datanode))
    }

    /// Patterns of the block pools that a reader of this host (as the file names it) may read of a DataNode VM; empty for
    /// none.
    pub fn pools(&self, reader: &str, datanode: &Named) -> Vec<String> {
        // A VM reads its own blocks from its own disk.
        if datanode.is(reader) {
            return Vec::new();
        }
        let entries = self.allow.iter().filter(|a| a.is_for(reader));
        let mut pools: Vec<String> = entries
            .filter(|a| datanode.matches(&a.datanode))
            .flat_map(|a| a.pools.iter().cloned())
            .collect();
        pools.sort_unstable();
        pools.dedup();
        pools
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Config, ConfigError};
    use super::*;
    use std::path::Path;

    fn parse(text: &str) -> Result<Config, ConfigError> {
        Config::parse(Path::new("v.toml"), text)
    }

    fn said(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    fn vm(name: &str) -> Named {
        Named {
            id: format!("uml:{name}"),
            name: name.into(),
        }
    }

    #[test]
    fn no_vm_may_read_by_default() {
        let v = parse("").unwrap().vread;
        assert_eq!(v, Vread::default());
        assert!(v.readers().is_empty() && !v.is_datanode(&vm("dn1")));
    }

    #[test]
    fn an_allowed_reader_reads_what_the_pattern_names() {
        let v = parse(
            "[vread]\nallow = [{ reader = \"vm1\", datanode = \"dn*\" }, \
             { reader = \"vm2\", datanode = \"uml:dn1\", pools = [\"BP-1-*\"] }, \
             { reader = \"dn1\", datanode = \"dn*\" }]",
        )
        .unwrap()
        .vread;
        assert_eq!(v.readers(), ["vm1", "vm2", "dn1"]);
        assert!(v.is_datanode(&vm("dn1")) && !v.is_datanode(&vm("web")));
        assert_eq!(v.pools("vm1", &vm("dn2")), ["*"]);
        assert_eq!(v.pools("vm2", &vm("dn1")), ["BP-1-*"]);
        assert!(v.pools("vm2", &vm("dn2")).is_empty());
        assert!(v.pools("vm3", &vm("dn1")).is_empty());
        // A DataNode VM that is a client too reads the others' blocks.
        assert_eq!(v.pools("dn1", &vm("dn2")), ["*"]);
        assert!(v.pools("dn1", &vm("dn1")).is_empty());
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        assert_eq!(
            said("[vread]\nallow = [\n  { reader = \"vm*\", datanode = \"dn1\" },\n]"),
            "v.toml:3: reader: \"vm*\" is a pattern; name one VM, because its socket is made before it starts"
        );
        assert!(
            said("[vread]\nallow = [{ reader = \"a\" }]")
                .starts_with("v.toml:2: missing key datanode")
        );
        assert!(
            said("[vread]\nallow = [{ reader = \"a\", datanode = \"b\", pool = 1 }]").starts_with(
                "v.toml:2: unknown key pool; allowed are reader, host, datanode, pools"
            )
        );
        assert!(
            said("[vread]\n\nallowed = []")
                .starts_with("v.toml:3: unknown key allowed; allowed are allow, sockets")
        );
        assert!(
            said("[vread]\nuser = \"root\"").starts_with("v.toml:2: user: root is not allowed")
        );
        assert_eq!(
            said("[vread]\nblocks = 0"),
            "v.toml:2: blocks: 0 is out of range; 1 to 1048576 is allowed"
        );
        assert!(
            said("[vread]\nallow = [{ reader = \"a\", datanode = \"b\", pools = [\"x\"] }]")
                .starts_with("v.toml:2: pools: \"x\" is not a block pool")
        );
        assert!(said("[vread]\nsockets = \"x\"").contains("is not an absolute path"));
        assert!(
            said("[[vm]]\nname = \"a\"\n[vm.vread]\nagent = \"x\"")
                .contains("v.toml:4: agent: \"x\" is not an absolute")
        );
        assert!(said("[[vm]]\nname = \"a\"\n[[vm.vread.image]]\ndevice = \"vda\"\npath = \"/a\"\nformat = \"vmdk\"")
            .contains("v.toml:6: format: vmdk is not allowed; write raw or qcow2"));
    }

    #[test]
    fn a_vm_may_name_its_channel_and_images() {
        let c = parse(
            "[[vm]]\nname = \"dn1\"\n[vm.vread]\nagent = \"/run/dn1\"\nuid = 1000\n\
             [[vm.vread.image]]\ndevice = \"vda\"\npath = \"/a.qcow2\"\nformat = \"qcow2\"\n\
             backing = [{ path = \"/b\", format = \"raw\" }]\n[[vm]]\nname = \"x\"",
        )
        .unwrap();
        let v = &c.vm("uml:dn1", "dn1").unwrap().vread;
        assert_eq!(v.agent.as_deref(), Some(Path::new("/run/dn1")));
        assert_eq!((v.uid, v.image.len()), (Some(1000), 1));
        assert_eq!(v.image[0].backing[0].format, Format::Raw);
        assert_eq!(c.vm("uml:x", "x").unwrap().vread, VmVread::default());
    }
}
