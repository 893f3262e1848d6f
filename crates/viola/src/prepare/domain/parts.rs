// SPDX-License-Identifier: Apache-2.0
//! What a VM is prepared for, and the elements that this needs.

use std::path::PathBuf;

use serde::Serialize;
use viola_host::prepared::Purpose;

/// A root port, to which libvirt gives a number.
pub(super) const ROOT_PORT: &str = "<controller type='pci' model='pcie-root-port'/>";

/// What a VM is prepared for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Use {
    /// vread, as the VM whose blocks are read.
    Datanode,
    /// vread, as the VM that reads.
    Reader,
    /// vpipe.
    Vpipe,
    /// A turbo vCPU.
    Turbo,
    /// A lane.
    Lane,
}

impl Use {
    /// All.
    pub const ALL: [Self; 5] = [
        Self::Datanode,
        Self::Reader,
        Self::Vpipe,
        Self::Turbo,
        Self::Lane,
    ];

    /// Its name in the domain and in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Datanode => "datanode",
            Self::Reader => "reader",
            Self::Vpipe => "vpipe",
            Self::Turbo => "turbo",
            Self::Lane => "lane",
        }
    }

    /// The parts of a domain that it needs.
    pub fn parts(self) -> &'static [Part] {
        match self {
            Self::Datanode | Self::Vpipe => &[Part::AgentChannel, Part::EventSocket],
            Self::Reader => &[Part::MemorySource, Part::SharedMemory, Part::BlocksMount],
            Self::Turbo => &[],
            Self::Lane => &[Part::LaneChannel, Part::RootPort, Part::LaneSocket],
        }
    }
}

/// A part of a domain that an accelerator needs, in the order in which they are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// The channel by which viola-agent speaks to the host.
    AgentChannel,
    /// The channel by which viola-agent asks for its lane.
    LaneChannel,
    /// A PCIe root port into which a VF can be plugged.
    RootPort,
    /// A second QMP socket, on which viola hears of resets, snapshots and migrations.
    EventSocket,
    /// A QMP socket by which viola plugs a VF.
    LaneSocket,
    /// Memory in a file, which can be shared.
    MemorySource,
    /// Memory that viola's worker shares.
    SharedMemory,
    /// The virtio-fs device with the blocks.
    BlocksMount,
}

impl Part {
    /// All.
    pub const ALL: [Self; 8] = [
        Self::AgentChannel,
        Self::LaneChannel,
        Self::RootPort,
        Self::EventSocket,
        Self::LaneSocket,
        Self::MemorySource,
        Self::SharedMemory,
        Self::BlocksMount,
    ];

    /// Its name in the domain and in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::AgentChannel => "agent-channel",
            Self::LaneChannel => "lane-channel",
            Self::RootPort => "root-port",
            Self::EventSocket => "event-socket",
            Self::LaneSocket => "lane-socket",
            Self::MemorySource => "memory-source",
            Self::SharedMemory => "shared-memory",
            Self::BlocksMount => "blocks-mount",
        }
    }

    /// What it is for.
    pub fn purpose(self) -> &'static str {
        match self {
            Self::AgentChannel => "viola-agent's channel to the host",
            Self::LaneChannel => "viola-agent's channel for its lane",
            Self::RootPort => "a PCIe root port for a VF",
            Self::EventSocket => "QMP socket: resets, snapshots and migrations",
            Self::LaneSocket => "QMP socket: plugging of a VF",
            Self::MemorySource => "memory in a file, which can be shared",
            Self::SharedMemory => "memory that a worker of vread shares",
            Self::BlocksMount => "virtio-fs device with the blocks",
        }
    }

    /// Its element. Without a line break at the end.
    pub fn xml(self, vm: &VmNames) -> String {
        match self {
            Self::AgentChannel => channel("org.viola.agent.0"),
            Self::LaneChannel => channel("org.viola.lane.0"),
            Self::RootPort => ROOT_PORT.into(),
            Self::EventSocket | Self::LaneSocket => {
                let argument = escaped(&self.argument(vm));
                format!("<qemu:arg value='-qmp'/>\n<qemu:arg value='{argument}'/>")
            }
            Self::MemorySource => "<source type='memfd'/>".into(),
            Self::SharedMemory => "<access mode='shared'/>".into(),
            Self::BlocksMount => format!(
                "<filesystem type='mount'>\n  <driver type='virtiofs' queue='1024'/>\n  <source socket='{}'/>\n  \
                 <target dir='viola'/>\n</filesystem>",
                escaped(&vm.mount.display().to_string())
            ),
        }
    }

    /// For what its socket is, for a QMP socket.
    pub(super) fn socket(self) -> Option<Purpose> {
        match self {
            Self::EventSocket => Some(Purpose::Events),
            Self::LaneSocket => Some(Purpose::Devices),
            _ => None,
        }
    }

    /// QEMU's argument for its socket; empty for other parts. QEMU's options are separated by commas; a comma of the name is doubled.
    pub(super) fn argument(self, vm: &VmNames) -> String {
        let path = |purpose: Purpose| purpose.socket(&vm.name).replace(',', ",,");
        let argument = |purpose| format!("unix:{},server=on,wait=off", path(purpose));
        self.socket().map(argument).unwrap_or_default()
    }

    /// Whether libvirt can plug it into a running VM.
    pub fn can_be_plugged(self) -> bool {
        matches!(self, Self::AgentChannel | Self::LaneChannel)
    }
}

/// What a VM is called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmNames {
    /// Its name in libvirt.
    pub name: String,
    /// The socket of its virtio-fs device, for a reader.
    pub mount: PathBuf,
}

fn channel(port: &str) -> String {
    format!("<channel type='unix'>\n  <target type='virtio' name='{port}'/>\n</channel>")
}

/// Text inside an attribute in single quotes.
fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('\'', "&apos;")
}
