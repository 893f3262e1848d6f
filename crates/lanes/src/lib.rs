// SPDX-License-Identifier: Apache-2.0
//! SR-IOV virtual functions (VFs): the pool of a NIC, and granting a VF to a guest and revoking it
//! without losing a connection (Raccoon, sections 3.2 and 3.3).
//!
//! | module | does |
//! |---|---|
//! | [`pool`] | the VFs of a physical function (PF) and their drivers, by sysfs |
//! | [`eswitch`] | the switch inside the NIC: which VF gets the packets of which address |
//! | [`attach`] | what a guest does with a VF: the trait that all kinds of guests implement |
//! | [`vf_interface`] | the network interface that a VF has on the host |
//! | [`netns`] | a guest that is a network namespace with a bond |
//! | [`qemu`] | a QEMU guest: hot-plug by vfio-pci and QMP |
//! | [`uml`] | a UML guest: hot-plug by its management console |
//! | [`agent`] | requests to viola-agent in a guest that has a bond |
//! | [`answers`] | reads what guests answer, in a process without privilege |
//! | [`guest`] | any of these guests, as the journal keeps it |
//! | [`transfer`] | the order of steps in a grant and in a revocation |
//! | [`steps`] | how long each step took |
//! | [`journal`] | which guest has which VF, on disk, so that a restarted daemon can continue |
//!
//! `viola_policy::lanes` decides which guest gets a VF.

pub mod agent;
pub mod answers;
pub mod attach;
pub mod error;
pub mod eswitch;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod guest;
pub mod journal;
pub mod netns;
pub mod pool;
pub mod qemu;
pub mod steps;
pub mod transfer;
pub mod uml;
pub mod vf_interface;

pub use attach::{Attachment, Failover, Presence};
pub use error::LaneError;
pub use eswitch::{Eswitch, PfEswitch, VfSettings};
pub use guest::GuestAccess;
pub use journal::{Entry, Journal, Stage};
pub use pool::{Pf, VfDevice};
pub use steps::StepTimes;
pub use viola_netdev::Mac;

/// Writes an Ethernet address as `52:54:00:12:34:56`.
#[must_use]
pub fn format_mac(mac: Mac) -> String {
    let bytes: Vec<String> = mac.iter().map(|b| format!("{b:02x}")).collect();
    bytes.join(":")
}
