// SPDX-License-Identifier: Apache-2.0
//! `[vread]`, and `[vm.vread]` of a VM: who may read whose blocks, and what viola cannot find out about a VM itself.

use std::net::SocketAddr;
use std::ops::Range;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use toml::Spanned;
use viola_vread::control::{Format, Limits};
use viola_vread::pattern;

use super::absolute;
use viola_cli::quantities::quoted;

pub mod peers;

pub use peers::{AllowHost, Peer};

/// The key of this host, unless told otherwise.
pub const DEFAULT_KEY: &str = "/etc/viola/host.key";
/// The certificate to it.
pub const DEFAULT_CERTIFICATE: &str = "/etc/viola/host.crt";

/// One line of `allow`: a VM may read blocks of others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allow {
    /// Name or identity of the VM that reads.
    pub reader: String,
    /// Pattern of the names or identities of the DataNode VMs.
    pub datanode: String,
    /// Patterns of the block pools.
    pub pools: Vec<String>,
}

/// `[vread]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vread {
    /// Who may read whose blocks; nobody, unless it is said.
    pub allow: Vec<Allow>,
    /// Where the sockets of the mounts are; `None` for `mounts` in the run directory.
    pub sockets: Option<PathBuf>,
    /// User that a VMM runs as, who may connect to the sockets.
    pub vmm_user: String,
    /// User that the workers run as.
    pub user: String,
    /// User of the reading VM to whom the files in the mount belong.
    pub uid: u32,
    /// Bounds for each agent.
    pub limits: Limits,
    /// Where other hosts connect; `None` for nowhere.
    pub listen: Option<SocketAddr>,
    /// File with the key by which other hosts know this one.
    pub key: PathBuf,
    /// File with the certificate to it.
    pub certificate: PathBuf,
    /// Other hosts.
    pub peers: Vec<Peer>,
    /// Who may read from there.
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

/// One file of a disk image.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// The file or block device.
    #[serde(deserialize_with = "absolute")]
    pub path: PathBuf,
    /// How it is laid out.
    pub format: Format,
}

/// A disk of a VM, said instead of found.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Image {
    /// What the guest calls it.
    pub device: String,
    /// The file or block device that the VM writes to.
    #[serde(deserialize_with = "absolute")]
    pub path: PathBuf,
    /// How it is laid out.
    pub format: Format,
    /// What it lies on, the nearest first.
    #[serde(default)]
    pub backing: Vec<Layer>,
}

/// How blocks come to a VM that reads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// As the VM is made: both ways are offered.
    #[default]
    Auto,
    /// By shared memory only.
    Virtiofs,
    /// By a byte stream only; there is no socket for its hypervisor.
    Stream,
}

/// `[vm.vread]`
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VmVread {
    /// The host's end of the channel to the agent.
    #[serde(deserialize_with = "some_absolute")]
    pub agent: Option<PathBuf>,
    /// A QMP socket for viola alone, for events.
    #[serde(deserialize_with = "some_absolute")]
    pub qmp: Option<PathBuf>,
    /// User to whom the files in its mount belong, instead of `uid` in `[vread]`.
    pub uid: Option<u32>,
    /// How blocks come to it.
    pub transport: Transport,
    /// The host's end of the stream through which it reads.
    #[serde(deserialize_with = "some_absolute")]
    pub stream: Option<PathBuf>,
    /// Its disks; empty to have them found.
    pub image: Vec<Image>,
}

/// What the file says about `[vread]`, with the places where it says it.
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

/// Something wrong, and where.
pub type Wrong = (Range<usize>, String);

/// Most lines of `allow`.
const MAX_ALLOW: usize = 1024;

impl Raw {
    /// Checks what can be checked without the host.
    pub fn checked(self) -> Result<Vread, Wrong> {
        let default = Vread::default();
        let mut allow = Vec::new();
        let mut hosts = Vec::new();
        for line in self.allow {
            match line.checked()? {
                Line::Here(line) => allow.push(line),
                Line::There(line, span) => hosts.push((line, span)),
            }
            if allow.len() + hosts.len() > MAX_ALLOW {
                return Err((
                    0..0,
                    format!("allow: more than {MAX_ALLOW} lines in [vread]"),
                ));
            }
        }
        let text = |key: &str, value: Option<Spanned<String>>, default: String| match value {
            Some(text) if text.get_ref().trim().is_empty() => {
                Err((text.span(), format!("{key}: a user's name is missing")))
            }
            Some(text) => Ok(text.into_inner()),
            None => Ok(default),
        };
        let number = |key: &str, value: Option<Spanned<i64>>, most: u32, default: u32| match value {
            None => Ok(default),
            Some(n) => match u32::try_from(*n.get_ref()) {
                Ok(number) if (1..=most).contains(&number) => Ok(number),
                _ => Err((
                    n.span(),
                    format!("{key}: {} is not allowed; 1 to {most} is", n.get_ref()),
                )),
            },
        };
        let user = self.user.as_ref().map(Spanned::span);
        let listen = self.listen.as_ref().map(peers::listen).transpose()?;
        let peers = peers::checked(self.peer)?;
        peers::fits(&hosts, &peers, listen.is_some())?;
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
                "user: the workers parse what guests send, and cannot run as root".into(),
            ));
        }
        Ok(vread)
    }
}

/// A line of `allow`.
enum Line {
    /// For a VM of this host.
    Here(Allow),
    /// For those of another one, and where the file says so.
    There(AllowHost, Range<usize>),
}

impl RawAllow {
    fn checked(self) -> Result<Line, Wrong> {
        let trimmed = |text: &Spanned<String>| text.get_ref().trim().to_owned();
        let reader = self.reader.as_ref().map(trimmed);
        if let Some(span) = self.reader.as_ref().map(Spanned::span)
            && reader.as_ref().is_some_and(String::is_empty)
        {
            return Err((span, "reader: a VM's name or identity is missing".into()));
        }
        if let (Some(reader), Some(span), None) =
            (&reader, self.reader.as_ref().map(Spanned::span), &self.host)
            && reader.contains(['*', '?'])
        {
            let what = format!(
                "reader: {} is a pattern; name the VM, since its socket has to be there before it starts",
                quoted(reader)
            );
            return Err((span, what));
        }
        let datanode = self.datanode.get_ref().trim().to_owned();
        if datanode.is_empty() {
            let what = "datanode: a VM's name, identity or pattern is missing".into();
            return Err((self.datanode.span(), what));
        }
        let mut pools = Vec::new();
        for pool in self.pools.into_iter().flatten() {
            if !pool.get_ref().starts_with("BP-") {
                let what = format!(
                    "pools: {} is no block pool; their names begin with BP-",
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
                Ok(Line::There(line, host.span()))
            }
            (None, Some(reader)) => Ok(Line::Here(Allow {
                reader,
                datanode,
                pools,
            })),
            (None, None) => {
                let what = "reader: say who may read: reader for a VM here, host for those of another host";
                Err((self.datanode.span(), what.into()))
            }
        }
    }
}

/// A VM as the configuration can name it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Named {
    /// Identity.
    pub id: String,
    /// Name.
    pub name: String,
}

impl Named {
    /// Whether the text names this VM.
    pub fn is(&self, text: &str) -> bool {
        self.id == text || self.name == text
    }

    /// Whether the pattern names this VM.
    pub fn matches(&self, text: &str) -> bool {
        pattern::matches(text, &self.id) || pattern::matches(text, &self.name)
    }
}

impl Vread {
    /// VMs that may read something, as they are named in the file, each once.
    pub fn readers(&self) -> Vec<&str> {
        let mut readers: Vec<&str> = Vec::new();
        for allow in &self.allow {
            if !readers.contains(&allow.reader.as_str()) {
                readers.push(&allow.reader);
            }
        }
        readers
    }

    /// Whether anybody may read blocks of a VM.
    pub fn is_datanode(&self, vm: &Named) -> bool {
        self.allow.iter().any(|a| vm.matches(&a.datanode))
    }

    /// Pools of a VM that a reader, as it is named in the file, may read; empty for none.
    pub fn pools(&self, reader: &str, datanode: &Named) -> Vec<String> {
        let mut pools: Vec<String> = Vec::new();
        let of_reader = self.allow.iter().filter(|a| a.reader == reader);
        for allow in of_reader.filter(|a| datanode.matches(&a.datanode)) {
            pools.extend(allow.pools.iter().cloned());
        }
        // Nobody reads from itself: its own disk is nearer.
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
    fn nobody_may_read_anything_unless_it_is_said() {
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
            "v.toml:3: reader: \"vm*\" is a pattern; name the VM, since its socket has to be there before it starts"
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
        assert!(said("[vread]\nuser = \"root\"").starts_with("v.toml:2: user: the workers parse"));
        assert_eq!(
            said("[vread]\nblocks = 0"),
            "v.toml:2: blocks: 0 is not allowed; 1 to 1048576 is"
        );
        assert!(
            said("[vread]\nallow = [{ reader = \"a\", datanode = \"b\", pools = [\"x\"] }]")
                .starts_with("v.toml:2: pools: \"x\" is no block pool")
        );
        assert!(said("[vread]\nsockets = \"x\"").contains("does not begin with /"));
        assert!(
            said("[[vm]]\nname = \"a\"\n[vm.vread]\nagent = \"x\"")
                .contains("v.toml:4: agent: \"x\" does not begin")
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
