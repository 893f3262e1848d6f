// SPDX-License-Identifier: Apache-2.0
//! What a VM's process has open: the channel to an agent in the guest, and the files of its disks.
//!
//! A path alone is not enough to open a disk by: it may be seen from another mount namespace, may name another file by
//! now, and is what the VM's process says. Only a file that this very process has open is opened again.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use crate::error::HostError;
use crate::proc;
use crate::qemu::QemuArgs;
use crate::uml::{self, UmlArgs, seen_from};
use crate::vm::{Hypervisor, Tid, Vm};

/// Name of the virtio-serial port to an agent, as libvirt's `<target type='virtio' name='...'/>` gives it.
pub const AGENT_PORT: &str = "org.viola.agent.0";

/// Name of the port through which a reading VM's agent hands requests over.
pub const READ_PORT: &str = "org.viola.read.0";

/// The unix socket behind the port [`READ_PORT`] of a VM of QEMU, as [`agent_socket`] finds the other one; `None`
/// when the VM has none.
///
/// # Errors
/// [`HostError::Read`].
pub fn read_socket(vm: &Vm) -> Result<Option<PathBuf>, HostError> {
    match (vm.hypervisor, proc::cmdline(vm.pid)?) {
        (Hypervisor::Qemu, Some(args)) if !args.is_empty() => {
            port_socket(vm, &args[1..], READ_PORT)
        }
        _ => Ok(None),
    }
}

/// The unix socket behind which the VM's agent is, as this program can open it; `None` when the VM has none.
///
/// UML: `agent` in the folder of its umid, where the console is. QEMU: the socket of the virtio-serial port
/// [`AGENT_PORT`], by the command line, else a socket on which it listens and which has that name.
///
/// # Errors
/// [`HostError::Read`].
pub fn agent_socket(vm: &Vm) -> Result<Option<PathBuf>, HostError> {
    let Some(args) = proc::cmdline(vm.pid)?.filter(|a| !a.is_empty()) else {
        return Ok(None);
    };
    match vm.hypervisor {
        Hypervisor::Uml => {
            let folder = uml::folder(vm.pid, &UmlArgs::parse(&args[1..]))?;
            Ok(folder.map(|f| f.join("agent")).filter(|p| p.exists()))
        }
        Hypervisor::Qemu => port_socket(vm, &args[1..], AGENT_PORT),
        // They have neither a port nor a line of their own.
        Hypervisor::Firecracker | Hypervisor::CloudHypervisor => Ok(None),
    }
}

/// The host's end of a virtio-serial port: as the command line says, else a socket of that name.
fn port_socket(vm: &Vm, args: &[String], name: &str) -> Result<Option<PathBuf>, HostError> {
    let listening = listening(vm.pid)?;
    let path = match QemuArgs::port_chardev(args, name) {
        Some(Chardev::Path(path)) => Some(path),
        Some(Chardev::Fd(fd)) => {
            let inode = socket_inode(vm.pid, fd)?;
            let own = listening.iter().find(|(i, _)| Some(*i) == inode);
            own.map(|(_, path)| path.clone())
        }
        None => None,
    };
    let named = || {
        let is_it =
            |(_, path): &&(u64, String)| Path::new(path).file_name().is_some_and(|n| n == name);
        let own: Vec<u64> = socket_inodes(vm.pid).ok()?;
        let mut found = listening.iter().filter(is_it);
        found
            .find(|(inode, _)| own.contains(inode))
            .map(|(_, path)| path.clone())
    };
    Ok(path.or_else(named).map(|p| seen_from(vm.pid, &p)))
}

/// A QMP socket that the inventory leaves alone, on which events may be waited for: the last one of a QEMU that has
/// several. `None` when there is no such.
///
/// # Errors
/// [`HostError::Read`].
pub fn event_socket(vm: &Vm) -> Result<Option<PathBuf>, HostError> {
    let args = proc::cmdline(vm.pid)?.unwrap_or_default();
    if vm.hypervisor != Hypervisor::Qemu || args.is_empty() {
        return Ok(None);
    }
    let sockets = QemuArgs::parse(&args[1..]).qmp;
    let last = sockets.last().filter(|_| sockets.len() > 1);
    Ok(last.map(|path| seen_from(vm.pid, path)))
}

/// A QMP socket for plugging devices: of three or more the last but one, which neither the inventory nor
/// [`event_socket`] uses, else the last. `None` when there is none.
///
/// # Errors
/// [`HostError::Read`].
pub fn device_socket(vm: &Vm) -> Result<Option<PathBuf>, HostError> {
    let args = proc::cmdline(vm.pid)?.unwrap_or_default();
    if vm.hypervisor != Hypervisor::Qemu || args.is_empty() {
        return Ok(None);
    }
    let sockets = QemuArgs::parse(&args[1..]).qmp;
    let wanted = match sockets.len() {
        0..=2 => sockets.last(),
        n => sockets.get(n - 2),
    };
    Ok(wanted.map(|path| seen_from(vm.pid, path)))
}

/// Connects without ever waiting: a full queue of other clients is [`io::ErrorKind::WouldBlock`]. The socket is opened
/// by a descriptor, so that neither the length of its path nor the way through `/proc/PID/root` matters.
///
/// # Errors
/// Whatever the kernel says.
pub fn connect(reach: &Path) -> io::Result<UnixStream> {
    let node = File::from(rustix::fs::open(
        reach,
        OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
    )?);
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", node.as_raw_fd()))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&fd, &address)?;
    let stream = UnixStream::from(fd);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Where QEMU's end of the port is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Chardev {
    /// It made the socket itself.
    Path(String),
    /// It was handed a listening socket, as libvirt does.
    Fd(u32),
}

/// Inode numbers and paths of the unix sockets on which anybody in the VM's network namespace listens.
fn listening(pid: Tid) -> Result<Vec<(u64, String)>, HostError> {
    let list = proc::read_text(format!("/proc/{pid}/net/unix"))?.unwrap_or_default();
    Ok(list.lines().filter_map(listener).collect())
}

/// A line of `/proc/net/unix` of a listening socket with a path.
fn listener(line: &str) -> Option<(u64, String)> {
    let ([_, _, _, flags, _, _, inode], path) = proc::unix_socket(line);
    (flags == "00010000" && path.starts_with('/')).then_some((inode.parse().ok()?, path.to_owned()))
}

fn socket_inode(pid: Tid, fd: u32) -> Result<Option<u64>, HostError> {
    let target = proc::link(format!("/proc/{pid}/fd/{fd}"))?;
    Ok(target.and_then(|t| inode_of(&t)))
}

fn inode_of(target: &Path) -> Option<u64> {
    let text = target.to_str()?;
    text.strip_prefix("socket:[")?
        .strip_suffix(']')?
        .parse()
        .ok()
}

fn socket_inodes(pid: Tid) -> io::Result<Vec<u64>> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))?.flatten();
    Ok(entries
        .filter_map(|e| inode_of(&fs::read_link(e.path()).ok()?))
        .collect())
}

/// Device and inode number of a file.
pub type FileId = (u64, u64);

/// Opens a file of one of the VM's disks for reading. It has to be one that the VM's process has open itself.
///
/// # Errors
/// [`io::ErrorKind::NotFound`] when the VM has no such file open.
pub fn open_disk(vm: &Vm, path: &Path) -> io::Result<(File, FileId)> {
    let file = File::open(find_disk(vm, path)?)?;
    let id = id_of(&file.metadata()?);
    Ok((file, id))
}

/// The same, for reading and writing.
///
/// # Errors
/// Those of [`open_disk`]; [`io::ErrorKind::PermissionDenied`] when the VM itself may only read it.
pub fn open_disk_to_write(vm: &Vm, path: &Path) -> io::Result<File> {
    let fd = find_disk(vm, path)?;
    if !writes(&fd)? {
        let what = format!("{}: the VM may only read it", path.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
    }
    File::options().read(true).write(true).open(fd)
}

/// Where in `/proc` the VM's process has it open.
fn find_disk(vm: &Vm, path: &Path) -> io::Result<PathBuf> {
    let wanted = path
        .to_str()
        .and_then(|p| fs::metadata(seen_from(vm.pid, p)).ok())
        .map(|m| id_of(&m));
    let mut by_name = None;
    for entry in fs::read_dir(format!("/proc/{}/fd", vm.pid))?.flatten() {
        let fd = entry.path();
        let is_named = fs::read_link(&fd).is_ok_and(|target| target == path);
        let Ok(meta) = fs::metadata(&fd) else {
            continue;
        };
        if !(meta.is_file() || is_block_device(&meta)) {
            continue;
        }
        // The name that the kernel knows goes before what lies at that path now.
        if is_named {
            by_name = Some(fd);
            break;
        }
        if by_name.is_none() && wanted == Some(id_of(&meta)) {
            by_name = Some(fd);
        }
    }
    by_name.ok_or_else(|| {
        let what = format!("{}: the VM has no such file open", path.display());
        io::Error::new(io::ErrorKind::NotFound, what)
    })
}

/// Whether the process may write to what it has open there.
fn writes(fd: &Path) -> io::Result<bool> {
    let number = fd.file_name().unwrap_or_default();
    let info = fd
        .parent()
        .and_then(Path::parent)
        .map(|process| process.join("fdinfo").join(number))
        .ok_or(io::ErrorKind::InvalidInput)?;
    let text = fs::read_to_string(info)?;
    // in octal; the last two bits are the mode of access
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    let mode = flags.ok_or(io::ErrorKind::InvalidData)? & libc::O_ACCMODE as u32;
    Ok(mode != libc::O_RDONLY as u32)
}

/// Device and inode number; for a block device the device that it is.
pub fn id_of(meta: &fs::Metadata) -> FileId {
    if is_block_device(meta) {
        (0, meta.rdev())
    } else {
        (meta.dev(), meta.ino())
    }
}

fn is_block_device(meta: &fs::Metadata) -> bool {
    use std::os::unix::fs::FileTypeExt;
    meta.file_type().is_block_device()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpuset::CpuSet;
    use crate::vm::VmId;
    use std::os::unix::net::UnixListener;

    fn me() -> Vm {
        let pid = std::process::id();
        Vm {
            id: VmId::new(Hypervisor::Qemu, "me"),
            name: "me".into(),
            hypervisor: Hypervisor::Qemu,
            pid,
            start_time: 1,
            vcpus: Vec::new(),
            service: Vec::new(),
            disks: Vec::new(),
            nics: Vec::new(),
            cgroup: None,
            cores: CpuSet::new(),
            status: None,
            uuid: None,
            libvirt: false,
        }
    }

    #[test]
    fn only_a_file_that_the_vm_has_open_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.img");
        fs::write(&path, "x").unwrap();
        assert_eq!(
            open_disk(&me(), &path).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
        let held = File::open(&path).unwrap();
        let (_, id) = open_disk(&me(), &path).unwrap();
        assert_eq!(id, id_of(&held.metadata().unwrap()));
        // By another name of the same file, too.
        let link = dir.path().join("link.img");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert_eq!(open_disk(&me(), &link).unwrap().1, id);
        // Another file at that path is not the VM's.
        fs::remove_file(&path).unwrap();
        fs::write(&path, "y").unwrap();
        let other = id_of(&fs::metadata(&path).unwrap());
        assert!(open_disk(&me(), &path).is_err() || other == id);
    }

    #[test]
    fn a_listening_socket_of_the_ports_name_is_the_agents() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(AGENT_PORT);
        assert_eq!(agent_socket(&me()).unwrap(), None);
        let _listener = UnixListener::bind(&path).unwrap();
        let found = agent_socket(&me()).unwrap().unwrap();
        assert!(
            found.ends_with(path.strip_prefix("/").unwrap()),
            "{found:?}"
        );
        assert!(std::os::unix::net::UnixStream::connect(&found).is_ok());
        // the other port is another one
        assert_eq!(read_socket(&me()).unwrap(), None);
        let path = dir.path().join(READ_PORT);
        let _listener = UnixListener::bind(&path).unwrap();
        assert!(read_socket(&me()).unwrap().unwrap().ends_with(READ_PORT));
    }

    #[test]
    fn lines_of_other_sockets_are_none() {
        let line = "0000000000000000: 00000002 00000000 00010000 0001 01 4711 /run/a b";
        assert_eq!(listener(line), Some((4711, "/run/a b".into())));
        assert_eq!(listener(&line.replace("00010000", "00000000")), None);
        assert_eq!(listener(&line.replace("/run", "@run")), None);
        assert_eq!(
            listener("Num RefCount Protocol Flags Type St Inode Path"),
            None
        );
        assert_eq!(inode_of(Path::new("socket:[12]")), Some(12));
        assert_eq!(inode_of(Path::new("/dev/null")), None);
    }
}
