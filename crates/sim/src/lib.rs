// SPDX-License-Identifier: Apache-2.0
//! A simulator of hosts whose VMs share cores. It predicts what viola does on a host and what the papers' experiments
//! give.
//!
//! The simulator handles discrete events in integer nanoseconds, with random numbers from one seed:
//! equal inputs give equal outputs, byte for byte. All decisions come from `viola-policy`. This
//! crate models the rest of a host:
//!
//! | module | models |
//! |---|---|
//! | [`cpu`], [`sched`] | cores, vCPUs, and the schedulers of Linux and Xen |
//! | [`net`], [`lanes`] | packets, NICs and virtual functions |
//! | [`work`] | what VMs do: the benchmarks of the papers, and services |
//! | [`setup`], [`world`] | a host described, and that host running |
//! | [`scenario`], [`advise`] | hosts from TOML files, and what viola would gain there |
//! | [`papers`] | the papers' experiments, and the project's own measurements |
//! | [`fleet`] | many hosts, as a fluid model |
//! | [`queue`], [`random`] | events in order of time, and random numbers |

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
