// SPDX-License-Identifier: Apache-2.0
//! The worker's threads: one for the daemon's orders, one for the VM's connection, and those of its queues.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vhost::vhost_user::Listener;
use vhost_user_backend::VhostUserDaemon;
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

use super::device::Device;
use super::gate::Gate;
use super::service::{Service, count};
use super::stream::StreamServer;
use crate::control::{Inbox, Order, Report, Role};
use crate::hazard::Cells;
use crate::images;

/// What the daemon gives a reader worker at its start.
#[derive(Debug)]
pub struct Params {
    /// Identity of the VM.
    pub vm: String,
    /// Listening socket for the VMM, bound by the daemon.
    pub socket: OwnedFd,
    /// The worker's hazard cells ([`crate::hazard::create`]), writable; one for each thread.
    pub hazards: File,
    /// ID of the user in the VM who owns the files.
    pub uid: u32,
}

/// Serves a VM until the daemon orders the worker to quit.
///
/// The process must be the worker's own: a panic in any thread ends it, so that the VM sees a lost device instead of
/// one that hangs.
///
/// # Errors
/// When a parameter is invalid, a thread cannot start, or `poll` fails.
pub fn run(params: Params, mut inbox: Inbox) -> io::Result<()> {
    end_on_panic();
    let service = Arc::new(Service::with_gate(Cells::map(&params.hazards)?));
    let socket = UnixListener::from(params.socket);
    let streams = StreamServer::new(service.clone(), params.uid);
    let serving = service.clone();
    std::thread::Builder::new()
        .name("vm".into())
        .spawn(move || {
            if let Err(e) = serve_vm(&serving, socket, params.uid) {
                eprintln!("vread: the device ended: {e}");
                std::process::exit(1);
            }
        })?;
    inbox.serve(|order, fds| match order {
        Order::Stream => stream(&streams, fds).into(),
        order => execute(&service, &params.vm, order, fds),
    })
}

pub(crate) fn end_on_panic() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        usual(info);
        std::process::abort();
    }));
}

/// Serves one connection of a VM after another on a listening socket. `uid` owns the files.
///
/// # Errors
/// When the socket fails or threads cannot start.
pub fn serve_vm(service: &Arc<Service>, socket: UnixListener, uid: u32) -> io::Result<()> {
    let mut listener = Listener::from(socket);
    loop {
        // Either the VM is gone, or it connects again.
        if let Some(why) = serve_connection(service, &mut listener, uid)? {
            eprintln!("vread: the VMM's connection ended: {why}");
        }
    }
}

/// Serves one connection of a VM. Returns why it ended, unless the VMM hung up.
///
/// # Errors
/// When the socket fails or threads cannot start.
pub(crate) fn serve_connection(
    service: &Arc<Service>,
    listener: &mut Listener,
    uid: u32,
) -> io::Result<Option<String>> {
    let memory = GuestMemoryAtomic::new(GuestMemoryMmap::new());
    let connection = service.gate().map(Gate::begin);
    let device = Arc::new(Device::new(service, uid, connection, memory.clone())?);
    let exit_descriptors = device.exit_descriptors();
    let mut daemon = VhostUserDaemon::new("vm".into(), device, memory).map_err(other)?;
    daemon.start(listener).map_err(other)?;
    service.gate().inspect(|gate| gate.accepted());
    count(&service.counts.connected);
    let ended = daemon.wait();
    drop(daemon);
    drop(exit_descriptors);
    service.counts.connected.fetch_sub(1, Ordering::Relaxed);
    Ok(ended.err().and_then(|e| {
        let hung_up = ["Disconnected", "PartialMessage", "SocketBroken"];
        let kind = format!("{e:?}");
        let is_hang_up = hung_up.iter().any(|word| kind.contains(word));
        (!is_hang_up).then(|| e.to_string())
    }))
}

fn other(e: vhost_user_backend::Error) -> io::Error {
    io::Error::other(e.to_string())
}

fn execute(service: &Service, vm: &str, order: Order, fds: Vec<OwnedFd>) -> Report {
    let mut fds = fds.into_iter();
    match order {
        Order::Hello { .. } => Report::hello(Role::Reader, vm),
        Order::Stat => Report::Reader(service.stat()),
        Order::Quit { .. } => Report::Done,
        Order::Serve { connection } => {
            service.gate().inspect(|gate| gate.confirm(connection));
            Report::Done
        }
        Order::Remote => {
            let set = two(&mut fds).and_then(|ends| {
                let map = service.set_remote(Some(ends));
                map.map_err(|e| format!("cannot map the memory for blocks of other hosts: {e}"))
            });
            set.into()
        }
        Order::NoRemote => service.set_remote(None).map_err(|e| e.to_string()).into(),
        other => change_datanodes(service, other, fds).into(),
    }
}

fn stream(streams: &StreamServer, fds: Vec<OwnedFd>) -> Result<(), String> {
    let fd = fds.into_iter().next().ok_or(NO_DESCRIPTORS)?;
    let replaced = streams.replace(fd);
    replaced.map_err(|e| format!("cannot serve the stream to the VM's agent: {e}"))
}

/// Carries out the orders about DataNode VMs, which reader and peer workers share.
pub(crate) fn change_datanodes(
    service: &Service,
    order: Order,
    mut fds: impl Iterator<Item = OwnedFd>,
) -> Result<(), String> {
    match order {
        Order::Datanode { name } => {
            let (socket, table) = two(&mut fds)?;
            let added = service.add(&name, socket, table);
            added.map_err(|e| format!("cannot map the table of `{name}`: {e}"))
        }
        Order::NoDatanode { name } => {
            service.remove(&name);
            Ok(())
        }
        Order::Images {
            datanode, images, ..
        } => {
            let mut open = HashMap::new();
            let mut failed = Vec::new();
            for spec in &images {
                match images::open(spec, &mut fds) {
                    Ok(image) => drop(open.insert(spec.id, Arc::new(image))),
                    Err(why) => failed.push(why),
                }
            }
            // One that cannot be opened keeps no other one open that the daemon has taken away.
            match service.set_images(&datanode, open) {
                true if failed.is_empty() => Ok(()),
                true => Err(failed.join("; ")),
                false => Err(format!("unknown DataNode `{datanode}`")),
            }
        }
        other => Err(format!("this worker does not support the order {other:?}")),
    }
}

const NO_DESCRIPTORS: &str = "the order lacks descriptors";

/// The two descriptors of an order.
pub(crate) fn two(fds: &mut impl Iterator<Item = OwnedFd>) -> Result<(OwnedFd, OwnedFd), String> {
    match (fds.next(), fds.next()) {
        (Some(one), Some(other)) => Ok((one, other)),
        _ => Err(NO_DESCRIPTORS.into()),
    }
}
