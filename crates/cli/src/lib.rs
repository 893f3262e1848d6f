// SPDX-License-Identifier: Apache-2.0
//! What viola's programs share.
//!
//! | module | does |
//! |---|---|
//! | `usage` | command lines read by clap, refused in one sentence |
//! | `error` | failures in one sentence, each with its exit status |
//! | `table` | aligned tables, colours and JSON on standard output |
//! | `log` | one line per event, to journald or standard error |
//! | `quantities` | durations, caps and weights as operators write them |
//! | `toml_text` | errors of TOML files, with line and key |
//! | `date` | times of day in UTC |
//! | `client` | requests to the daemon's control socket |
//! | `interrupt` | SIGINT, SIGTERM and SIGHUP end a long run between two steps |

pub mod client;
pub mod date;
pub mod error;
pub mod interrupt;
pub mod log;
pub mod quantities;
pub mod table;
pub mod toml_text;
pub mod usage;
