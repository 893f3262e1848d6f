// SPDX-License-Identifier: Apache-2.0
//! Command line of `viola-lab`. The man page is generated from the long help texts.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

/// Name of the program in messages.
pub const PROGRAM: &str = "viola-lab";

/// Boot real guests on this machine, run the demo, and run the benchmarks of viola.
///
/// The guests are virtual machines that need no hardware virtualisation (User Mode Linux, QEMU). The program `viola`
/// must be in the same folder, because the demo and the benchmarks measure it.
#[derive(Debug, Parser)]
#[command(
    name = PROGRAM,
    version,
    propagate_version = true,
    disable_help_subcommand = true
)]
#[command(after_long_help = viola_cli::after_help!())]
pub struct Args {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    #[command(flatten)]
    #[allow(missing_docs)]
    Lab(Lab),
    /// Demonstrate viola on four guests of this machine.
    ///
    /// Boots a web server and three busy guests on one core, and measures stock scheduling, the papers' 30 ms slices
    /// and viola in turn, in two to four minutes. Prints a table and writes report.html and report.json. Needs root, two
    /// cores and the lab's guest image.
    Demo(crate::demo::Demo),
    /// Run a benchmark and compare its figures with their goals.
    #[cfg(feature = "benches")]
    #[command(subcommand)]
    Bench(crate::benches::Bench),
    /// Start helper processes of benchmarks and tests in guests.
    #[cfg(feature = "benches")]
    #[command(hide = true, subcommand)]
    Internal(Internal),
}

/// Start helper processes of benchmarks and tests in guests.
#[cfg(feature = "benches")]
#[derive(Debug, Subcommand)]
pub enum Internal {
    /// Generate and check traffic between network namespaces.
    Traffic {
        /// Traffic specification.
        json: String,
    },
    /// Run one end of a TCP stream.
    Backlog {
        /// Subcommand and its arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// Run processes that stand in for VMs.
    Stand {
        /// Subcommand and its arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
}

/// Subcommands of `lab`.
#[derive(Debug, Subcommand)]
pub enum Lab {
    /// Boot the guests of a lab description.
    ///
    /// The description is a TOML file that lists the guests with their memory, cores, weight, disks, taps and
    /// workloads. The first run fetches and builds the guest kernel and its root file system. The command returns when
    /// all guests are up. A supervisor process then holds the lab.
    Up {
        /// Lab description.
        #[arg(value_name = "FILE")]
        spec: PathBuf,
        /// Stay in the foreground and hold the lab until Ctrl-C or `viola-lab down`.
        #[arg(long)]
        foreground: bool,
    },
    /// Open a shell in a guest, or run one command there.
    ///
    /// Ends with the exit status of the command. Ctrl-] leaves the shell.
    Sh {
        /// GUEST, or LAB/GUEST when several labs have a guest of that name.
        guest: String,
        /// Command and arguments, after --.
        #[arg(last = true)]
        command: Vec<String>,
    },
    /// Run a host program in the network of a lab, for example ping. Without a command, open a shell.
    Net {
        /// The lab; required when several labs are running.
        #[arg(long, value_name = "LAB")]
        lab: Option<String>,
        /// Command and arguments, after --.
        #[arg(last = true)]
        command: Vec<String>,
    },
    /// Show all labs and their guests.
    List,
    /// Restart a guest's kernel and the workloads of its description.
    Reboot {
        /// GUEST, or LAB/GUEST.
        guest: String,
    },
    /// End a lab.
    Down {
        /// The lab; required when several labs are running.
        lab: Option<String>,
    },
    /// Remove what killed labs left behind. Every lab start does this too.
    Sweep,
    /// Hold a lab that `up` has started.
    #[command(hide = true)]
    Supervise {
        /// Lab description.
        spec: PathBuf,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        Args::command().debug_assert();
    }

    #[test]
    fn a_command_in_a_guest_keeps_its_options() {
        let args = Args::try_parse_from(["viola-lab", "sh", "web", "--", "ls", "-l"]).unwrap();
        assert!(
            matches!(args.command, Command::Lab(Lab::Sh { command, .. }) if command == ["ls", "-l"])
        );
    }
}
