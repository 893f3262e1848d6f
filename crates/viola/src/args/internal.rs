// SPDX-License-Identifier: Apache-2.0
//! Processes that the daemon starts from its own program.

use clap::Subcommand;

/// Processes that the daemon starts from its own program.
#[derive(Debug, Subcommand)]
pub enum Internal {
    /// Watches the slot controller from another core.
    SlotsWatchdog {
        /// Parameters from the daemon.
        json: String,
    },
    /// Gives the cores to the VMs, with one real-time thread per core.
    SlotsController {
        /// Parameters from the watchdog.
        json: String,
    },
    /// Follows libvirt's domains, and prints a line for each event.
    Libvirt,
}
