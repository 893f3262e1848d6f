// SPDX-License-Identifier: Apache-2.0
//! Processes that the daemon starts of its own program.

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
}
