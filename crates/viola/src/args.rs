// SPDX-License-Identifier: Apache-2.0
//! The command line. The long help texts are the text of the man page.
// Help names tables of the configuration, such as [vread]: these are no links.
#![allow(rustdoc::broken_intra_doc_links)]

mod internal;
mod prepare;
mod vms;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use viola_cli::error::Outcome;
use viola_daemon::workers::answer::{self, Question};
use viola_daemon::workers::entry::{self, Kind};

use viola_config as config;

pub use internal::Internal;
pub use prepare::{Prepare, PrepareWhat, Unprepare};
pub use vms::{Advise, Log, Set, Try, Why};

/// Fast I/O for virtual machines that share few cores.
///
/// A virtual machine that waits for a core cannot answer a packet or finish a read. viola shortens that wait: a
/// latency-sensitive VM (class ls) gets short slices of its core more often and keeps its share; the other VMs (class
/// batch) keep theirs.
///
/// `viola run` is the daemon. The other commands talk to the daemon, or work without it. When the daemon ends, it
/// restores everything that it changed; after kill -9 its watchdog does, or `viola restore`.
#[derive(Debug, Parser)]
#[command(
    name = "viola",
    version,
    propagate_version = true,
    disable_help_subcommand = true
)]
#[command(after_long_help = viola_cli::after_help!(
    "VIOLA_SOCKET  path of the control socket, or of the read socket, unless --socket names one"
))]
pub struct Viola {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon.
    ///
    /// The daemon measures the VMs of this host every 100 ms and schedules them as the configuration and `viola set` say.
    /// It stays in the foreground and writes one line to standard error for each change: the VM, the change, the reason.
    /// SIGHUP makes it read the configuration again. On SIGTERM or SIGINT it restores everything and ends. Needs root.
    ///
    /// Workers of vread go on when the daemon ends, so that mounts outlive a restart. The next daemon takes them over;
    /// `viola stop --all` and `viola restore` end them.
    ///
    /// Without a VM of class ls or turbo, and without caps, the daemon changes nothing.
    Run(Run),
    /// Show what this host supports, and what it lacks.
    ///
    /// Works without a daemon. A running daemon adds advice: which VMs wait long for their core, and how long they would
    /// wait in class ls. With --config the command first checks a configuration file, and ends with status 2 when the file
    /// has an error.
    Check(Check),
    /// Show all VMs: their share, what they used, how long they waited.
    ///
    /// Columns: NAME. CLASS: ls, batch or turbo; a * marks a class that the classifier chose. BY: the mechanism that
    /// schedules the VM. CORES: where its vCPUs may run. SHARE: its part of those cores when all VMs are busy, from its
    /// weight. USED: the part that it used in the last second. WAIT: the part of the last second that a vCPU waited for
    /// a core. P50 DELAY, P99 DELAY: half, and 99 of 100, of the packets of the last 10 s waited no longer until a vCPU
    /// ran. NET and DISK: traffic in the last second and in the last 5 s. HELP: accelerators that would help this VM and
    /// that it does not have (slices: class ls would shorten its waits; vread: it may read HDFS blocks of this host and
    /// has no mount). `viola check` explains each.
    ///
    /// Without a daemon the command measures for one second by itself, and HELP stays empty.
    Vms(Vms),
    /// Show what would help which VM, and change nothing.
    ///
    /// Lists the VMs that an accelerator would help and that do not have it, with the figures that say so: now, or with --from over
    /// a recording of `viola record`, where TIME is the part of it in which that held.
    Advise(Advise),
    /// Show what each VM has of each accelerator, and why.
    ///
    /// Prints a line for slices, and one for each of vread, vpipe and lanes that the configuration gives to the VM. For class auto
    /// it says what the daemon measured, tried and found. Ends with status 2 when no VM has the name.
    Why(Why),
    /// Show what the daemon changed last, and why.
    ///
    /// Prints the changes, errors and warnings among the daemon's last 256 lines. The journal has all lines.
    Log(Log),
    /// Measure on running VMs what a class does for them and for the other VMs.
    ///
    /// Windows with the class alternate with windows of class batch, in pairs whose order is drawn by lot. The command compares
    /// the delay of packets (or of wake-ups) and the CPU time of all VMs of the host. It ends with a table and a verdict. Each
    /// interval misses the true ratio in at most 1 of 100 trials.
    ///
    /// Only the class of these VMs changes. In windows of class batch the kernel alone schedules them, unless other VMs of their
    /// cores are of class ls. However the command ends, the daemon puts every class back within 20 s.
    Try(Try),
    /// Watch all VMs on a terminal, or replay a recording.
    ///
    /// Shows the table of `viola vms` once a second, and the daemon's last changes. Keys: arrows choose a VM, Enter shows
    /// its history, s and r sort, / filters, e shows all events, space pauses, ? shows help, q ends. With --replay: left
    /// and right step, PgUp and PgDn step by a minute, Home and End jump, + and - change the speed, space plays.
    ///
    /// While the daemon does not answer, the screen says so and the command retries.
    Top(Top),
    /// Record what the daemon shows, for viola top --replay.
    ///
    /// Writes a line of JSON each second, 0.5 to 1 kB for each VM. An existing recording is continued; the command refuses
    /// any other existing file. It ends on Ctrl-C, SIGTERM, or after --for. While the daemon does not answer, it records the
    /// gap and retries.
    Record(Record),
    /// Write into a libvirt VM what an accelerator needs.
    ///
    /// Adds to the VM's domain what is missing: viola-agent's channel, QMP sockets, shared memory, the virtio-fs device, a root
    /// port. A channel is plugged into a running VM at once; the rest comes with its next start. Nothing else of the domain
    /// changes. The command says what is left to do in the VM and on the host.
    ///
    /// WHAT is vread, vpipe, turbo or lane. With vread the grants of the configuration say whether the VM reads or is read, so write
    /// the grant first. Needs root and libvirt's command virsh, and no daemon.
    Prepare(Prepare),
    /// Take out of a libvirt VM what viola prepare has added.
    ///
    /// What the operator has written stays, and what another accelerator needs.
    Unprepare(Unprepare),
    /// Register a process as a VM, so that viola trusts it.
    ///
    /// viola trusts the VMs of libvirt without this. For another launcher, call it just after the VM has started, for
    /// example as ExecStartPost=viola register $MAINPID of a systemd unit. The registration ends with the process. Needs
    /// root, and no daemon.
    Register(Register),
    /// Change how one VM is scheduled, at once.
    ///
    /// Options that are not given stay as they are. The change holds until the daemon ends; with --keep it survives
    /// restarts. The configuration file is not written. `viola set VM --reset` undoes all changes made by `viola set`.
    Set(Set),
    /// Return all VMs to the kernel's own scheduling, at once.
    ///
    /// The daemon keeps measuring, and changes nothing until `viola start` or until it is restarted.
    Stop(Stop),
    /// Resume after `viola stop --all`.
    Start(Socket),
    /// Show what the daemon is doing, and why.
    Status(Status),
    /// Restore by hand what an earlier daemon left behind.
    ///
    /// Needs no daemon, and may be called at any time and more than once. The command ends a watchdog or controller that
    /// was left behind, restores the scheduling of every thread, and prints what it did. It first tells a running daemon to
    /// stop, as `viola stop --all` does. Needs root.
    Restore(Restore),
    /// Show the VMs that vread serves, and what they read.
    ///
    /// With vread, a VM reads HDFS blocks directly from the disk images of DataNode VMs. [vread] allow in the configuration
    /// lists the allowed pairs. The book's page on vread says what both VMs need.
    #[command(subcommand)]
    Vread(Vread),
    /// Show the transfers that the host carries out for VMs.
    ///
    /// With vpipe, a VM that has [vm.pipe] in the configuration hands a connection and a file over for the time of a
    /// transfer, and the host sends from the disk image. The book's page on vpipe says what the VM needs.
    #[command(subcommand)]
    Pipe(Pipe),
    /// Show which guest has which VF of an SR-IOV NIC, and why.
    ///
    /// With lanes, the virtual functions (VFs) of a NIC go to the guests that gain most from them ([lanes] in the
    /// configuration), and return without a broken connection. The command shows the NICs, all guests of their networks
    /// with IF (the measure that decides) and DI2, and the last switches with their reasons. The book's page on lanes says
    /// what a guest needs.
    Lanes(VreadArgs),
    /// Make or show this host's key for vread between hosts.
    ///
    /// Each host that reads or serves blocks across the network has a key. It recognises the others by their fingerprints:
    /// [[vread.peer]] in the configuration.
    #[command(subcommand)]
    Keys(Keys),
    /// Simulate a host with viola.
    ///
    /// A scenario in TOML describes a host, its VMs and their load. The simulator uses the same decision code as the
    /// daemon. The book's page on the simulator lists the keys of a scenario and the limits of the model.
    #[command(subcommand)]
    Sim(crate::sim::Sim),
    /// Write man pages and shell completions into a folder.
    ///
    /// Writes a page for each command (viola-set.1) and completions for bash, fish and zsh, from the text of --help.
    /// `man -l DIR/viola.1` shows a page.
    Man(Man),
    /// Helper processes of the daemon.
    #[command(hide = true, subcommand)]
    Internal(Internal),
    /// Workers of vread, vpipe and lanes; the daemon starts them.
    #[command(hide = true, subcommand)]
    Worker(Worker),
}

/// Subcommands of `keys`.
#[derive(Debug, Subcommand)]
pub enum Keys {
    /// Make a key and a certificate for this host; existing files are never overwritten.
    Init(KeysArgs),
    /// Show the fingerprint, as lines for the configuration of other hosts.
    Show(KeysArgs),
}

/// Options of `man`.
#[derive(Debug, Args)]
pub struct Man {
    /// Output folder; it is created when missing.
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

/// Options of `keys init` and `keys show`.
#[derive(Debug, Args)]
pub struct KeysArgs {
    /// Name of this host for other hosts; its host name by default.
    #[arg(long, value_name = "NAME")]
    pub host: Option<String>,
    /// Configuration file that names both files (key and certificate in [vread]).
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Subcommands of `vread`.
#[derive(Debug, Subcommand)]
pub enum Vread {
    /// List the VMs: served or not, known blocks, connected readers.
    Ls(VreadArgs),
    /// Show counters: bytes, requests, withdrawals, and the reasons of fallbacks and refusals.
    Stat(VreadArgs),
}

/// Subcommands of `pipe`.
#[derive(Debug, Subcommand)]
pub enum Pipe {
    /// List the VMs and their transfers: size, peer, rate, age.
    Ls(VreadArgs),
}

/// Options of `vread ls`, `vread stat`, `pipe ls` and `lanes`.
#[derive(Debug, Args)]
pub struct VreadArgs {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub socket: Socket,
}

/// Workers of the daemon. Each gets its descriptors on its standard input.
#[derive(Debug, Subcommand)]
pub enum Worker {
    /// Talks to the agent in a VM.
    Agent {
        /// Its control socket, shown in the list of processes.
        socket: PathBuf,
    },
    /// Serves blocks to a VM.
    Reader {
        /// Its control socket.
        socket: PathBuf,
    },
    /// Serves blocks to other hosts, and reads theirs.
    Peer {
        /// Its control socket.
        socket: PathBuf,
    },
    /// Reads the reply of the agent in a VM to a request about a VF.
    AgentAnswer {
        /// Number of the request.
        number: u64,
        /// Time limit, milliseconds.
        timeout: u64,
    },
    /// Reads the answer of a UML kernel on its console.
    ConsoleAnswer {
        /// Time limit for each part, milliseconds.
        timeout: u64,
    },
    /// Runs requests on a connection to an emulator. Standard output is a socket of the daemon.
    Monitor,
}

impl Worker {
    /// Runs the worker until it is no longer needed.
    ///
    /// # Errors
    /// As [`entry::run`], [`answer::run`] and [`answer::run_monitor`].
    pub fn run(&self) -> Outcome {
        match *self {
            Self::Agent { .. } => entry::run(Kind::Agent),
            Self::Reader { .. } => entry::run(Kind::Reader),
            Self::Peer { .. } => entry::run(Kind::Peer),
            Self::AgentAnswer { number, timeout } => {
                answer::run(Question::Agent(number), Duration::from_millis(timeout))
            }
            Self::ConsoleAnswer { timeout } => {
                answer::run(Question::Console, Duration::from_millis(timeout))
            }
            Self::Monitor => answer::run_monitor(),
        }
    }
}

/// Options of `run`.
#[derive(Debug, Args)]
pub struct Run {
    /// Configuration file.
    #[arg(short, long, value_name = "FILE", default_value = config::DEFAULT_PATH)]
    pub config: PathBuf,
    /// Only measure and advise; change nothing.
    ///
    /// The control socket works as usual. The log says what the daemon would have changed, and `viola set` changes only the
    /// advice.
    #[arg(long)]
    pub dry_run: bool,
}

/// Options of `check`.
#[derive(Debug, Args)]
pub struct Check {
    /// Configuration file to check; by default that of the running daemon.
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub socket: Socket,
}

/// Options of `vms`.
#[derive(Debug, Args)]
pub struct Vms {
    /// Print JSON: times in ns, shares as fractions of 1, rates per second.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub socket: Socket,
}

/// Options of `top`.
#[derive(Debug, Args)]
pub struct Top {
    /// Recording to replay.
    #[arg(long, value_name = "FILE")]
    pub replay: Option<PathBuf>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub socket: Socket,
}

/// Options of `record`.
#[derive(Debug, Args)]
pub struct Record {
    /// Output file.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Interval between two lines, 100ms to 3600s.
    #[arg(long, value_name = "TIME", default_value = "1s")]
    pub interval: String,
    /// Duration of the recording; until Ctrl-C by default.
    #[arg(long = "for", value_name = "TIME")]
    pub length: Option<String>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub socket: Socket,
}

/// Options of `register`.
#[derive(Debug, Args)]
pub struct Register {
    /// Number of the process that runs the VM.
    #[arg(value_name = "PID")]
    pub pid: u32,
    /// Name of the VM; without it, the name on the process's command line. viola trusts the process only under this name.
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Remove the registration. Settings that viola has made for the VM stay until its process ends.
    #[arg(long, conflicts_with = "name")]
    pub remove: bool,
}

/// Options of `stop`.
#[derive(Debug, Args)]
pub struct Stop {
    /// All VMs. Required, so that a bare `viola stop` changes nothing.
    #[arg(long, required = true)]
    pub all: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub socket: Socket,
}

/// Options of `status`.
#[derive(Debug, Args)]
pub struct Status {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub socket: Socket,
}

/// Options of `restore`.
#[derive(Debug, Args)]
pub struct Restore {
    /// Folder of the daemon's run-time state (`run_dir` of the configuration).
    #[arg(long, value_name = "DIR", default_value = config::DEFAULT_RUN_DIR)]
    pub run_dir: PathBuf,
    /// Keep the workers of vread, so that mounts outlive a restart of the daemon.
    #[arg(long)]
    pub keep_workers: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub socket: Socket,
}

/// The daemon's control socket.
#[derive(Debug, Args)]
pub struct Socket {
    /// Path of the daemon's control socket. A command that only shows something asks the read socket beside it
    /// (viola-read.sock) when this user may not use the control socket.
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

impl Socket {
    /// The path from the option, else from VIOLA_SOCKET, else the default.
    pub fn path(&self) -> PathBuf {
        let environment = || {
            std::env::var_os("VIOLA_SOCKET")
                .filter(|v| !v.is_empty())
                .map(PathBuf::from)
        };
        self.socket
            .clone()
            .or_else(environment)
            .unwrap_or_else(|| config::DEFAULT_SOCKET.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use std::ffi::OsString;
    use viola_cli::usage::{Refusal, parse};

    fn refused(args: &[&str]) -> String {
        match parse::<Viola>(args.iter().map(OsString::from)) {
            Err(Refusal::Usage(s)) => s,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_command_line_is_sound() {
        Viola::command().debug_assert();
    }

    #[test]
    fn wrong_usage_is_one_sentence() {
        let s = refused(&["viola", "set", "db01", "--clas", "ls"]);
        assert!(
            s.contains("--clas") && s.contains("usage: viola set") && !s.contains('\n'),
            "{s}"
        );
        let s = refused(&["viola", "set", "db01", "--class", "fast"]);
        assert!(s.contains("ls, batch, turbo or auto"), "{s}");
        let s = refused(&["viola", "set", "db01"]);
        assert!(s.contains("--class") && s.contains("--cap"), "{s}");
        assert!(refused(&["viola", "stop"]).contains("--all"));
    }

    #[test]
    fn a_negative_number_is_a_value_not_an_option() {
        let cli =
            parse::<Viola>(["viola", "set", "db01", "--weight", "-5"].map(OsString::from)).unwrap();
        assert!(matches!(cli.command, Command::Set(Set { weight: Some(w), .. }) if w == "-5"));
    }
}
