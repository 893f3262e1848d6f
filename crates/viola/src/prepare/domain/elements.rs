// SPDX-License-Identifier: Apache-2.0
//! Where the parts stand in a domain.

use std::collections::BTreeSet;
use std::path::Path;

use roxmltree::{Document, Node};
use viola_host::prepared::Purpose;

use super::parts::Part;
use super::{DomainError, QEMU};

/// Reads a domain.
///
/// # Errors
/// The text is no domain.
pub(super) fn parse(xml: &str) -> Result<Document<'_>, DomainError> {
    let document = Document::parse(xml).map_err(|e| DomainError::Unreadable(e.to_string()))?;
    if document.root_element().has_tag_name("domain") {
        return Ok(document);
    }
    Err(DomainError::Unreadable("it is no <domain>".into()))
}

/// A child of the domain.
pub(super) fn child<'a, 'i>(document: &'a Document<'i>, name: &str) -> Option<Node<'a, 'i>> {
    let mut children = document.root_element().children();
    children.find(|node| node.has_tag_name(name))
}

/// The domain's name.
///
/// # Errors
/// The text is no domain.
pub fn name(xml: &str) -> Result<String, DomainError> {
    let document = parse(xml)?;
    let text = child(&document, "name").and_then(|node| node.text());
    Ok(text.unwrap_or_default().to_owned())
}

/// vCPUs that the VM has when it starts.
pub(super) fn vcpus(document: &Document<'_>) -> Option<u32> {
    let element = child(document, "vcpu")?;
    let number = element.attribute("current").or(element.text())?;
    number.trim().parse().ok()
}

/// Whether a running domain has the part.
///
/// # Errors
/// The text is no domain.
pub fn has(xml: &str, part: Part) -> Result<bool, DomainError> {
    let document = parse(xml)?;
    Ok(match part {
        // Huge pages are a source, too; and without shared access the source does nothing.
        Part::MemorySource => !find(&document, Part::SharedMemory).is_empty(),
        // The VF is behind it, or another one is free.
        Part::RootPort => document.descendants().any(|n| is_root_port(&n)),
        _ => !find(&document, part).is_empty(),
    })
}

/// The part's element as it stands in a domain; `None` if it has none.
///
/// # Errors
/// The text is no domain.
pub fn source_of(xml: &str, part: Part) -> Result<Option<String>, DomainError> {
    let document = parse(xml)?;
    let found = find(&document, part);
    Ok(found.first().map(|node| xml[node.range()].to_owned()))
}

/// The domain's elements that are this part; of root ports those that nothing is behind.
pub(super) fn find<'a, 'i>(document: &'a Document<'i>, part: Part) -> Vec<Node<'a, 'i>> {
    let all = document.descendants().filter(Node::is_element);
    let memory = |name: &'static str, attribute: &'static str, value: &'static str| {
        let backing = child(document, "memoryBacking");
        let inner = backing.into_iter().flat_map(|backing| backing.children());
        let is_it =
            move |n: &Node<'_, '_>| n.has_tag_name(name) && n.attribute(attribute) == Some(value);
        inner.filter(is_it).collect()
    };
    match part {
        Part::AgentChannel => all.filter(|n| is_channel(n, "org.viola.agent.0")).collect(),
        Part::LaneChannel => all.filter(|n| is_channel(n, "org.viola.lane.0")).collect(),
        Part::RootPort => {
            let taken = buses(document);
            let index = |n: &Node<'_, '_>| n.attribute("index").and_then(number);
            all.filter(|n| is_root_port(n) && index(n).is_none_or(|i| !taken.contains(&i)))
                .collect()
        }
        Part::EventSocket | Part::LaneSocket => {
            let args: Vec<_> = all.filter(|n| n.has_tag_name((QEMU, "arg"))).collect();
            let pairs = args.windows(2).filter(|pair| match pair {
                [option, path] => {
                    let is_it = |value| purpose_of(value) == part.socket();
                    option.attribute("value") == Some("-qmp")
                        && path.attribute("value").is_some_and(is_it)
                }
                _ => false,
            });
            pairs.flatten().copied().collect()
        }
        Part::MemorySource => memory("source", "type", "memfd"),
        Part::SharedMemory => memory("access", "mode", "shared"),
        Part::BlocksMount => all.filter(is_mount).collect(),
    }
}

fn is_channel(node: &Node<'_, '_>, port: &str) -> bool {
    let mut children = node.children();
    node.has_tag_name("channel")
        && children.any(|c| c.has_tag_name("target") && c.attribute("name") == Some(port))
}

/// A virtio-fs device of viola, whose tag says so and which another process serves.
fn is_mount(node: &Node<'_, '_>) -> bool {
    let has = |name: &str, attribute: &str, value: Option<&str>| {
        let mut children = node.children().filter(|c| c.has_tag_name(name));
        children.any(|c| {
            c.attribute(attribute)
                .is_some_and(|found| value.is_none_or(|v| v == found))
        })
    };
    node.has_tag_name("filesystem")
        && has("source", "socket", None)
        && has("target", "dir", Some("viola"))
}

/// For what the socket of a QEMU argument is; `None` for one that is not viola's.
fn purpose_of(argument: &str) -> Option<Purpose> {
    let path = argument
        .strip_prefix("unix:")?
        .strip_suffix(",server=on,wait=off")?;
    Purpose::of(Path::new(path))
}

/// Whether a device that is not viola's needs shared memory.
pub(super) fn needs_shared_memory(document: &Document<'_>) -> bool {
    let is_virtiofs = |n: &Node<'_, '_>| {
        let mut children = n.children();
        n.has_tag_name("filesystem")
            && children.any(|c| c.has_tag_name("driver") && c.attribute("type") == Some("virtiofs"))
    };
    let mut all = document.descendants();
    all.any(|n| (is_virtiofs(&n) && !is_mount(&n)) || n.attribute("type") == Some("vhostuser"))
}

/// Whether this is a PCIe root port.
pub(super) fn is_root_port(node: &Node<'_, '_>) -> bool {
    node.has_tag_name("controller") && node.attribute("model") == Some("pcie-root-port")
}

/// The PCI buses on which the domain's devices are. The bus of a root port is its index.
fn buses(document: &Document<'_>) -> BTreeSet<u32> {
    let addresses = document.descendants().filter(|n| n.has_tag_name("address"));
    // The address inside a source is one of the host.
    let of_vm = addresses.filter(|n| {
        n.attribute("type") == Some("pci")
            && n.parent()
                .is_some_and(|parent| !parent.has_tag_name("source"))
    });
    of_vm
        .filter_map(|n| n.attribute("bus").and_then(number))
        .collect()
}

/// A number, decimal or with 0x.
fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}
