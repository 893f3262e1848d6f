// SPDX-License-Identifier: Apache-2.0
//! SR-IOV virtual functions (VFs): the pool of a NIC, and giving one to a guest and taking it back without a lost
//! connection (Raccoon, sections 3.2 and 3.3).
//!
//! | module | does |
//! |---|---|
//! | [`pool`] | the VFs of a physical function (PF) by sysfs: made once, never resized; drivers |
//! | [`card`] | the PF's own switch: whose packets go to which VF |
//! | [`attach`] | what a guest does with a VF, whatever kind of guest it is |
//! | [`netns`] | a guest that is a network namespace with a bond |
//! | [`qemu`] | a QEMU guest: hot-plug by QMP |
//! | [`uml`] | a UML guest: hot-plug by its console |
//! | [`voice`] | words to the agent in a guest that has a bond |
//! | [`guest`] | any of them, as it is kept |
//! | [`switch`] | the steps of a grant and of a revocation, in their order |
//! | [`steps`] | how long each of them took |
//! | [`journal`] | what holds at this moment, for whoever comes after a daemon that was killed |
//!
//! Who is to have a VF is not decided here but in `viola_policy::lanes`.

pub mod attach;
pub mod card;
pub mod error;
pub mod guest;
pub mod journal;
pub mod netns;
pub mod pool;
pub mod qemu;
pub mod steps;
pub mod switch;
pub mod uml;
pub mod voice;

pub use attach::{Attachment, GoesOver, Presence, VfAt};
pub use card::{Card, PfCard, Terms};
pub use error::LaneError;
pub use guest::Guest;
pub use journal::{Entry, Journal, Stage};
pub use pool::Pf;
pub use steps::Steps;
pub use viola_netdev::Mac;

/// `52:54:00:12:34:56`.
#[must_use]
pub fn mac_text(mac: Mac) -> String {
    let bytes: Vec<String> = mac.iter().map(|b| format!("{b:02x}")).collect();
    bytes.join(":")
}
