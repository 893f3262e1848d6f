// SPDX-License-Identifier: Apache-2.0
//! The guest's half of a lane (Raccoon, paper 004): one active-backup bond of the VM's paravirtual NIC, which stays,
//! and a virtual function (VF) of the host's NIC with the same Ethernet address, which comes and goes.
//!
//! The operator has made the bond, or the agent makes it from the paravirtual NIC at its start; the NIC's addresses
//! and routes then move to the bond, and back when the agent ends. The agent makes a new VF a port of the bond, and
//! its active port when it has a link. Before the host takes the VF away it tells the agent
//! ([`viola_proto::lanes::guest`]): the agent activates the paravirtual NIC and releases the VF, and only then the
//! host unplugs it. Without that message the bond fails over when the VF is gone.
//!
//! | module | contents |
//! |---|---|
//! | [`settings`] | `[lane]` in the configuration |
//! | [`plan`] | which VF to add to the bond, and which port to activate |
//! | [`bond`] | makes the bond, and takes it apart |
//! | [`host`] | the port to the host |
//! | [`service`] | the thread that joins them |
//! | [`report`] | what `viola-agent status` shows |

pub mod bond;
pub mod host;
pub mod plan;
pub mod report;
pub mod service;
pub mod settings;
