// SPDX-License-Identifier: Apache-2.0
//! What a VM is prepared for, and the elements that this needs.

use serde::Serialize;
use viola_host::prepared::Purpose;

/// Folder of the mounts' sockets.
pub(super) const MOUNTS: &str = "/run/viola/mounts";

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
    pub(super) const ALL: [Self; 5] = [
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

    /// The parts of a domain that it needs, in the order in which they are added.
    pub fn parts(self) -> &'static [Part] {
        match self {
            Self::Datanode | Self::Vpipe => &[Part::AgentChannel, Part::EventSocket],
            Self::Reader => &[Part::SharedMemory, Part::BlocksMount],
            Self::Turbo => &[],
            Self::Lane => &[Part::LaneChannel, Part::RootPort, Part::LaneSocket],
        }
    }
}

/// A part of a domain that an accelerator needs.
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
    /// Memory that viola's worker can share.
    SharedMemory,
    /// The virtio-fs device with the blocks.
    BlocksMount,
}

impl Part {
    pub(super) const ALL: [Self; 7] = [
        Self::AgentChannel,
        Self::LaneChannel,
        Self::RootPort,
        Self::EventSocket,
        Self::LaneSocket,
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
            Self::SharedMemory => "memory that a worker of vread can share",
            Self::BlocksMount => "virtio-fs device with the blocks",
        }
    }

    /// Its element, for a domain of this name. Without a line break at the end.
    pub fn xml(self, domain: &str) -> String {
        let name = escaped(domain);
        match self {
            Self::AgentChannel => channel("org.viola.agent.0"),
            Self::LaneChannel => channel("org.viola.lane.0"),
            Self::RootPort => "<controller type='pci' model='pcie-root-port'/>".into(),
            Self::EventSocket | Self::LaneSocket => {
                let path = escaped(&self.socket(domain));
                format!("<qemu:arg value='-qmp'/>\n<qemu:arg value='unix:{path},server=on,wait=off'/>")
            }
            Self::SharedMemory => {
                "<memoryBacking>\n  <source type='memfd'/>\n  <access mode='shared'/>\n</memoryBacking>".into()
            }
            Self::BlocksMount => format!(
                "<filesystem type='mount'>\n  <driver type='virtiofs' queue='1024'/>\n  <source socket='{MOUNTS}/{name}.sock'/>\n  \
                 <target dir='viola'/>\n</filesystem>"
            ),
        }
    }

    /// The path of its socket, for a QMP socket. QEMU's options separate by commas; a comma of the name is doubled.
    pub(super) fn socket(self, domain: &str) -> String {
        let purpose = match self {
            Self::LaneSocket => Purpose::Devices,
            _ => Purpose::Events,
        };
        purpose.socket(&domain.replace(',', ",,"))
    }

    /// Whether libvirt can plug it into a running VM.
    pub fn can_be_plugged(self) -> bool {
        matches!(self, Self::AgentChannel | Self::LaneChannel)
    }
}

fn channel(port: &str) -> String {
    format!("<channel type='unix'>\n  <target type='virtio' name='{port}'/>\n</channel>")
}

/// Text inside an attribute in single quotes.
fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('\'', "&apos;")
}
