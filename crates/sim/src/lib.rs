// SPDX-License-Identifier: Apache-2.0
//! A model of hosts whose VMs share cores: what viola does there, what the papers measured, what it would do elsewhere.
//!
//! Discrete events, integer nanoseconds, one seed: the same input gives the same output, byte for byte. All decisions
//! come from `viola-policy`; what is modelled here is the rest of a host: cores ([`cpu`]) with the kernel's schedulers
//! ([`sched`]), packets on their way ([`net`], [`lanes`]), and what VMs do ([`work`]).

pub mod advise;
pub mod cpu;
pub mod fleet;
pub mod lanes;
pub mod net;
pub mod papers;
pub mod queue;
pub mod random;
pub mod scenario;
pub mod sched;
pub mod setup;
pub mod work;
pub mod world;
