// SPDX-License-Identifier: Apache-2.0
//! Processes of vread and vpipe: told on their standard input what to be, shut in, and then left to what guests send.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use viola_vpipe::pipes::{PipeResources, congestion_controls};
use viola_vpipe::{EgressGate, FlowTable, HoldQueue};
use viola_vread::agent_worker;
use viola_vread::control::{Control, Inbox, PipeSetup, WorkerSetup};
use viola_vread::journal::{Level as Matters, LogSink};
use viola_vread::peer;
use viola_vread::reader::{self, DeviceConfig, MountOptions};
use viola_vread::sandbox::{self, Profile};

use viola_cli::error::{Failure, Outcome, chain};
use viola_cli::log::{self, Level};

/// The workers, each in a process of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Listens to the agent in a VM.
    Agent,
    /// Serves blocks to a VM.
    Reader,
    /// Serves blocks to other hosts, and fetches theirs.
    Peer,
}

/// Runs one of them, until it is told to end.
pub fn run(kind: Kind) -> Outcome {
    let (name, needs) = match kind {
        Kind::Agent => (c"viola-agent-w", Profile::Agent),
        Kind::Reader => (c"viola-reader-w", Profile::Reader),
        Kind::Peer => (c"viola-peer-w", Profile::Peer),
    };
    // What ps shows.
    let _ = rustix::thread::set_name(name);
    let told = take_stdin()
        .map(Control::from_fd)
        .map_err(|e| format!("standard input: {e}"))
        .and_then(|c| c.receive_setup().map_err(|e| e.to_string()));
    let (setup, fds) = told.map_err(|e| {
        Failure::usage(format!(
            "this command is for the daemon, not for people ({e})"
        ))
    })?;
    // Neither the end of a terminal nor Ctrl-C there is meant for a process that outlives the daemon.
    let _ = rustix::process::setsid();
    let mut fds = fds.into_iter();
    let mut next = || {
        fds.next()
            .ok_or_else(|| Failure::run("a descriptor is missing"))
    };
    let inbox = Inbox::new(next()?);
    let shut_in = |user, ports: &[u16]| {
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
            // Whatever is asked of the environment is asked now.
            log::about(Level::Info, &vm, "vread: agent's worker starts");
            sandbox::enter(user, needs, &[]).map_err(|e| Failure::run(chain(&e)))?;
            agent_worker::run(start, sink(vm))
        }
        WorkerSetup::Reader {
            vm,
            tag,
            queues,
            waiters,
            poll_us,
            uid,
            user,
        } => {
            let start = reader::Params {
                socket: next()?,
                hazards: next()?.into(),
                vm: vm.clone(),
                device: DeviceConfig {
                    tag,
                    queues,
                    waiters,
                    poll: Duration::from_micros(poll_us),
                    mount: MountOptions {
                        uid,
                        gid: uid,
                        keep_cache: false,
                    },
                },
            };
            log::about(Level::Info, &vm, "vread: reader's worker starts");
            shut_in(user, &[])?;
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
            shut_in(user, &ports)?;
            peer::run(start, inbox)
        }
    };
    done.map_err(|e| Failure::run(format!("vread: {e}")))
}

/// Enters the network namespace for the VM's sockets, which is kept by this process, as the steering programs are by their links.
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
    let hold_queue = HoldQueue::from_descriptors([next()?, next()?], setup.tap);
    let links = vec![next()?, next()?, next()?, next()?];
    let place = PipeResources {
        flows,
        gate,
        hold_queue,
        tap: setup.tap,
        veth: setup.veth,
        hold_veth: setup.parked,
        addresses: setup.addresses,
        congestion_controls,
        max_pipes: setup.most,
        max_bytes_per_s: setup.rate,
    };
    Ok((place, links))
}

/// Takes the socket that is the standard input, and leaves nothing there.
fn take_stdin() -> std::io::Result<OwnedFd> {
    let socket = rustix::io::fcntl_dupfd_cloexec(std::io::stdin(), 3)?;
    rustix::stdio::dup2_stdin(std::fs::File::open("/dev/null")?)?;
    Ok(socket)
}

fn sink(vm: String) -> LogSink {
    Box::new(move |level, what| {
        let level = match level {
            Matters::Error => Level::Error,
            Matters::Warning => Level::Warning,
            Matters::Notice => Level::Notice,
            Matters::Info => Level::Info,
        };
        log::about(level, &vm, format!("vread: {what}"));
    })
}
