// SPDX-License-Identifier: Apache-2.0
//! Commands that are no people's: processes which viola, its tests and its benchmarks start of it.

use clap::Subcommand;

/// What viola starts of itself.
#[derive(Debug, Subcommand)]
pub enum Internal {
    /// Watches the slot controller, from another core.
    SlotsWatchdog {
        /// What the daemon tells it.
        json: String,
    },
    /// Gives the cores to the VMs, one real-time thread per core.
    SlotsController {
        /// What the watchdog tells it.
        json: String,
    },
    /// Says what libvirt's domains do, a line each.
    Libvirt,
    /// Traffic of network namespaces, in guests of tests and benchmarks.
    Traffic {
        /// What is sent.
        json: String,
    },
    /// Both ends of a TCP stream, in guests of tests and benchmarks.
    Backlog {
        /// What they do.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// Processes that stand for VMs, in guests of tests and benchmarks.
    Stand {
        /// What they do.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
}
