// SPDX-License-Identifier: Apache-2.0
//! What runs in a worker process: it reads its task and descriptors from standard input, enters its sandbox, and serves.

use std::os::fd::{AsFd, OwnedFd};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use viola_vpipe::pipes::{PipeResources, congestion_controls};
use viola_vpipe::{EgressGate, FlowTable, HoldQueue, STEERING_LINKS};
use viola_vread::agent_worker;
use viola_vread::control::{Control, Inbox, PipeSetup, WorkerSetup};
use viola_vread::journal::{Level as Matters, LogSink};
use viola_vread::peer;
use viola_vread::reader;
use viola_vread::sandbox::{self, Profile};

use viola_cli::error::{Failure, Outcome, chain};
use viola_cli::log::{self, Level};

/// Kinds of workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Serves the agent in a VM.
    Agent,
    /// Serves blocks to a VM.
    Reader,
    /// Serves blocks to other hosts, and reads blocks from them.
    Peer,
}

/// Runs a worker until the daemon ends it.
///
/// # Errors
/// When standard input is not the daemon's socket, the sandbox cannot be entered, or serving fails.
pub fn run(kind: Kind) -> Outcome {
    let (name, needs) = match kind {
        Kind::Agent => (c"viola-agent-w", Profile::Agent),
        Kind::Reader => (c"viola-reader-w", Profile::Reader),
        Kind::Peer => (c"viola-peer-w", Profile::Peer),
    };
    // The name that ps shows.
    let _ = rustix::thread::set_name(name);
    let task = take_stdin()
        .map(Control::from_fd)
        .map_err(|e| format!("standard input: {e}"))
        .and_then(|c| c.receive_setup().map_err(|e| e.to_string()));
    let (setup, fds) = task.map_err(|e| {
        Failure::usage(format!(
            "this command is for the daemon, not for people ({e})"
        ))
    })?;
    // The worker outlives the daemon, so it leaves the daemon's terminal and its signals.
    let _ = rustix::process::setsid();
    let mut fds = fds.into_iter();
    let mut next = || {
        fds.next()
            .ok_or_else(|| Failure::run("a descriptor is missing"))
    };
    let inbox = Inbox::new(next()?);
    let enter_sandbox = |user, ports: &[u16]| {
        sandbox::enter(user, needs, ports).map_err(|e| Failure::run(chain(&e)))
    };
    let done = match setup {
        WorkerSetup::Agent {
            vm,
            limits,
            pipes,
            user,
        } => {
            let table = next()?;
            let needs = match pipes {
                Some(_) => Profile::Pipes,
                None => needs,
            };
            let (pipes, _links) = match pipes {
                Some(setup) => {
                    let (place, links) = place(setup, &mut next)?;
                    (Some(place), links)
                }
                None => (None, Vec::new()),
            };
            let start = agent_worker::Params {
                table,
                inbox,
                limits,
                pipes,
                vm: vm.clone(),
            };
            // The first line of the log reads the environment, before the sandbox.
            log::about(Level::Info, &vm, "vread: agent's worker starts");
            sandbox::enter(user, needs, &[]).map_err(|e| Failure::run(chain(&e)))?;
            let about = move |level, what| log::about(level, &vm, what);
            agent_worker::run(start, sink(about))
        }
        WorkerSetup::Reader { vm, uid, user } => {
            let start = reader::Params {
                socket: next()?,
                hazards: next()?.into(),
                vm: vm.clone(),
                uid,
            };
            log::about(Level::Info, &vm, "vread: reader's worker starts");
            enter_sandbox(user, &[])?;
            reader::run(start, inbox)
        }
        WorkerSetup::Peer {
            host,
            certificate,
            key,
            listeners,
            ports,
            user,
        } => {
            let hazards = next()?.into();
            let start = peer::Params {
                hazards,
                listeners: (0..listeners).map(|_| next()).collect::<Result<_, _>>()?,
                host,
                certificate,
                key: key.0,
            };
            log::line(Level::Info, "vread: the worker for other hosts starts");
            enter_sandbox(user, &ports)?;
            peer::run(start, sink(log::line), inbox)
        }
    };
    done.map_err(|e| Failure::run(format!("vread: {e}")))
}

/// Enters the network namespace for the VM's sockets. Namespace and steering programs exist as long as this process.
fn place(
    setup: PipeSetup,
    next: &mut impl FnMut() -> Result<OwnedFd, Failure>,
) -> Result<(PipeResources, Vec<OwnedFd>), Failure> {
    let netns = next()?;
    let congestion_controls = congestion_controls()
        .map_err(|e| Failure::run(format!("vpipe: the kernel's congestion controls: {e}")))?;
    move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))
        .map_err(|e| Failure::run(format!("vpipe: the network namespace: {e}")))?;
    let flows = FlowTable::from(next()?);
    let gate = EgressGate::from(next()?);
    let hold_queue = HoldQueue::from_descriptor(next()?, setup.hold_veth);
    let links = (0..STEERING_LINKS)
        .map(|_| next())
        .collect::<Result<_, _>>()?;
    let place = PipeResources {
        flows,
        gate,
        hold_queue,
        tap: setup.tap,
        veth: setup.veth,
        hold_veth: setup.hold_veth,
        addresses: setup.addresses,
        congestion_controls,
        max_pipes: setup.max_pipes,
        max_bytes_per_s: setup.rate,
        receive_limit: setup.receive_limit,
    };
    Ok((place, links))
}

/// Takes the socket from standard input, and replaces it with /dev/null.
pub(super) fn take_stdin() -> std::io::Result<OwnedFd> {
    let socket = rustix::io::fcntl_dupfd_cloexec(std::io::stdin(), 3)?;
    rustix::stdio::dup2_stdin(std::fs::File::open("/dev/null")?)?;
    Ok(socket)
}

/// Writes a worker's lines with `write`.
fn sink(write: impl Fn(Level, String) + Send + 'static) -> LogSink {
    Box::new(move |level, what| {
        let level = match level {
            Matters::Error => Level::Error,
            Matters::Warning => Level::Warning,
            Matters::Notice => Level::Notice,
            Matters::Info => Level::Info,
        };
        write(level, format!("vread: {what}"));
    })
}
