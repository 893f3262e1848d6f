// SPDX-License-Identifier: Apache-2.0
//! The guest's half of a lane (Raccoon: paper 004): a virtual function (VF) of the host's NIC that comes and goes, and the
//! paravirtual NIC of the same Ethernet address that stays, behind one bond (active-backup).
//!
//! The bond is somebody else's, or is made of the paravirtual NIC when the agent starts; then the NIC's addresses and
//! routes go over to it, and back when the agent ends. A VF that comes is made its other port, once, and its active one as
//! soon as it has a link. Before the host takes it away it says so ([`viola_proto::lanes::guest`]); the bond goes over to
//! the paravirtual NIC, the VF is let go, and only then unplugged. Without that word the bond goes over when the VF is gone.
//!
//! [`plan`] decides what is to be done with the interfaces that there are; [`pair`] makes the bond and puts everything back;
//! [`line`] hears the host; [`service`] is the thread that joins them.

pub mod bond;
pub mod host;
pub mod plan;
pub mod report;
pub mod service;
pub mod settings;
