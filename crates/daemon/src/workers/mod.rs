// SPDX-License-Identifier: Apache-2.0
//! Worker processes of vread and vpipe: they parse what guests send, without privilege, and outlive the daemon.
//!
//! | file | does |
//! |---|---|
//! | `answer` | a process for one answer of a guest about a VF, or for a session with an emulator |
//! | `check` | what `viola check` says of them |
//! | `entry` | what runs in a worker process (`viola worker`) |
//! | `process` | one worker as the daemon sees it: starts, adopts, orders and ends it |
//! | `user` | under which user a worker runs |
//! | `run_dir` | the sockets and shared files of workers in the run directory |
//!
//! `supervisor/` decides which workers run.

pub mod answer;
pub(crate) mod check;
pub mod entry;
pub(crate) mod process;
pub mod run_dir;
pub(crate) mod user;
