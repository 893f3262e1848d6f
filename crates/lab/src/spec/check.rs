// SPDX-License-Identifier: Apache-2.0
//! Checks of a description: what must hold between its parts.

use std::collections::HashSet;
use std::path::Path;

use super::{GuestSpec, MAX_CPUS, Spec};
use crate::error::{Error, Result as LabResult};
use viola_netdev::MAX_IFNAME_BYTES;

/// A table of the description.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Lab,
    Guest(usize),
    Bridge(usize),
}

/// An error of the description and its place.
#[derive(Debug)]
pub(super) struct Problem {
    pub place: Place,
    pub key: &'static str,
    pub what: String,
}

impl Spec {
    /// Checks a description that was made in code.
    ///
    /// # Errors
    /// [`Error::Spec`].
    pub fn check(&self) -> LabResult<()> {
        check(self).map_err(|problem| {
            let origin = match problem.place {
                Place::Lab => format!("lab `{}`", self.name),
                Place::Guest(i) => format!("guest `{}`", self.guests[i].name),
                Place::Bridge(i) => format!("bridge `{}`", self.bridges[i].name),
            };
            Error::Spec {
                origin,
                what: problem.what,
            }
        })
    }
}

pub(super) fn check(spec: &Spec) -> Result<(), Problem> {
    let fail = |place, key: &'static str, what: String| {
        Err(Problem {
            place,
            key,
            what: format!("`{key}`: {what}"),
        })
    };
    if !plain(&spec.name, 24) {
        return fail(
            Place::Lab,
            "name",
            format!("`{}` must be {}", spec.name, plain_rule(24)),
        );
    }
    let mut names = HashSet::new();
    for (index, bridge) in spec.bridges.iter().enumerate() {
        let here = Place::Bridge(index);
        if !plain(&bridge.name, MAX_IFNAME_BYTES)
            || bridge.name.starts_with("tap")
            || bridge.name == "lo"
        {
            return fail(
                here,
                "name",
                format!(
                    "`{}` must be {}, and neither lo nor tap...",
                    bridge.name,
                    plain_rule(MAX_IFNAME_BYTES)
                ),
            );
        }
        if !names.insert(&bridge.name) {
            return fail(
                here,
                "name",
                format!("two bridges are called `{}`", bridge.name),
            );
        }
        if !(8..=30).contains(&bridge.prefix) || !bridge.address.is_private() {
            return fail(
                here,
                "address",
                format!("{bridge} must be a private address with a prefix of 8 to 30"),
            );
        }
        if let Some(other) = spec.bridges[..index]
            .iter()
            .find(|o| o.contains(bridge.address) || bridge.contains(o.address))
        {
            return fail(
                here,
                "address",
                format!("{bridge} overlaps with bridge `{}` ({other})", other.name),
            );
        }
    }
    let cores = std::fs::read_to_string("/sys/devices/system/cpu/online")
        .ok()
        .map(|text| core_list(&text));
    let mut names = HashSet::new();
    let mut addresses: HashSet<_> = spec.bridges.iter().map(|b| b.address).collect();
    let mut macs = HashSet::new();
    for (index, guest) in spec.guests.iter().enumerate() {
        let here = Place::Guest(index);
        if !plain(&guest.name, 32) {
            return fail(
                here,
                "name",
                format!("`{}` must be {}", guest.name, plain_rule(32)),
            );
        }
        if !names.insert(&guest.name) {
            return fail(
                here,
                "name",
                format!("two guests are called `{}`", guest.name),
            );
        }
        if !(32 << 20..=64 << 30).contains(&guest.memory) || guest.memory % (1 << 20) != 0 {
            return fail(here, "memory", "must be whole MiB, from 32M to 64G".into());
        }
        if let Some(weight) = guest.weight.filter(|w| !(1..=10_000).contains(w)) {
            return fail(
                here,
                "weight",
                format!("{weight} must be 1 to 10000, 100 being ordinary"),
            );
        }
        if !(1..=MAX_CPUS).contains(&guest.cpus) {
            return fail(here, "cpus", format!("must be 1 to {MAX_CPUS}"));
        }
        if guest.cpus > 1 && guest.weight.is_some() {
            let why = "one control group over several cores starves its neighbours";
            return fail(
                here,
                "weight",
                format!("only for a guest with one vCPU: {why}"),
            );
        }
        if let Some(cores) = &cores
            && let Some(core) = guest.cores.iter().find(|c| !cores.contains(c))
        {
            return fail(
                here,
                "cores",
                format!("this host has no online core {core}"),
            );
        }
        if let Some(word) = guest
            .kernel_args
            .iter()
            .find(|w| w.is_empty() || w.contains(char::is_whitespace))
        {
            return fail(here, "kernel_args", format!("`{word}` must be one word"));
        }
        disks(guest).or_else(|what| fail(here, "disks", what))?;
        for tap in &guest.taps {
            let Some(bridge) = spec.bridges.iter().find(|b| b.name == tap.bridge) else {
                return fail(
                    here,
                    "taps",
                    format!("bridge `{}` is not in this lab", tap.bridge),
                );
            };
            let address = tap.address;
            if tap.prefix != bridge.prefix || !bridge.contains(address) {
                return fail(
                    here,
                    "taps",
                    format!(
                        "address {address}/{} is not in the subnet of bridge `{}` ({bridge})",
                        tap.prefix, bridge.name
                    ),
                );
            }
            if !addresses.insert(address) {
                return fail(here, "taps", format!("address {address} is taken already"));
            }
            if !macs.insert(tap.mac) {
                return fail(here, "taps", "its mac is taken already".into());
            }
        }
        let mut workloads = HashSet::new();
        for (name, workload) in &guest.workloads {
            if !plain(name, 32) {
                return fail(
                    here,
                    "workloads",
                    format!("name `{name}` must be {}", plain_rule(32)),
                );
            }
            if !workloads.insert(name) {
                return fail(
                    here,
                    "workloads",
                    format!("two workloads are called `{name}`; give them a `name`"),
                );
            }
            workload
                .check()
                .or_else(|what| fail(here, "workloads", format!("`{name}`: {what}")))?;
        }
    }
    Ok(())
}

fn disks(guest: &GuestSpec) -> Result<(), String> {
    if guest.disks.len() > 8 {
        return Err("a guest has at most 8".into());
    }
    for disk in &guest.disks {
        let image = disk.image.display();
        if disk
            .image
            .as_os_str()
            .as_encoded_bytes()
            .iter()
            .any(|b| b", \t\n:".contains(b))
        {
            return Err(format!(
                "image `{image}` must have no space, comma or colon in its path"
            ));
        }
        if disk.size.is_some_and(|size| size == 0 || size % 512 != 0) {
            return Err(format!("size of `{image}` must be a multiple of 512 bytes"));
        }
        if disk.size.is_none() && !Path::new(&disk.image).exists() {
            return Err(format!(
                "image `{image}` is missing; give a `size` to have it made"
            ));
        }
    }
    Ok(())
}

fn plain(name: &str, longest: usize) -> bool {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    (1..=longest).contains(&name.len()) && name.chars().all(fits) && !name.starts_with('-')
}

fn plain_rule(longest: usize) -> String {
    format!("1 to {longest} lower-case letters, digits and dashes")
}

/// Parses a kernel's list of CPUs such as `0-3,6`.
fn core_list(text: &str) -> HashSet<usize> {
    text.trim()
        .split(',')
        .filter_map(|part| {
            let (low, high) = part.split_once('-').unwrap_or((part, part));
            Some(low.parse().ok()?..=high.parse().ok()?)
        })
        .flatten()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_list_of_cpus_is_parsed() {
        assert_eq!(core_list("0-2,5\n"), HashSet::from([0, 1, 2, 5]));
    }

    #[test]
    fn a_lab_made_in_code_is_checked_too() {
        let mut spec = Spec::of_guests("t", 2, &[]).unwrap();
        spec.guests[1].taps[0].address = spec.guests[0].taps[0].address;
        let text = spec.check().unwrap_err().to_string();
        assert_eq!(
            text,
            "guest `vm2`: `taps`: address 10.77.0.11 is taken already"
        );
    }

    #[test]
    fn public_addresses_are_refused() {
        let mut spec = Spec::of_guests("t", 0, &[]).unwrap();
        spec.bridges[0].address = std::net::Ipv4Addr::new(8, 8, 8, 8);
        assert!(spec.check().unwrap_err().to_string().contains("private"));
    }
}
