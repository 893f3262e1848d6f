// SPDX-License-Identifier: Apache-2.0
//! The guest's half of a turbo core (vTurbo: paper 002, 000 chapter 3): everything of the kernel that serves I/O goes to the
//! vCPU that the host runs on a turbo core, and applications leave it.
//!
//! [`plan`] decides, from a [`snapshot`] alone, which settings are to be changed; [`read`] and [`write`] touch the guest
//! through a [`system`]; [`journal`] has the old values before anything is changed, [`restore`] puts them back;
//! [`keeper`] joins these, [`service`] is its thread.
//!
//! Not done: early acknowledgement of segments in a socket's backlog, which takes a module of the kernel. Softirqs and
//! threads of one CPU each stay: they do what comes to their CPU.

pub mod cpus;
pub mod irqbalance;
pub mod journal;
pub mod keeper;
pub mod knob;
pub mod plan;
pub mod read;
pub mod report;
pub mod restore;
pub mod service;
pub mod settings;
pub mod snapshot;
pub mod system;
pub mod uevents;
pub mod write;

#[cfg(test)]
mod tests;
