// SPDX-License-Identifier: Apache-2.0
//! The sockets through which the daemon talks to a VM: guest agents, QMP monitors, the UML console.
//!
//! Each function returns a path that this program can open, through `/proc/PID/root` of the VM's process. All fail with
//! [`HostError::Read`] when a file of procfs cannot be read.

use std::path::{Path, PathBuf};

use crate::error::HostError;
use crate::paths::through_root;
use crate::prepared::Purpose;
use crate::proc;
use crate::proc::unix_sockets::{listening, socket_inode, socket_inodes};
use crate::qemu::{Chardev, QemuArgs};
use crate::uml::{self, UmlArgs};
use crate::vm::{Hypervisor, Vm};

/// Name of the virtio-serial port of the guest agent (libvirt: `<target type='virtio' name='...'/>`).
pub const AGENT_PORT: &str = "org.viola.agent.0";

/// Name of the virtio-serial port through which the agent of a reading VM sends read requests.
pub const READ_PORT: &str = "org.viola.read.0";

/// The unix socket of the VM's guest agent; `None` when the VM has none.
///
/// UML: `agent` in the umid folder, beside the console. QEMU: the socket of port [`AGENT_PORT`].
/// Firecracker and Cloud Hypervisor have no such port.
///
/// # Errors
/// [`HostError::Read`].
pub fn agent_socket(vm: &Vm) -> Result<Option<PathBuf>, HostError> {
    match vm.hypervisor {
        Hypervisor::Uml => {
            let socket = uml_folder(vm)?.map(|folder| folder.join("agent"));
            Ok(socket.filter(|path| path.exists()))
        }
        _ => port_socket(vm, AGENT_PORT),
    }
}

/// The host's socket of a QEMU VM's virtio-serial port called `name`; `None` for other VMs and without such a port.
///
/// The command line names the socket. Where it does not, a listening socket of QEMU's whose file is called `name` is
/// taken.
///
/// # Errors
/// [`HostError::Read`].
pub fn port_socket(vm: &Vm, name: &str) -> Result<Option<PathBuf>, HostError> {
    let Some(args) = arguments(vm, Hypervisor::Qemu)? else {
        return Ok(None);
    };
    let listening = listening(vm.pid)?;
    let path = match QemuArgs::port_chardev(&args, name) {
        Some(Chardev::Path(path)) => Some(path),
        Some(Chardev::Fd(fd)) => {
            let inode = socket_inode(vm.pid, fd)?;
            let own = listening.iter().find(|(i, _)| Some(*i) == inode);
            own.map(|(_, path)| path.clone())
        }
        None => None,
    };
    let named = || {
        let own: Vec<u64> = socket_inodes(vm.pid).ok()?;
        let has_name = |path: &str| Path::new(path).file_name().is_some_and(|n| n == name);
        let mut found = listening.iter();
        found
            .find(|(inode, path)| has_name(path) && own.contains(inode))
            .map(|(_, path)| path.clone())
    };
    Ok(path.or_else(named).map(|p| through_root(vm.pid, &p)))
}

/// The umid folder of a UML guest, which holds the socket of its console; `None` for other VMs and without such a
/// folder.
///
/// # Errors
/// [`HostError::Read`].
pub fn uml_folder(vm: &Vm) -> Result<Option<PathBuf>, HostError> {
    match arguments(vm, Hypervisor::Uml)? {
        Some(args) => uml::folder(vm.pid, &UmlArgs::parse(&args)),
        None => Ok(None),
    }
}

/// The QMP socket for waiting for events: the one that `viola prepare` has made, else the last one of a QEMU that has two or more,
/// since the inventory uses the first. `None` without one.
///
/// # Errors
/// [`HostError::Read`].
pub fn event_socket(vm: &Vm) -> Result<Option<PathBuf>, HostError> {
    Ok(choose_event_socket(&qmp_sockets(vm)?, &vm.name).cloned())
}

fn choose_event_socket<'a>(sockets: &'a [PathBuf], vm: &str) -> Option<&'a PathBuf> {
    let prepared = prepared(sockets, Purpose::Events, vm);
    prepared.or_else(|| sockets.last().filter(|_| sockets.len() > 1))
}

/// The QMP socket for plugging devices: the one that `viola prepare` has made, else the last but one of three or more, which
/// neither the inventory nor [`event_socket`] uses, else the last one. `None` without any.
///
/// # Errors
/// [`HostError::Read`].
pub fn device_socket(vm: &Vm) -> Result<Option<PathBuf>, HostError> {
    Ok(choose_device_socket(&qmp_sockets(vm)?, &vm.name).cloned())
}

fn choose_device_socket<'a>(sockets: &'a [PathBuf], vm: &str) -> Option<&'a PathBuf> {
    let any = || match sockets.len() {
        0..=2 => sockets.last(),
        n => sockets.get(n - 2),
    };
    prepared(sockets, Purpose::Devices, vm).or_else(any)
}

/// The prepared socket of the VM's own name, else any: a VM that was renamed or cloned since has that of the old name.
fn prepared<'a>(sockets: &'a [PathBuf], purpose: Purpose, vm: &str) -> Option<&'a PathBuf> {
    let own = purpose.socket(vm);
    let of_purpose = || {
        let sockets = sockets.iter();
        sockets.filter(|path| Purpose::of(path) == Some(purpose))
    };
    let is_own = |path: &&PathBuf| path.ends_with(own.trim_start_matches('/'));
    of_purpose().find(is_own).or_else(|| of_purpose().next())
}

fn qmp_sockets(vm: &Vm) -> Result<Vec<PathBuf>, HostError> {
    let args = arguments(vm, Hypervisor::Qemu)?.unwrap_or_default();
    let sockets = QemuArgs::parse(&args).qmp.into_iter();
    Ok(sockets.map(|path| through_root(vm.pid, &path)).collect())
}

/// The command line of a VM of this hypervisor, without the program's name.
fn arguments(vm: &Vm, hypervisor: Hypervisor) -> Result<Option<Vec<String>>, HostError> {
    if vm.hypervisor != hypervisor {
        return Ok(None);
    }
    let args = proc::cmdline(vm.pid)?.filter(|args| !args.is_empty());
    Ok(args.map(|args| args[1..].to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::tests::own_process;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_prepared_socket_is_taken_for_what_it_is() {
        let path = |purpose: Purpose| PathBuf::from(purpose.socket("db01"));
        let (events, devices) = (path(Purpose::Events), path(Purpose::Devices));
        let own = PathBuf::from("/run/own.qmp");
        assert_eq!(
            choose_event_socket(std::slice::from_ref(&own), "db01"),
            None
        );
        assert_eq!(
            choose_event_socket(std::slice::from_ref(&events), "db01"),
            Some(&events)
        );
        let both = [devices.clone(), events.clone(), own.clone()];
        assert_eq!(choose_event_socket(&both, "db01"), Some(&events));
        assert_eq!(choose_device_socket(&both, "db01"), Some(&devices));
        let cloned = [Purpose::Events.socket("db00").into(), events.clone()];
        assert_eq!(choose_event_socket(&cloned, "db01"), Some(&events));
        assert_eq!(choose_event_socket(&cloned[..1], "db01"), cloned.first());
        let others = [own.clone(), "/run/second.qmp".into()];
        assert_eq!(choose_event_socket(&others, "db01"), others.last());
        assert_eq!(choose_device_socket(&others, "db01"), others.last());
    }

    #[test]
    fn a_listening_socket_named_after_the_port_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(AGENT_PORT);
        assert_eq!(agent_socket(&own_process()).unwrap(), None);
        let _listener = UnixListener::bind(&path).unwrap();
        let found = agent_socket(&own_process()).unwrap().unwrap();
        assert!(
            found.ends_with(path.strip_prefix("/").unwrap()),
            "{found:?}"
        );
        assert!(std::os::unix::net::UnixStream::connect(&found).is_ok());
        // the other port is another one
        assert_eq!(port_socket(&own_process(), READ_PORT).unwrap(), None);
        let path = dir.path().join(READ_PORT);
        let _listener = UnixListener::bind(&path).unwrap();
        assert!(
            port_socket(&own_process(), READ_PORT)
                .unwrap()
                .unwrap()
                .ends_with(READ_PORT)
        );
    }
}
