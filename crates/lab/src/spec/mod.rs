// SPDX-License-Identifier: Apache-2.0
//! Description of a lab: guests, bridges, disks, workloads. Read from TOML or made in code.

mod check;
mod fields;
mod size;
mod toml;

pub use size::parse_size;

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::qemu::Accel;
use crate::wire::Workload;

/// Default memory of a UML guest in bytes.
pub const DEFAULT_MEMORY: u64 = 96 << 20;
/// Default memory of a QEMU guest in bytes: a PC's kernel and its initramfs need more.
pub const DEFAULT_QEMU_MEMORY: u64 = 256 << 20;
/// Largest number of vCPUs of a guest (`CONFIG_NR_CPUS` of lab/uml-smp.config).
pub const MAX_CPUS: u32 = 4;
/// Default weight of a guest, as in cgroup v2's `cpu.weight`.
pub const DEFAULT_WEIGHT: u32 = 100;
/// Name of the default bridge.
pub const DEFAULT_BRIDGE: &str = "br0";

/// A lab description with all defaults filled in.
#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    /// Name of the lab: at most 24 lower-case letters, digits and dashes.
    pub name: String,
    /// Guests in the order written.
    pub guests: Vec<GuestSpec>,
    /// Bridges in the order written.
    pub bridges: Vec<BridgeSpec>,
    /// What runs the guests.
    pub vmm: Vmm,
}

/// What runs the guests of a lab.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Vmm {
    /// User Mode Linux, which needs no hardware virtualisation.
    #[default]
    Uml,
    /// QEMU.
    Qemu(QemuSpec),
}

/// How QEMU runs the guests of a lab.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QemuSpec {
    /// Hardware virtualisation or emulation; `None`: KVM where it runs guests, else emulation.
    pub accel: Option<Accel>,
    /// A kernel (`bzImage`) instead of Debian's. The drivers for its virtio devices and ext4 have to be built in.
    pub kernel: Option<PathBuf>,
}

/// One guest.
#[derive(Debug, Clone, PartialEq)]
pub struct GuestSpec {
    /// Name, unique in the lab; also its host name.
    pub name: String,
    /// Memory in bytes, at least 32 MiB.
    pub memory: u64,
    /// vCPUs, 1 to [`MAX_CPUS`]. More than one needs the kernel that `scripts/uml-smp.sh` makes, unless QEMU runs it.
    pub cpus: u32,
    /// Host cores on which it may run; empty: any.
    pub cores: Vec<usize>,
    /// CPU weight, 1 to 10000, default 100. A guest with a weight gets a cpu cgroup of its own, as KVM guests do with cgroup v2;
    /// others stay in the root group.
    pub weight: Option<u32>,
    /// Disks, in the guest `/dev/ubda`, `/dev/ubdb`..., with QEMU `/dev/vda`, `/dev/vdb`...
    pub disks: Vec<DiskSpec>,
    /// NICs, in the guest `vec0`, `vec1`..., with QEMU `eth0`, `eth1`...
    pub taps: Vec<TapSpec>,
    /// Workloads to start after boot, in this order.
    pub workloads: Vec<(String, Workload)>,
    /// Further words of the kernel's command line.
    pub kernel_args: Vec<String>,
}

/// A disk of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskSpec {
    /// Raw image on the host.
    pub image: PathBuf,
    /// Size in bytes; a missing image is created sparse with this size.
    pub size: Option<u64>,
    /// Whether the guest may only read it.
    pub read_only: bool,
}

/// A NIC of a guest: a tap on a bridge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TapSpec {
    /// The bridge to which its tap belongs.
    pub bridge: String,
    /// The guest's address.
    pub address: Ipv4Addr,
    /// Prefix length of the bridge's subnet.
    pub prefix: u8,
    /// Ethernet address.
    pub mac: [u8; 6],
}

/// A bridge in the lab's own network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BridgeSpec {
    /// Device name, at most 15 bytes.
    pub name: String,
    /// The host side's address.
    pub address: Ipv4Addr,
    /// Prefix length, 8 to 30.
    pub prefix: u8,
}

impl BridgeSpec {
    /// Whether the address is in the bridge's subnet.
    pub fn contains(&self, address: Ipv4Addr) -> bool {
        let mask = viola_netdev::netmask(self.prefix);
        u32::from(address) & mask == u32::from(self.address) & mask
    }
}

impl Spec {
    /// Reads a description from a file. Paths of disk images are relative to its folder.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Spec`] with file, line and key.
    pub fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
        let folder = path.parent().unwrap_or(Path::new("."));
        Self::from_toml(&text, &path.display().to_string(), folder)
    }

    /// Reads a description from text. `origin` names it in errors; `folder` is the base of relative
    /// paths of disk images.
    ///
    /// # Errors
    /// [`Error::Spec`] with line and key.
    pub fn from_toml(text: &str, origin: &str, folder: &Path) -> Result<Self> {
        toml::read(text, origin, folder)
    }

    /// A lab of `count` default guests `vm1`, `vm2`... on the given host cores.
    ///
    /// # Errors
    /// [`Error::Spec`].
    pub fn of_guests(name: &str, count: usize, cores: &[usize]) -> Result<Self> {
        let guests = (1..=count).fold(String::new(), |text, i| {
            format!("{text}[[guest]]\nname = \"vm{i}\"\ncores = {cores:?}\n")
        });
        Self::from_toml(
            &format!("[lab]\nname = \"{name}\"\n{guests}"),
            name,
            Path::new("."),
        )
    }
}

impl std::fmt::Display for BridgeSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}
