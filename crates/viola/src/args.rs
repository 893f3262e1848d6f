// SPDX-License-Identifier: Apache-2.0
//! The command line. The long help texts are the text of the man page.

mod internal;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use viola_daemon::workers::entry::Kind;
use viola_proto::ClassSetting;
use viola_proto::lanes::LaneSetting;

use viola_config as config;

pub use internal::Internal;

/// Fast I/O for virtual machines that share few cores.
///
/// A virtual machine that waits for a core cannot answer a packet or finish a read. viola shortens that wait: a VM
/// that is called latency-sensitive (class ls) gets short slices of its core more often, and keeps its share; the
/// others (class batch) keep theirs.
///
/// `viola run` is the daemon; all other commands talk to it, or do without it. Everything that viola changes is put
/// back when it ends, however it ends.
#[derive(Debug, Parser)]
#[command(
    name = "viola",
    version,
    propagate_version = true,
    disable_help_subcommand = true
)]
#[command(after_long_help = EXIT_STATUS)]
pub struct Viola {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_STATUS: &str = "\
Exit status:
  0  done
  1  it could not be done
  2  wrong usage or configuration; nothing was done

Environment:
  VIOLA_SOCKET  control socket, where --socket does not name one
  NO_COLOR      no colours, also on a terminal";

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon.
    ///
    /// Looks at the VMs of this host every 100 ms, and schedules them as the configuration and `viola set` say.
    /// Stays in the foreground; each change is one line on stderr, with VM, what and why. SIGHUP reads the
    /// configuration again; SIGTERM and SIGINT put everything back and end. Needs root.
    ///
    /// Workers of vread go on when it ends, so that mounts outlive a restart; the next daemon finds them, and
    /// `viola stop --all` or `viola restore` ends them.
    ///
    /// Without a VM of class ls, and without caps, nothing is changed at all.
    Run(Run),
    /// Tell what this host can do, and what stands in the way.
    ///
    /// Works without a daemon. With one it also gives advice: VMs that wait for their core for long, and what
    /// class ls would make of it. With --config it first checks a configuration file, and ends with status 2 when
    /// that is wrong.
    Check(Check),
    /// Show all VMs: what they are promised, what they got, how long they waited.
    ///
    /// NAME, CLASS (ls or batch; a * when the meter chose it), BY what it is scheduled, CORES that the vCPUs may run on, SHARE that the
    /// weight stands for when everybody is busy and USED in the last second, both in percent of those cores, WAIT
    /// as part of the time the VM wanted to run, P99 WAIT that 99 of 100 waits did not exceed in the last 10 s,
    /// NET and DISK traffic, and HELP: accelerators that would help this VM and that it does not have. slices: class ls
    /// would shorten its waits; vread: it may read HDFS blocks of this host, and has no mount for them. `viola check`
    /// says it in sentences.
    ///
    /// Without a daemon it measures for one second by itself, and says so; HELP takes a daemon.
    Vms(Vms),
    /// Watch all VMs on a terminal, or look at a recording.
    ///
    /// The table of `viola vms` once a second, with what the daemon did and when. Keys: arrows choose a VM, Enter shows
    /// its history, s and r sort, / filters, e shows all events, space holds still, ? helps, q ends. With --replay: left
    /// and right step (PgUp and PgDn by a minute's worth), Home and End, + and - for the speed, space to go on.
    ///
    /// While the daemon is gone it says so and goes on trying.
    Top(Top),
    /// Write down what the daemon shows, for viola top --replay.
    ///
    /// A line of JSON each second: 0.5 to 1 kB for each VM. A recording that is there is gone on with; any other file is left
    /// alone. Ends on Ctrl-C, SIGTERM, or after --for; while the daemon is gone it notes that and goes on trying.
    Record(Record),
    /// Change how one VM is scheduled, at once.
    ///
    /// What is not named stays as it is. The change holds until the daemon ends, and for ever with --keep; the
    /// configuration file is not written to. `viola set VM --reset` takes back all that was set.
    Set(Set),
    /// Put all VMs back to the kernel's own scheduling, at once.
    ///
    /// The daemon goes on measuring and changes nothing until `viola start`, or until it is started again.
    Stop(Stop),
    /// Let the daemon go on after `viola stop --all`.
    Start(Socket),
    /// Show what the daemon is doing, and why.
    Status(Status),
    /// Put back by hand whatever an earlier run left behind.
    ///
    /// Needs no daemon and may be called at any time, also twice: it ends a left-behind watchdog or controller,
    /// gives every thread the scheduling it had before, and prints what was done. A running daemon is told to stop
    /// first, as by `viola stop --all`. Needs root.
    Restore(Restore),
    /// Show whose HDFS blocks are read past their VM, and by whom.
    ///
    /// A VM that the configuration allows to ([vread] allow) reads blocks straight from the disk images of DataNode
    /// VMs on this host. The book's page on vread tells what both VMs need.
    #[command(subcommand)]
    Vread(Vread),
    /// Show the files that the host sends in place of VMs.
    ///
    /// A VM whose configuration says so ([vm.pipe]) gives a connection and a file away for the transfer, and the host sends
    /// from the disk image. The book's page on vpipe tells what the VM needs.
    #[command(subcommand)]
    Pipe(Pipe),
    /// Show who has which VF of an SR-IOV NIC, and why.
    ///
    /// The few virtual functions (VFs) of a NIC go to the guests that gain most from them ([lanes] in the configuration),
    /// and come back without a lost connection. Shown are the NICs, all guests in their networks with IF, the measure by
    /// which VFs are given, and DI2, and the last switches with their reasons. The book's page on lanes tells what a
    /// guest needs.
    Lanes(VreadArgs),
    /// Make and show the key by which other hosts know this one.
    ///
    /// A host that reads blocks of another one, or serves its own, has a key of its own, and knows the others by the
    /// fingerprints of theirs: [[vread.peer]] in the configuration.
    #[command(subcommand)]
    Keys(Keys),
    /// Try on a model what viola would do.
    ///
    /// A simulated host, its VMs and what they do, from a scenario in TOML; the decisions are made by the code that also
    /// runs on hosts. The book's page on the simulator has the keys of a scenario, and what the model leaves out.
    #[command(subcommand)]
    Sim(crate::sim::Sim),
    /// Write man pages and shell completions into a folder.
    ///
    /// A page for each command (viola-set.1) and completions for bash, fish and zsh, made from the same text as
    /// --help. `man -l DIR/viola.1` shows a page from there.
    Man(Man),
    /// Processes that the daemon starts.
    #[command(hide = true, subcommand)]
    Internal(Internal),
    /// Processes that listen to guests; the daemon starts them.
    #[command(hide = true, subcommand)]
    Worker(Worker),
}

/// Subcommands of `keys`.
#[derive(Debug, Subcommand)]
pub enum Keys {
    /// Make a key and a certificate for this host; what is there is never overwritten.
    Init(KeysArgs),
    /// Show the fingerprint, as lines for the configuration of the other hosts.
    Show(KeysArgs),
}

/// Options of `man`.
#[derive(Debug, Args)]
pub struct Man {
    /// The folder; it is made if it is not there.
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

/// Options of `keys init` and `keys show`.
#[derive(Debug, Args)]
pub struct KeysArgs {
    /// What other hosts are to call this one; without it what it calls itself.
    #[arg(long, value_name = "NAME")]
    pub host: Option<String>,
    /// Configuration file, for the places of both files (key and certificate in [vread]).
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Subcommands of `vread`.
#[derive(Debug, Subcommand)]
pub enum Vread {
    /// List the VMs: whether they are served, blocks known, readers connected.
    Ls(VreadArgs),
    /// Show counts: bytes and requests, withdrawals, fallbacks and refusals with their reasons.
    Stat(VreadArgs),
}

/// Subcommands of `pipe`.
#[derive(Debug, Subcommand)]
pub enum Pipe {
    /// List the VMs and their transfers: file size, peer, rate, age.
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

/// Processes of vread. Each gets its descriptors on its standard input.
#[derive(Debug, Subcommand)]
pub enum Worker {
    /// Listens to the agent in a DataNode VM.
    Agent {
        /// Its control socket; for people who look at the list of processes.
        socket: PathBuf,
    },
    /// Serves blocks to a VM.
    Reader {
        /// Its control socket.
        socket: PathBuf,
    },
    /// Serves blocks to other hosts, and fetches theirs.
    Peer {
        /// Its control socket.
        socket: PathBuf,
    },
}

impl Worker {
    /// Which process of the daemon it is.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Agent { .. } => Kind::Agent,
            Self::Reader { .. } => Kind::Reader,
            Self::Peer { .. } => Kind::Peer,
        }
    }
}

/// Options of `run`.
#[derive(Debug, Args)]
pub struct Run {
    /// Configuration file.
    #[arg(short, long, value_name = "FILE", default_value = config::DEFAULT_PATH)]
    pub config: PathBuf,
    /// Change nothing, only measure and advise.
    ///
    /// The control socket answers as ever; what would have been done is in the journal, and `viola set` only
    /// changes the advice.
    #[arg(long)]
    pub dry_run: bool,
}

/// Options of `check`.
#[derive(Debug, Args)]
pub struct Check {
    /// Configuration file to check; without it that of a running daemon, or none.
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
    /// A recording to look at, instead of a daemon.
    #[arg(long, value_name = "FILE")]
    pub replay: Option<PathBuf>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub socket: Socket,
}

/// Options of `record`.
#[derive(Debug, Args)]
pub struct Record {
    /// Where to write.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Time between two lines, 100ms to 3600s.
    #[arg(long, value_name = "TIME", default_value = "1s")]
    pub interval: String,
    /// How long; without it until Ctrl-C.
    #[arg(long = "for", value_name = "TIME")]
    pub length: Option<String>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub socket: Socket,
}

/// Options of `set`.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("change").args(["class", "microslice", "weight", "cap", "lane", "reset"]).required(true).multiple(true)))]
pub struct Set {
    /// Name of the VM, or its identity (uml:NAME, qemu:NAME) when several have that name.
    pub vm: String,
    /// ls: short slices, more often; batch: whole slices; turbo: a vCPU for its I/O on a turbo core, whole slices for
    /// the others; auto: as the meter finds it.
    #[arg(long, value_parser = class)]
    pub class: Option<ClassSetting>,
    /// Length of an ls VM's slice, 50us to 30ms. Shorter answers sooner and costs more.
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    pub microslice: Option<String>,
    /// Share of the core against the other VMs, 1 to 65535. 256 is what a VM has of which nothing is said.
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub weight: Option<String>,
    /// Most that the VM may use, in percent of one core: 1% to 100% per vCPU; none lifts it.
    #[arg(long, value_name = "PERCENT", allow_hyphen_values = true)]
    pub cap: Option<String>,
    /// Whether it may have a VF: auto, while it gains more from one than others; pin, before all others; never.
    #[arg(long, value_parser = lane)]
    pub lane: Option<LaneSetting>,
    /// Let the change survive a restart of the daemon.
    #[arg(long)]
    pub keep: bool,
    /// Forget what was set before, also what was kept; then set what else is named.
    #[arg(long)]
    pub reset: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub socket: Socket,
}

/// Options of `stop`.
#[derive(Debug, Args)]
pub struct Stop {
    /// All VMs; has to be said, so that nobody stops them by accident.
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
    /// Where the daemon keeps the state of a run (`run_dir` of the configuration).
    #[arg(long, value_name = "DIR", default_value = config::DEFAULT_RUN_DIR)]
    pub run_dir: PathBuf,
    /// Leave the workers of vread alone, so that mounts outlive a restart of the daemon.
    #[arg(long)]
    pub keep_workers: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub socket: Socket,
}

/// Where the daemon is.
#[derive(Debug, Args)]
pub struct Socket {
    /// Control socket of the daemon.
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

impl Socket {
    /// The option, else the environment, else the usual place.
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

fn class(text: &str) -> Result<ClassSetting, String> {
    match text {
        "ls" => Ok(ClassSetting::Ls),
        "batch" => Ok(ClassSetting::Batch),
        "auto" => Ok(ClassSetting::Auto),
        "turbo" => Ok(ClassSetting::Turbo),
        _ => Err("ls, batch, turbo or auto is allowed".into()),
    }
}

fn lane(text: &str) -> Result<LaneSetting, String> {
    match text {
        "auto" => Ok(LaneSetting::Auto),
        "pin" => Ok(LaneSetting::Pin),
        "never" => Ok(LaneSetting::Never),
        _ => Err("auto, pin or never is allowed".into()),
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
