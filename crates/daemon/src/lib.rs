// SPDX-License-Identifier: Apache-2.0
//! The daemon: `viola run`. Start with `control_loop.rs`, which is the whole loop in plain steps: host -> meter -> policy -> act.
//!
//! | folder or file | holds |
//! |---|---|
//! | `run` | start and end of the daemon |
//! | `control_loop` | the loop |
//! | `control` | its state, and the steps that belong to no accelerator |
//! | `slices`, `turbo`, `lanes`, `vread`, `vpipe` | an accelerator each |
//! | `cores` | the input and layout of a plan, which slices and turbo share |
//! | `supervisor`, `workers` | the worker processes of vread and vpipe: which run, and one of them |
//! | `vms` | what is known of each VM: settings, measurements, reports |
//! | `host` | libvirt, ends of processes, affinity of the daemon, lock, users |
//! | `api`, `check` | the control socket; the table of `viola check` |
//! | `background`, `retry`, `prometheus` | a loop on its own thread; when to try again after a failure; the text format of metrics |
//!
//! An accelerator's folder has a file (or a folder) for each role, and leaves out roles that it does not have:
//!
//! | role | what it does |
//! |---|---|
//! | `mod` | says what the accelerator is; holds its state, and its thread if it has one |
//! | `observe` | reads what it needs of the host |
//! | `decide` | builds the input of the policy, and turns the answer into a plan |
//! | `apply` | carries the plan out |
//! | `restore` | puts back or takes over what an earlier run left |
//! | `status` | what the control socket shows |
//! | `metrics` | what Prometheus gets |
//! | `check` | what `viola check` says |
//!
//! Folders import only what stands below them: `run`, `control_loop`, `control`, `check`/`api`, `lanes`/`supervisor`, `vread`, `vpipe`,
//! `workers`, `slices`, `turbo`, `cores`, `vms`, `host`.

pub mod api;
mod background;
pub mod check;
mod control;
mod control_loop;
mod cores;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod host;
pub mod lanes;
mod prometheus;
mod retry;
mod run;
pub mod slices;
mod supervisor;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod turbo;
pub mod vms;
mod vpipe;
pub mod vread;
pub mod workers;

pub use run::run;
