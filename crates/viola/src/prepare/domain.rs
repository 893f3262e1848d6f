// SPDX-License-Identifier: Apache-2.0
//! The domain of a libvirt VM as text: what an accelerator needs is added, and taken out again. Nothing else of the text changes.
//!
//! Format: <https://libvirt.org/formatdomain.html>. What viola has added stands in the domain's `<metadata>`, so it is known on
//! whatever host the domain is later.

mod parts;
mod text;

use std::collections::BTreeSet;

use roxmltree::{Document, Node};

use parts::MOUNTS;
pub use parts::{Part, Use};
use text::{cut, indented, insert_into, start_of_line};

/// Namespace of `<qemu:commandline>`.
const QEMU: &str = "http://libvirt.org/schemas/domain/qemu/1.0";
/// Namespace of viola's element in `<metadata>`.
const VIOLA: &str = "urn:viola:prepared:1";

/// Why a domain is left as it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DomainError {
    /// libvirt's text is no domain.
    #[error("libvirt's description of it cannot be read: {0}")]
    Unreadable(String),
    /// The memory is private, and says so.
    #[error(
        "its memory is private by <access mode='private'/>; vread's mount needs shared memory: change it by `virsh edit`"
    )]
    PrivateMemory,
    /// Without PCI Express nothing can be plugged into a root port.
    #[error("its machine {0} has no PCI Express; a lane needs one that has it, such as q35")]
    NoPcie(String),
    /// A turbo vCPU leaves none for the programs.
    #[error(
        "it has one vCPU; a turbo vCPU needs a second one for the programs: `virsh setvcpus --config`"
    )]
    OneVcpu,
}

/// A domain with what was added to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepared {
    /// The new text.
    pub xml: String,
    /// What was added.
    pub added: Vec<Part>,
    /// What was there.
    pub present: Vec<Part>,
}

/// Adds to a domain what these uses need.
///
/// # Errors
/// See [`DomainError`].
pub fn prepare(xml: &str, uses: &[Use]) -> Result<Prepared, DomainError> {
    let (name, recorded, vcpus, machine) = {
        let document = parse(xml)?;
        let kind = document.descendants().find(|n| n.has_tag_name("type"));
        let machine = kind.and_then(|n| n.attribute("machine")).map(str::to_owned);
        (
            text_of(&document, "name"),
            recorded(&document),
            vcpus(&document),
            machine,
        )
    };
    if uses.contains(&Use::Turbo) && vcpus == Some(1) {
        return Err(DomainError::OneVcpu);
    }
    if uses.contains(&Use::Lane)
        && let Some(machine) = machine
        && (machine == "pc" || machine.starts_with("pc-i440fx"))
    {
        return Err(DomainError::NoPcie(machine));
    }
    let wanted: BTreeSet<Part> = uses.iter().flat_map(|u| u.parts()).copied().collect();
    let mut done = Prepared {
        xml: xml.into(),
        added: Vec::new(),
        present: Vec::new(),
    };
    for part in Part::ALL.into_iter().filter(|part| wanted.contains(part)) {
        match with(&done.xml, part, &name)? {
            Some(xml) => {
                done.xml = xml;
                done.added.push(part);
            }
            None => done.present.push(part),
        }
    }
    let mut record = recorded;
    record.uses.extend(uses);
    record.parts.extend(&done.added);
    done.xml = with_record(&done.xml, &record)?;
    Ok(done)
}

/// What [`prepare`] has added to a domain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Record {
    /// For what it was prepared.
    pub uses: BTreeSet<Use>,
    /// What was added.
    pub parts: BTreeSet<Part>,
}

/// Takes out what [`prepare`] has added for these uses and nothing else needs, or all of it. Returns the text and the parts.
///
/// # Errors
/// libvirt's text is no domain.
pub fn unprepare(xml: &str, uses: Option<&[Use]>) -> Result<(String, Vec<Part>), DomainError> {
    let (name, mut record) = {
        let document = parse(xml)?;
        (text_of(&document, "name"), recorded(&document))
    };
    match uses {
        Some(uses) => record.uses.retain(|u| !uses.contains(u)),
        None => record.uses.clear(),
    }
    let needed: BTreeSet<Part> = record
        .uses
        .iter()
        .flat_map(|u| u.parts())
        .copied()
        .collect();
    let gone: Vec<Part> = record.parts.difference(&needed).copied().collect();
    let mut text = xml.to_owned();
    for part in &gone {
        text = without(&text, *part, &name)?;
        record.parts.remove(part);
    }
    Ok((with_record(&text, &record)?, gone))
}

fn parse(xml: &str) -> Result<Document<'_>, DomainError> {
    let document = Document::parse(xml).map_err(|e| DomainError::Unreadable(e.to_string()))?;
    if document.root_element().has_tag_name("domain") {
        return Ok(document);
    }
    Err(DomainError::Unreadable("it is no <domain>".into()))
}

/// A child of the domain.
fn child<'a, 'i>(document: &'a Document<'i>, name: &str) -> Option<Node<'a, 'i>> {
    let mut children = document.root_element().children();
    children.find(|node| node.has_tag_name(name))
}

fn text_of(document: &Document<'_>, name: &str) -> String {
    let text = child(document, name).and_then(|node| node.text());
    text.unwrap_or_default().trim().to_owned()
}

fn vcpus(document: &Document<'_>) -> Option<u32> {
    text_of(document, "vcpu").parse().ok()
}

fn recorded(document: &Document<'_>) -> Record {
    let element = document
        .descendants()
        .find(|n| n.has_tag_name((VIOLA, "prepared")));
    let words = |name| {
        let value = element.and_then(|e| e.attribute(name)).unwrap_or_default();
        value
            .split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let (uses, parts) = (words("for"), words("parts"));
    Record {
        uses: (Use::ALL.into_iter())
            .filter(|u| uses.iter().any(|w| w == u.name()))
            .collect(),
        parts: (Part::ALL.into_iter())
            .filter(|p| parts.iter().any(|w| w == p.name()))
            .collect(),
    }
}

/// The domain's elements that are this part.
fn find<'a, 'i>(document: &'a Document<'i>, part: Part, domain: &str) -> Vec<Node<'a, 'i>> {
    let all = document.descendants().filter(Node::is_element);
    let port = |node: &Node<'_, '_>, name: &str| {
        node.has_tag_name("channel")
            && node
                .children()
                .any(|c| c.has_tag_name("target") && c.attribute("name") == Some(name))
    };
    match part {
        Part::AgentChannel => all.filter(|n| port(n, "org.viola.agent.0")).collect(),
        Part::LaneChannel => all.filter(|n| port(n, "org.viola.lane.0")).collect(),
        Part::RootPort => {
            let taken = buses(document);
            let is_free = |n: &Node<'_, '_>| {
                is_root_port(n)
                    && n.attribute("index")
                        .and_then(number)
                        .is_none_or(|i| !taken.contains(&i))
            };
            all.filter(is_free).collect()
        }
        Part::EventSocket | Part::LaneSocket => {
            let value = format!("unix:{},server=on,wait=off", part.socket(domain));
            let args: Vec<_> = all.filter(|n| n.has_tag_name((QEMU, "arg"))).collect();
            let pairs = args.windows(2).filter_map(|pair| match pair {
                [option, path] => {
                    let is_it = option.attribute("value") == Some("-qmp")
                        && path.attribute("value") == Some(&value);
                    is_it.then_some([*option, *path])
                }
                _ => None,
            });
            pairs.flatten().collect()
        }
        Part::SharedMemory => all.filter(|n| n.has_tag_name("memoryBacking")).collect(),
        Part::BlocksMount => {
            let path = format!("{MOUNTS}/{domain}.sock");
            let is_it = |n: &Node<'_, '_>| {
                n.has_tag_name("filesystem")
                    && n.children().any(|c| c.attribute("socket") == Some(&path))
            };
            all.filter(is_it).collect()
        }
    }
}

/// The PCI buses on which the domain's devices are. The bus of a root port is its index.
fn buses(document: &Document<'_>) -> BTreeSet<u32> {
    let addresses = document.descendants().filter(|n| n.has_tag_name("address"));
    addresses
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

fn is_root_port(node: &Node<'_, '_>) -> bool {
    node.has_tag_name("controller") && node.attribute("model") == Some("pcie-root-port")
}

/// The text with the part; `None` if it has it.
fn with(xml: &str, part: Part, domain: &str) -> Result<Option<String>, DomainError> {
    let document = parse(xml)?;
    match part {
        Part::SharedMemory => return with_shared_memory(xml, &document),
        // Others may stand in use; this one is for the VF.
        Part::RootPort if recorded(&document).parts.contains(&part) => return Ok(None),
        Part::RootPort => {}
        _ if !find(&document, part, domain).is_empty() => return Ok(None),
        _ => {}
    }
    let element = part.xml(domain);
    Ok(Some(match part {
        Part::EventSocket | Part::LaneSocket => with_arguments(xml, &document, part, &element),
        _ => with_child(xml, &document, "devices", &element, 4),
    }))
}

/// `<memoryBacking>` with shared memory. Huge pages stay.
fn with_shared_memory(xml: &str, document: &Document<'_>) -> Result<Option<String>, DomainError> {
    let Some(backing) = child(document, "memoryBacking") else {
        let element = Part::SharedMemory.xml("");
        return Ok(Some(insert_into(
            xml,
            document.root_element(),
            &indented(&element, 2),
        )));
    };
    let access = backing.children().find(|n| n.has_tag_name("access"));
    match access.map(|n| n.attribute("mode")) {
        Some(Some("shared")) => return Ok(None),
        Some(_) => return Err(DomainError::PrivateMemory),
        None => {}
    }
    let has = |name: &str| backing.children().any(|n| n.has_tag_name(name));
    let mut inner = String::new();
    if !has("hugepages") && !has("source") {
        inner.push_str("    <source type='memfd'/>\n");
    }
    inner.push_str("    <access mode='shared'/>\n");
    Ok(Some(insert_into(xml, backing, &inner)))
}

/// The arguments at the end of `<qemu:commandline>`; those of a lane come before the others, since viola takes the last socket
/// for events.
fn with_arguments(xml: &str, document: &Document<'_>, part: Part, element: &str) -> String {
    let root = document.root_element();
    let line = root
        .children()
        .find(|n| n.has_tag_name((QEMU, "commandline")));
    let Some(line) = line else {
        let block = format!(
            "<qemu:commandline>\n{}</qemu:commandline>",
            indented(element, 2)
        );
        let text = insert_into(xml, root, &indented(&block, 2));
        return with_namespace(&text);
    };
    let prefix = line.lookup_prefix(QEMU).unwrap_or("qemu");
    let element = element.replace("<qemu:", &format!("<{prefix}:"));
    let first = line.children().find(Node::is_element);
    match first {
        Some(first) if part == Part::LaneSocket => {
            let at = start_of_line(xml, first.range().start);
            let mut text = xml.to_owned();
            text.insert_str(at, &indented(&element, 4));
            text
        }
        _ => insert_into(xml, line, &indented(&element, 4)),
    }
}

/// The domain with the prefix `qemu` of QEMU's namespace.
fn with_namespace(xml: &str) -> String {
    const TAG: &str = "<domain";
    match xml.find(TAG) {
        Some(at)
            if !xml.contains(&format!("xmlns:qemu='{QEMU}'"))
                && !xml.contains(&format!("xmlns:qemu=\"{QEMU}\"")) =>
        {
            let mut text = xml.to_owned();
            text.insert_str(at + TAG.len(), &format!(" xmlns:qemu='{QEMU}'"));
            text
        }
        _ => xml.to_owned(),
    }
}

/// The text with an element at the end of a child of the domain, which is made if need be.
fn with_child(
    xml: &str,
    document: &Document<'_>,
    parent: &str,
    element: &str,
    blanks: usize,
) -> String {
    match child(document, parent) {
        Some(node) => insert_into(xml, node, &indented(element, blanks)),
        None => {
            let block = format!("<{parent}>\n{}</{parent}>", indented(element, 2));
            insert_into(xml, document.root_element(), &indented(&block, 2))
        }
    }
}

/// The text with the record of what viola has added; without one if that is nothing.
fn with_record(xml: &str, record: &Record) -> Result<String, DomainError> {
    let text = {
        let document = parse(xml)?;
        let old = document
            .descendants()
            .find(|n| n.has_tag_name((VIOLA, "prepared")));
        match old {
            None => xml.to_owned(),
            Some(old) => {
                let parent = old.parent().filter(|p| p.has_tag_name("metadata"));
                let alone = |p: &Node<'_, '_>| p.children().filter(Node::is_element).count() == 1;
                cut(xml, parent.filter(alone).unwrap_or(old))
            }
        }
    };
    if record.parts.is_empty() {
        return Ok(text);
    }
    let words = |names: Vec<&str>| names.join(" ");
    let uses = words(record.uses.iter().map(|u| u.name()).collect());
    let parts = words(record.parts.iter().map(|p| p.name()).collect());
    let element = format!("<viola:prepared xmlns:viola='{VIOLA}' for='{uses}' parts='{parts}'/>");
    let document = parse(&text)?;
    Ok(with_child(&text, &document, "metadata", &element, 4))
}

/// The text without a part that viola has added.
fn without(xml: &str, part: Part, domain: &str) -> Result<String, DomainError> {
    let document = parse(xml)?;
    if part == Part::SharedMemory {
        return Ok(without_shared_memory(xml, &document));
    }
    let mut nodes = find(&document, part, domain);
    if part == Part::RootPort {
        // Of several that nothing is behind, libvirt has numbered them, so any of them may go.
        nodes = nodes.pop().into_iter().collect();
    }
    let commandline = nodes
        .first()
        .and_then(Node::parent)
        .filter(|p| p.has_tag_name((QEMU, "commandline")));
    if let Some(line) = commandline
        && line.children().filter(Node::is_element).count() == nodes.len()
    {
        return Ok(cut(xml, line));
    }
    let mut text = xml.to_owned();
    for node in nodes.iter().rev() {
        text = cut(&text, *node);
    }
    Ok(text)
}

/// `<memoryBacking>` as it was: what viola adds is `memfd` with shared access, or shared access alone.
fn without_shared_memory(xml: &str, document: &Document<'_>) -> String {
    let Some(backing) = child(document, "memoryBacking") else {
        return xml.to_owned();
    };
    let inner: Vec<_> = backing.children().filter(Node::is_element).collect();
    let is_added = |n: &Node<'_, '_>| {
        n.has_tag_name("access")
            || (n.has_tag_name("source") && n.attribute("type") == Some("memfd"))
    };
    if inner.iter().all(is_added) {
        return cut(xml, backing);
    }
    match inner.iter().find(|n| n.has_tag_name("access")) {
        Some(access) => cut(xml, *access),
        None => xml.to_owned(),
    }
}

#[cfg(test)]
mod tests;
