// SPDX-License-Identifier: Apache-2.0
//! The constants of the testbeds: one file each, every constant with its source.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use viola_policy::slices::{MS, Nanos, US};

use crate::net::NicCosts;
use crate::sched::{EevdfConfig, XenConfig};
use crate::setup::{HostSetup, Policy};
use crate::work::GuestCosts;

/// One constant.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Constant {
    /// Its value, in the unit that its name ends with.
    pub value: f64,
    /// Its source.
    pub source: String,
}

/// A testbed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Testbed {
    /// Its name.
    pub name: &'static str,
    /// Its constants.
    pub constants: BTreeMap<String, Constant>,
}

macro_rules! beds {
    ($($(#[$doc:meta])* $name:ident: $file:literal),* $(,)?) => {
        impl Testbed {
            $($(#[$doc])* pub fn $name() -> Self {
                Self::parse($file, include_str!(concat!("../../calibration/", $file, ".toml")))
            })*

            /// All testbeds.
            pub fn all() -> Vec<Testbed> {
                vec![$(Testbed::$name()),*]
            }
        }
    };
}

beds! {
    /// Dissertation, chapter 2 (vSlicer).
    xen_3_4: "xen-3.4",
    /// vTurbo, vPipe.
    xen_4_1: "xen-4.1",
    /// vRead.
    kvm: "kvm-3.12",
    /// Raccoon.
    xen_4_2: "xen-4.2",
    /// The project's own lab of UML guests.
    lab: "lab",
}

impl Testbed {
    fn parse(name: &'static str, text: &str) -> Self {
        let constants = toml::from_str(text).unwrap_or_else(|e| panic!("{name}: {e}"));
        Self { name, constants }
    }

    /// A constant of this testbed.
    ///
    /// # Panics
    /// If the testbed has no constant of that name; a test reads all of them.
    pub fn get(&self, name: &str) -> f64 {
        match self.constants.get(name) {
            Some(constant) => constant.value,
            None => panic!("{}: no constant {name}", self.name),
        }
    }

    /// A constant in us, as ns.
    pub fn us(&self, name: &str) -> Nanos {
        (self.get(name) * US as f64).round() as Nanos
    }

    /// A constant in ms, as ns.
    pub fn ms(&self, name: &str) -> Nanos {
        (self.get(name) * MS as f64).round() as Nanos
    }

    /// Costs of a guest's I/O.
    pub fn costs(&self) -> GuestCosts {
        GuestCosts {
            call: self.get("call_ns") as Nanos,
            wake: self.get("wake_ns") as Nanos,
            copy: self.get("copy_ns_per_kb") / 1000.0,
            send: self.get("send_ns") as Nanos,
        }
    }

    /// The credit scheduler of this testbed's Xen.
    pub fn xen(&self, slice: Nanos) -> Policy {
        Policy::Xen(XenConfig {
            slice,
            cores: self.get("host_cores") as u32,
            by_tick: self.get("debit_by_tick") > 0.0,
            domain_0: true,
        })
    }

    /// Stock Linux with UML guests.
    pub fn stock_linux(&self) -> Policy {
        Policy::Linux(EevdfConfig {
            packets_wake: true,
            guest_tick: self.ms("guest_tick_ms"),
            ..EevdfConfig::default()
        })
    }

    /// A host of this testbed without VMs.
    pub fn host(&self) -> HostSetup {
        HostSetup {
            bits: (self.get("nic_mbit") * 1e6) as u64,
            nic: NicCosts {
                ring: self.get("ring") as usize,
                queue: self.get("ring_queue") as usize,
                interrupt: self.get("interrupt_ns") as Nanos,
                packet: self.get("packet_ns") as Nanos,
                budget: 64,
                host_packet: self.get("host_packet_ns") as Nanos,
                coalesce: self.us("coalesce_us"),
                slow: None,
                merge: self.get("merge_bytes") as u32,
            },
            costs: self.costs(),
            switch: self.get("switch_ns") as Nanos,
            decision: self
                .constants
                .get("decision_ns")
                .map_or(0, |c| c.value as Nanos),
            ..HostSetup::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_constant_of_every_testbed_has_a_source() {
        for bed in Testbed::all() {
            assert!(bed.constants.len() > 5, "{}", bed.name);
            for (name, constant) in &bed.constants {
                assert!(constant.source.len() > 4, "{}: {name}", bed.name);
                assert!(constant.value.is_finite() && constant.value >= 0.0);
            }
        }
    }
}
