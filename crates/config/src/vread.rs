// SPDX-License-Identifier: Apache-2.0
//! `[vread]` and `[vm.vread]`: which VMs may read blocks of which DataNode VMs, and what viola cannot find out about a VM.

use std::net::SocketAddr;
use std::ops::Range;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use toml::Spanned;
use viola_vread::control::{Format, Limits};
use viola_vread::pattern;

use crate::value::absolute;
use viola_cli::quantities::quoted;

pub mod peers;

pub use peers::{AllowHost, Peer};

/// Default path of this host's private key.
pub const DEFAULT_KEY: &str = "/etc/viola/host.key";
/// Default path of this host's certificate.
pub const DEFAULT_CERTIFICATE: &str = "/etc/viola/host.crt";

/// A pair of `allow`: a VM that may read blocks of others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allow {
    /// Name or identity of the reading VM.
    pub reader: String,
    /// Pattern of names or identities of DataNode VMs.
    pub datanode: String,
    /// Patterns of block pools.
    pub pools: Vec<String>,
}

/// `[vread]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vread {
    /// Allowed pairs of this host. Access is denied by default.
    pub allow: Vec<Allow>,
    /// Folder of the mounts' vhost-user sockets; `None` for `mounts` in the run directory.
    pub sockets: Option<PathBuf>,
    /// User of the VMMs, who may connect to the sockets.
    pub vmm_user: String,
    /// User of the workers; never root.
    pub user: String,
    /// Owner of the files in the mount, as a uid of the reading VM.
    pub uid: u32,
    /// Bounds of what each agent may register.
    pub limits: Limits,
    /// Address on which other hosts connect; `None` to serve none.
    pub listen: Option<SocketAddr>,
    /// File of this host's private key.
    pub key: PathBuf,
    /// File of this host's certificate.
    pub certificate: PathBuf,
    /// Other hosts that this one connects to or serves.
    pub peers: Vec<Peer>,
    /// Allowed pairs whose reader is on another host.
    pub hosts: Vec<AllowHost>,
}

impl Default for Vread {
    fn default() -> Self {
        Self {
            allow: Vec::new(),
            sockets: None,
            vmm_user: "root".into(),
            user: "nobody".into(),
            uid: 0,
            limits: Limits::default(),
            listen: None,
            key: DEFAULT_KEY.into(),
            certificate: DEFAULT_CERTIFICATE.into(),
            peers: Vec::new(),
            hosts: Vec::new(),
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

/// `[vread]` as it stands in the file, with positions.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Raw {
    allow: Vec<RawAllow>,
    #[serde(deserialize_with = "some_absolute")]
    sockets: Option<PathBuf>,
    vmm_user: Option<Spanned<String>>,
    user: Option<Spanned<String>>,
    uid: Option<u32>,
    blocks: Option<Spanned<i64>>,
    extents: Option<Spanned<i64>>,
    names_per_s: Option<Spanned<i64>>,
    listen: Option<Spanned<String>>,
    #[serde(deserialize_with = "some_absolute")]
    key: Option<PathBuf>,
    #[serde(deserialize_with = "some_absolute")]
    certificate: Option<PathBuf>,
    peer: Vec<peers::RawPeer>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawAllow {
    reader: Option<Spanned<String>>,
    host: Option<Spanned<String>>,
    datanode: Spanned<String>,
    pools: Option<Vec<Spanned<String>>>,
}

/// An error, and the position of the value that caused it.
pub type ValueError = (Range<usize>, String);

/// Entries that `allow` may have.
const MAX_ALLOW_ENTRIES: usize = 1024;

impl Raw {
    /// Checks all that does not depend on the host.
    pub fn validate(self) -> Result<Vread, ValueError> {
        let default = Vread::default();
        let mut allow = Vec::new();
        let mut hosts = Vec::new();
        for line in self.allow {
            match line.validate()? {
                Entry::Local(line) => allow.push(line),
                Entry::Remote(line, span) => hosts.push((line, span)),
            }
            if allow.len() + hosts.len() > MAX_ALLOW_ENTRIES {
                return Err((
                    0..0,
                    format!("allow: more than {MAX_ALLOW_ENTRIES} entries in [vread]"),
                ));
            }
        }
        let text = |key: &str, value: Option<Spanned<String>>, default: String| match value {
            Some(text) if text.get_ref().trim().is_empty() => Err((
                text.span(),
                format!("{key}: empty; write the name of a user"),
            )),
            Some(text) => Ok(text.into_inner()),
            None => Ok(default),
        };
        let number = |key: &str, value: Option<Spanned<i64>>, max: u32, default: u32| match value {
            None => Ok(default),
            Some(n) => match u32::try_from(*n.get_ref()) {
                Ok(number) if (1..=max).contains(&number) => Ok(number),
                _ => Err((
                    n.span(),
                    format!(
                        "{key}: {} is out of range; 1 to {max} is allowed",
                        n.get_ref()
                    ),
                )),
            },
        };
        let user = self.user.as_ref().map(Spanned::span);
        let listen = self.listen.as_ref().map(peers::listen).transpose()?;
        let peers = peers::validate(self.peer)?;
        peers::check_allow(&hosts, &peers, listen.is_some())?;
        let vread = Vread {
            listen,
            key: self.key.unwrap_or(default.key),
            certificate: self.certificate.unwrap_or(default.certificate),
            peers,
            hosts: hosts.into_iter().map(|(line, _)| line).collect(),
            allow,
            sockets: self.sockets,
            vmm_user: text("vmm_user", self.vmm_user, default.vmm_user)?,
            user: text("user", self.user, default.user)?,
            uid: self.uid.unwrap_or(default.uid),
            limits: Limits {
                blocks: number("blocks", self.blocks, 1 << 20, default.limits.blocks)?,
                extents: number("extents", self.extents, 1 << 24, default.limits.extents)?,
                names_per_s: number(
                    "names_per_s",
                    self.names_per_s,
                    1_000_000,
                    default.limits.names_per_s,
                )?,
            },
        };
        if let Some(span) = user
            && vread.user == "root"
        {
            return Err((
                span,
                "user: root is not allowed, because the workers parse input of guests".into(),
            ));
        }
        Ok(vread)
    }
}

/// An entry of `allow`.
enum Entry {
    /// The reader is a VM of this host.
    Local(Allow),
    /// The reader is on another host; with the position of its name.
    Remote(AllowHost, Range<usize>),
}

impl RawAllow {
    fn validate(self) -> Result<Entry, ValueError> {
        let trimmed = |text: &Spanned<String>| text.get_ref().trim().to_owned();
        let reader = self.reader.as_ref().map(trimmed);
        if let Some(span) = self.reader.as_ref().map(Spanned::span)
            && reader.as_ref().is_some_and(String::is_empty)
        {
            return Err((
                span,
                "reader: empty; write the name or identity of a VM".into(),
            ));
        }
        if let (Some(reader), Some(span), None) =
            (&reader, self.reader.as_ref().map(Spanned::span), &self.host)
            && reader.contains(['*', '?'])
        {
            let what = format!(
                "reader: {} is a pattern; name one VM, because its socket is made before it starts",
                quoted(reader)
            );
            return Err((span, what));
        }
        let datanode = self.datanode.get_ref().trim().to_owned();
        if datanode.is_empty() {
            let what =
                "datanode: empty; write the name, identity or pattern of DataNode VMs".into();
            return Err((self.datanode.span(), what));
        }
        let mut pools = Vec::new();
        for pool in self.pools.into_iter().flatten() {
            if !pool.get_ref().starts_with("BP-") {
                let what = format!(
                    "pools: {} is not a block pool; names of block pools begin with BP-",
                    quoted(pool.get_ref())
                );
                return Err((pool.span(), what));
            }
            pools.push(pool.into_inner());
        }
        if pools.is_empty() {
            pools.push("*".into());
        }
        match (self.host, reader) {
            (Some(host), reader) => {
                let line = AllowHost {
                    host: host.get_ref().trim().to_owned(),
                    reader: reader.unwrap_or_else(|| "*".into()),
                    datanode,
                    pools,
                };
                Ok(Entry::Remote(line, host.span()))
            }
            (None, Some(reader)) => Ok(Entry::Local(Allow {
                reader,
                datanode,
                pools,
            })),
            (None, None) => {
                let what = "reader: missing; write reader for a VM of this host, or host for readers of another host";
                Err((self.datanode.span(), what.into()))
            }
        }
    }
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
    /// Readers of `allow` as the file names them, each once.
    pub fn readers(&self) -> Vec<&str> {
        let mut readers: Vec<&str> = Vec::new();
        for allow in &self.allow {
            if !readers.contains(&allow.reader.as_str()) {
                readers.push(&allow.reader);
            }
        }
        readers
    }

    /// Whether `allow` has a reader for blocks of this VM.
    pub fn is_datanode(&self, vm: &Named) -> bool {
        self.allow.iter().any(|a| vm.matches(&a.datanode))
    }

    /// Patterns of the block pools that a reader (as the file names it) may read of a DataNode VM; empty for none.
    pub fn pools(&self, reader: &str, datanode: &Named) -> Vec<String> {
        let mut pools: Vec<String> = Vec::new();
        let of_reader = self.allow.iter().filter(|a| a.reader == reader);
        for allow in of_reader.filter(|a| datanode.matches(&a.datanode)) {
            pools.extend(allow.pools.iter().cloned());
        }
        // A VM reads its own blocks from its own disk.
        if datanode.is(reader) {
            pools.clear();
        }
        pools.sort_unstable();
        pools.dedup();
        pools
    }
}

fn some_absolute<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<PathBuf>, D::Error> {
    absolute(d).map(Some)
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
