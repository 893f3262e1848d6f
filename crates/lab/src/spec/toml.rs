// SPDX-License-Identifier: Apache-2.0
//! Parses TOML text into a checked [`Spec`]. Errors name file, line and key.

use std::net::Ipv4Addr;
use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Deserializer};
use toml::Spanned;

use super::check::{Place, Problem, check};
use super::fields::{Mac, Size, Subnet, VmmName};
use super::{
    BridgeSpec, DEFAULT_BRIDGE, DEFAULT_MEMORY, DEFAULT_QEMU_MEMORY, DiskSpec, GuestSpec, QemuSpec,
    Spec, TapSpec, Vmm,
};
use crate::error::{Error, Result};
use crate::qemu::Accel;
use crate::wire::Workload;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    lab: Spanned<LabTable>,
    #[serde(default, rename = "guest")]
    guests: Vec<Spanned<GuestTable>>,
    #[serde(default, rename = "bridge")]
    bridges: Vec<Spanned<BridgeTable>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LabTable {
    name: String,
    #[serde(default)]
    vmm: VmmName,
    accel: Option<Accel>,
    kernel: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BridgeTable {
    name: String,
    address: Subnet,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GuestTable {
    name: String,
    memory: Option<Size>,
    cpus: Option<u32>,
    #[serde(default)]
    cores: Vec<usize>,
    weight: Option<u32>,
    #[serde(default)]
    disks: Vec<DiskTable>,
    #[serde(default)]
    taps: Taps,
    #[serde(default)]
    workloads: Vec<Spanned<toml::Table>>,
    #[serde(default)]
    kernel_args: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DiskTable {
    image: String,
    size: Option<Size>,
    #[serde(default)]
    read_only: bool,
}

/// A number of NICs, or a list of them.
enum Taps {
    Count(usize),
    List(Vec<TapTable>),
}

impl Default for Taps {
    fn default() -> Self {
        Self::Count(1)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TapTable {
    bridge: Option<String>,
    address: Option<Subnet>,
    mac: Option<Mac>,
}

impl<'de> Deserialize<'de> for Taps {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Taps;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a number of NICs (0 to 8) or a list of tables")
            }
            fn visit_i64<E: serde::de::Error>(self, count: i64) -> std::result::Result<Taps, E> {
                let count = usize::try_from(count).ok().filter(|c| *c <= 8);
                count
                    .map(Taps::Count)
                    .ok_or_else(|| E::custom("`taps` must be 0 to 8 or a list of tables"))
            }
            fn visit_seq<A: serde::de::SeqAccess<'de>>(
                self,
                mut list: A,
            ) -> std::result::Result<Taps, A::Error> {
                let mut taps = Vec::new();
                while let Some(tap) = list.next_element()? {
                    taps.push(tap);
                }
                Ok(Taps::List(taps))
            }
        }
        from.deserialize_any(Visitor)
    }
}

pub(super) fn read(text: &str, origin: &str, folder: &Path) -> Result<Spec> {
    let at = |span: Option<Range<usize>>, what: String| {
        let line = span
            .map(|span| format!("line {}: ", line_of(text, span.start)))
            .unwrap_or_default();
        Error::Spec {
            origin: origin.into(),
            what: format!("{line}{what}"),
        }
    };
    let file: File =
        toml::from_str(text).map_err(|e| at(e.span(), e.message().trim().replace('\n', " ")))?;
    let lab = file.lab.get_ref();
    let (vmm, default_memory) = match lab.vmm {
        VmmName::Uml => (Vmm::Uml, DEFAULT_MEMORY),
        VmmName::Qemu => {
            let qemu = QemuSpec {
                accel: lab.accel,
                kernel: lab.kernel.as_ref().map(|path| folder.join(path)),
            };
            (Vmm::Qemu(qemu), DEFAULT_QEMU_MEMORY)
        }
    };
    for (key, is_given) in [
        ("accel", lab.accel.is_some()),
        ("kernel", lab.kernel.is_some()),
    ] {
        if is_given && vmm == Vmm::Uml {
            let span = key_in(text, file.lab.span(), key);
            return Err(at(
                Some(span),
                format!("`{key}` is for guests with vmm = \"qemu\""),
            ));
        }
    }
    let mut bridges: Vec<BridgeSpec> = file
        .bridges
        .iter()
        .map(|b| b.get_ref())
        .map(|b| BridgeSpec {
            name: b.name.clone(),
            address: b.address.0,
            prefix: b.address.1,
        })
        .collect();
    if bridges.is_empty() {
        bridges.push(BridgeSpec {
            name: DEFAULT_BRIDGE.into(),
            address: Ipv4Addr::new(10, 77, 0, 1),
            prefix: 24,
        });
    }
    let problem = |problem: Problem| {
        let span = match problem.place {
            Place::Lab => file.lab.span(),
            Place::Guest(i) => file.guests.get(i).map_or(0..0, Spanned::span),
            Place::Bridge(i) => file.bridges.get(i).map_or(0..0, Spanned::span),
        };
        at(Some(key_in(text, span, problem.key)), problem.what)
    };
    let mut addresses = Addresses::new(&file);
    let mut guests = Vec::new();
    for (index, table) in file.guests.iter().enumerate() {
        let table = table.get_ref();
        let mut workloads = Vec::new();
        for spanned in &table.workloads {
            let mut fields = spanned.get_ref().clone();
            let name = fields.remove("name");
            let workload: Workload = fields.try_into().map_err(|e: toml::de::Error| {
                at(
                    Some(spanned.span()),
                    format!("workload: {}", e.message().trim()),
                )
            })?;
            let name = match name {
                None => workload.kind().to_owned(),
                Some(toml::Value::String(name)) => name,
                Some(_) => {
                    return Err(at(
                        Some(spanned.span()),
                        "workload: `name` must be a string".into(),
                    ));
                }
            };
            workload
                .check()
                .map_err(|e| at(Some(spanned.span()), format!("workload `{name}`: {e}")))?;
            workloads.push((name, workload));
        }
        guests.push(GuestSpec {
            name: table.name.clone(),
            memory: table.memory.as_ref().map_or(default_memory, |m| m.0),
            cpus: table.cpus.unwrap_or(1),
            cores: table.cores.clone(),
            weight: table.weight,
            disks: table
                .disks
                .iter()
                .map(|d| DiskSpec {
                    image: folder.join(&d.image),
                    size: d.size.as_ref().map(|s| s.0),
                    read_only: d.read_only,
                })
                .collect(),
            taps: taps(index, &table.taps, &bridges, &mut addresses).map_err(problem)?,
            workloads,
            kernel_args: table.kernel_args.clone(),
        });
    }
    let spec = Spec {
        name: lab.name.clone(),
        guests,
        bridges,
        vmm,
    };
    check(&spec).map_err(problem)?;
    Ok(spec)
}

/// Addresses in use.
struct Addresses(Vec<Ipv4Addr>);

impl Addresses {
    /// The addresses written in the file.
    fn new(file: &File) -> Self {
        let guests = file.guests.iter().flat_map(|g| match &g.get_ref().taps {
            Taps::Count(_) => &[][..],
            Taps::List(list) => list,
        });
        let bridges = file.bridges.iter().map(|b| b.get_ref().address.0);
        Self(
            guests
                .filter_map(|t| t.address.map(|a| a.0))
                .chain(bridges)
                .collect(),
        )
    }

    /// The next free address of the bridge, from host number 11 on.
    fn next(&mut self, bridge: &BridgeSpec) -> Option<Ipv4Addr> {
        let mask = viola_netdev::netmask(bridge.prefix);
        let net = u32::from(bridge.address) & mask;
        let free = |number: u32| {
            Some(Ipv4Addr::from(net + number))
                .filter(|a| *a != bridge.address && !self.0.contains(a))
        };
        let found = (11..!mask).chain(1..11.min(!mask)).find_map(free)?;
        self.0.push(found);
        Some(found)
    }
}

fn taps(
    guest: usize,
    taps: &Taps,
    bridges: &[BridgeSpec],
    addresses: &mut Addresses,
) -> std::result::Result<Vec<TapSpec>, Problem> {
    let problem = |what: String| Problem {
        place: Place::Guest(guest),
        key: "taps",
        what: format!("`taps`: {what}"),
    };
    let one = |bridge: &BridgeSpec,
               address: Option<Subnet>,
               mac: Option<[u8; 6]>,
               addresses: &mut Addresses| {
        let (address, prefix) = match address {
            Some(Subnet(address, prefix)) => (address, prefix),
            None => {
                let next = addresses.next(bridge);
                (
                    next.ok_or_else(|| {
                        problem(format!("bridge `{}` has no free address left", bridge.name))
                    })?,
                    bridge.prefix,
                )
            }
        };
        let [a, b, c, d] = address.octets();
        Ok(TapSpec {
            bridge: bridge.name.clone(),
            address,
            prefix,
            mac: mac.unwrap_or([2, 0, a, b, c, d]),
        })
    };
    match taps {
        Taps::Count(count) => (0..*count)
            .map(|i| one(&bridges[i % bridges.len()], None, None, addresses))
            .collect(),
        Taps::List(list) => list
            .iter()
            .map(|tap| {
                let bridge = match &tap.bridge {
                    None => &bridges[0],
                    Some(name) => bridges.iter().find(|b| b.name == *name).ok_or_else(|| {
                        problem(format!(
                            "bridge `{name}` is not in this lab; add a [[bridge]] with that name"
                        ))
                    })?,
                };
                one(
                    bridge,
                    tap.address,
                    tap.mac.as_ref().map(|m| m.0),
                    addresses,
                )
            })
            .collect(),
    }
}

fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes()[..offset.min(text.len())]
        .iter()
        .filter(|b| **b == b'\n')
        .count()
        + 1
}

/// Span of a key's assignment in a table, or of the whole table.
fn key_in(text: &str, table: Range<usize>, key: &str) -> Range<usize> {
    let mut offset = table.start;
    // the span of a table ends with its header if sub-tables follow: search up to the next header
    for (number, line) in text[table.start..].split_inclusive('\n').enumerate() {
        let word = line.trim_start();
        if number > 0 && word.starts_with('[') {
            break;
        }
        if word
            .strip_prefix(key)
            .is_some_and(|rest| rest.trim_start().starts_with('='))
        {
            return offset..offset + line.len();
        }
        offset += line.len();
    }
    table
}

#[cfg(test)]
mod tests;
