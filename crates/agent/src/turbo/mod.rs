// SPDX-License-Identifier: Apache-2.0
//! The guest's half of a turbo core (vTurbo: paper 002; 000 chapter 3): the kernel's I/O work moves to the vCPU that
//! the host runs on a turbo core, and applications move off it.
//!
//! | module | contents |
//! |---|---|
//! | [`settings`] | `[turbo]` in the configuration |
//! | [`plan`] | which settings to change, from a [`snapshot`] alone |
//! | [`knob`] | what can be set, and one change |
//! | [`read`], [`write`](mod@write) | read and change the guest through a [`system`] |
//! | [`journal`] | the old values, written before a change |
//! | [`restore`] | restores them |
//! | [`keeper`] | reads, plans, changes, and reads again |
//! | [`service`], [`uevents`] | the keeper's thread, and the events that wake it |
//! | [`irqbalance`] | irqbalance's socket |
//! | [`report`] | what `viola-agent status` shows |
//!
//! Early acknowledgement of segments in a socket's backlog is not done here: it needs a kernel module. Softirqs and
//! per-CPU kernel threads stay: they serve their own CPU.

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
