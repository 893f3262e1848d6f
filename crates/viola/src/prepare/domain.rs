// SPDX-License-Identifier: Apache-2.0
//! The domain of a libvirt VM as text: what an accelerator needs is added, and taken out again. Nothing else of the text changes.
//!
//! Format: <https://libvirt.org/formatdomain.html>. What viola has added stands in the domain's `<metadata>`, so it is known on
//! whatever host the domain is later.

mod elements;
mod parts;
mod text;

use std::collections::BTreeSet;

use roxmltree::{Document, Node};
use viola_daemon::workers::run_dir::MAX_SOCKET_PATH_BYTES;

use elements::{child, find, needs_shared_memory, parse, vcpus};
pub use elements::{has, name, source_of};
use parts::ROOT_PORT;
pub use parts::{Part, Use, VmNames};
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
    /// A lane needs PCI Express.
    #[error("its machine {0} has no PCI Express; a lane needs one that has it, such as q35")]
    NoPcie(String),
    /// A turbo vCPU leaves none for the programs.
    #[error(
        "it has one vCPU; a turbo vCPU needs a second one for the programs: `virsh setvcpus VM 2 --maximum --config`, then the same \
         without --maximum"
    )]
    OneVcpu,
    /// A socket's path would be too long.
    #[error("its name is too long: the socket {0} would have more than 107 bytes")]
    LongName(String),
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

/// What [`prepare`] has added to a domain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Record {
    /// For what it was prepared.
    uses: BTreeSet<Use>,
    /// What was added.
    parts: BTreeSet<Part>,
}

impl Record {
    /// The parts that its uses need.
    fn needed(&self) -> BTreeSet<Part> {
        self.uses.iter().flat_map(|u| u.parts()).copied().collect()
    }
}

/// Adds to a domain what these uses need.
///
/// # Errors
/// See [`DomainError`].
pub fn prepare(xml: &str, uses: &[Use], vm: &VmNames) -> Result<Prepared, DomainError> {
    let mut record = {
        let document = parse(xml)?;
        check(&document, uses)?;
        recorded(&document)
    };
    let wanted: BTreeSet<Part> = uses.iter().flat_map(|u| u.parts()).copied().collect();
    check_sockets(&wanted, vm)?;
    let mut done = Prepared {
        xml: xml.into(),
        added: Vec::new(),
        present: Vec::new(),
    };
    for part in Part::ALL.into_iter().filter(|part| wanted.contains(part)) {
        match with(&done.xml, part, vm, &record)? {
            Some(xml) => {
                done.xml = xml;
                done.added.push(part);
            }
            None => done.present.push(part),
        }
    }
    record.uses.extend(uses);
    record.parts.extend(&done.added);
    done.xml = with_record(&done.xml, &record)?;
    Ok(done)
}

/// The domain with one more root port, where libvirt has put another device behind the one that was added for a lane. `None` where
/// nothing is missing. libvirt gives each device without an address a place behind any free port.
///
/// # Errors
/// libvirt's text is no domain.
pub fn with_free_port(xml: &str) -> Result<Option<String>, DomainError> {
    let document = parse(xml)?;
    let is_needed = recorded(&document).uses.contains(&Use::Lane);
    let is_free = !find(&document, Part::RootPort).is_empty();
    let more = || with_child(xml, &document, "devices", ROOT_PORT, 4);
    Ok((is_needed && !is_free).then(more))
}

/// Takes out what [`prepare`] has added for these uses and nothing else needs, or all of it. Returns the text, and the parts that were
/// there.
///
/// # Errors
/// libvirt's text is no domain.
pub fn unprepare(xml: &str, uses: Option<&[Use]>) -> Result<(String, Vec<Part>), DomainError> {
    let mut record = recorded(&parse(xml)?);
    match uses {
        Some(uses) => record.uses.retain(|u| !uses.contains(u)),
        None => record.uses.clear(),
    }
    let unneeded: Vec<Part> = record.parts.difference(&record.needed()).copied().collect();
    let mut text = xml.to_owned();
    let mut gone = Vec::new();
    // In the order against that of adding: the mount goes before the memory that it needs.
    for part in unneeded.into_iter().rev() {
        let without = without(&text, part)?;
        if without != text {
            gone.push(part);
        }
        text = without;
        record.parts.remove(&part);
    }
    gone.reverse();
    Ok((with_record(&text, &record)?, gone))
}

fn check(document: &Document<'_>, uses: &[Use]) -> Result<(), DomainError> {
    if uses.contains(&Use::Turbo) && vcpus(document) == Some(1) {
        return Err(DomainError::OneVcpu);
    }
    let os = child(document, "os");
    let kind = os.and_then(|os| os.children().find(|n| n.has_tag_name("type")));
    match kind.and_then(|kind| kind.attribute("machine")) {
        Some(machine) if uses.contains(&Use::Lane) && is_without_pcie(machine) => {
            Err(DomainError::NoPcie(machine.into()))
        }
        _ => Ok(()),
    }
}

fn is_without_pcie(machine: &str) -> bool {
    machine == "pc" || machine.starts_with("pc-i440fx")
}

fn check_sockets(parts: &BTreeSet<Part>, vm: &VmNames) -> Result<(), DomainError> {
    let qmp = parts.iter().filter_map(|part| part.socket());
    let mount = parts
        .contains(&Part::BlocksMount)
        .then(|| vm.mount.display().to_string());
    let mut paths = qmp.map(|purpose| purpose.socket(&vm.name)).chain(mount);
    match paths.find(|path| path.len() > MAX_SOCKET_PATH_BYTES) {
        Some(path) => Err(DomainError::LongName(path)),
        None => Ok(()),
    }
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

/// The text with the part; `None` if it has it.
fn with(
    xml: &str,
    part: Part,
    vm: &VmNames,
    record: &Record,
) -> Result<Option<String>, DomainError> {
    let document = parse(xml)?;
    let element = part.xml(vm);
    Ok(match part {
        Part::MemorySource | Part::SharedMemory => with_memory(xml, &document, part, &element)?,
        // A free one of the operator's may be for another device.
        Part::RootPort if record.parts.contains(&part) => None,
        Part::RootPort => Some(with_child(xml, &document, "devices", &element, 4)),
        Part::EventSocket | Part::LaneSocket => {
            let found = find(&document, part);
            let own = part.argument(vm);
            if found
                .iter()
                .any(|n| n.attribute("value") == Some(own.as_str()))
            {
                return Ok(None);
            }
            // The VM was renamed or cloned: two VMs must not have one socket.
            match found.is_empty() {
                true => Some(with_arguments(xml, &document, part, &element)),
                false => return with(&without(xml, part)?, part, vm, record),
            }
        }
        _ if find(&document, part).is_empty() => {
            Some(with_child(xml, &document, "devices", &element, 4))
        }
        _ => None,
    })
}

/// `<memoryBacking>` with a source, or with shared access. Huge pages are a source of their own.
fn with_memory(
    xml: &str,
    document: &Document<'_>,
    part: Part,
    element: &str,
) -> Result<Option<String>, DomainError> {
    let Some(backing) = child(document, "memoryBacking") else {
        let block = format!("<memoryBacking>\n{}</memoryBacking>", indented(element, 2));
        return Ok(Some(insert_into(
            xml,
            document.root_element(),
            &indented(&block, 2),
        )));
    };
    let inner = |name: &str| backing.children().find(|n| n.has_tag_name(name));
    let is_there = match part {
        Part::MemorySource => inner("source").or_else(|| inner("hugepages")).is_some(),
        _ => match inner("access").map(|access| access.attribute("mode")) {
            Some(Some("shared")) => true,
            Some(_) => return Err(DomainError::PrivateMemory),
            None => false,
        },
    };
    Ok((!is_there).then(|| insert_into(xml, backing, &indented(element, 4))))
}

/// The arguments at the end of `<qemu:commandline>`.
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
        return with_namespace(&insert_into(xml, root, &indented(&block, 2)));
    };
    let prefix = line.lookup_prefix(QEMU).unwrap_or("qemu");
    let element = element.replace("<qemu:", &format!("<{prefix}:"));
    match line.children().find(Node::is_element) {
        // viola takes the last socket for events where it does not know the names.
        Some(first) if part == Part::LaneSocket => {
            let mut text = xml.to_owned();
            text.insert_str(
                start_of_line(xml, first.range().start),
                &indented(&element, 4),
            );
            text
        }
        _ => insert_into(xml, line, &indented(&element, 4)),
    }
}

/// The domain with the prefix `qemu` of QEMU's namespace.
fn with_namespace(xml: &str) -> String {
    const TAG: &str = "<domain";
    let has = |quote: char| xml.contains(&format!("xmlns:qemu={quote}{QEMU}{quote}"));
    match xml.find(TAG) {
        Some(at) if !has('\'') && !has('"') => {
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
            // As it is, in libvirt's spelling.
            _ if !record.parts.is_empty() && recorded(&document) == *record => {
                return Ok(xml.to_owned());
            }
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
    let uses: Vec<&str> = record.uses.iter().map(|u| u.name()).collect();
    let parts: Vec<&str> = record.parts.iter().map(|p| p.name()).collect();
    let (uses, parts) = (uses.join(" "), parts.join(" "));
    let element = format!("<viola:prepared xmlns:viola='{VIOLA}' for='{uses}' parts='{parts}'/>");
    Ok(with_child(&text, &parse(&text)?, "metadata", &element, 4))
}

/// The text without a part that viola has added.
fn without(xml: &str, part: Part) -> Result<String, DomainError> {
    let document = parse(xml)?;
    let mut nodes = find(&document, part);
    match part {
        // Of several that nothing is behind, libvirt has numbered them, so any of them may go.
        Part::RootPort => nodes = nodes.pop().into_iter().collect(),
        // Another device has come that shares the memory.
        Part::MemorySource | Part::SharedMemory if needs_shared_memory(&document) => nodes.clear(),
        _ => {}
    }
    // What held nothing else goes with it.
    let holder = nodes.first().and_then(Node::parent).filter(|parent| {
        parent.has_tag_name((QEMU, "commandline")) || parent.has_tag_name("memoryBacking")
    });
    if let Some(holder) = holder
        && holder.children().filter(Node::is_element).count() == nodes.len()
    {
        return Ok(cut(xml, holder));
    }
    let cut_one = |text: String, node: &Node<'_, '_>| cut(&text, *node);
    Ok(nodes.iter().rev().fold(xml.to_owned(), cut_one))
}

#[cfg(test)]
mod tests;
