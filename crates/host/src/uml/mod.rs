// SPDX-License-Identifier: Apache-2.0
//! User Mode Linux (UML) guests.
//!
//! How the host sees a guest (observed on Linux 7.2, with `seccomp=on` and with ptrace):
//!
//! - The main thread of the main process is the guest's kernel and, on a uniprocessor, its only vCPU.
//! - Every guest address space is a host process, a child of the main one, whose program is the memory file `uml-userspace`. It
//!   runs guest user code while the main thread waits, and the other way round: together they are vCPU 0.
//! - With `ncpus=` above 1 each further vCPU is a thread of the main process. Each creates its own timer; the timers identify
//!   these threads and their order. A guest address space belongs to the vCPU that created it: it inherits that thread's
//!   affinity and group, and keeps them when the guest moves the process to another vCPU.
//! - The main process has two more threads: one does the I/O of the `ubd` disks, the other only calls `epoll_wait` for
//!   descriptors that cannot signal. Only that wait tells them apart: both have the program's name, in no fixed order.
//! - With `vecN:transport=tap` the main thread itself reads and writes the tap.

pub mod console;

use std::path::{Path, PathBuf};

use crate::elf;
use crate::error::HostError;
use crate::netns::{ConfiguredNic, Interface};
use crate::paths::through_root;
use crate::proc::{self, Stat};
use crate::thread::{Thread, Tid};
use crate::vm::{Disk, NicKind, ServiceKind, ServiceThread, Vcpu, printable};

/// Name of a host process that carries a guest address space.
const STUB_NAME: &str = "uml-userspace";

/// Most host processes that are examined per guest.
const MAX_CHILDREN: usize = 100_000;

/// What a UML kernel's command line says of the VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct UmlArgs {
    pub(crate) umid: Option<String>,
    pub(crate) uml_dir: Option<String>,
    pub(crate) ncpus: Option<u32>,
    pub(crate) disks: Vec<Disk>,
    pub(crate) nics: Vec<ConfiguredNic>,
}

impl UmlArgs {
    /// Parses the arguments after the program's name; unknown ones are for the guest.
    pub(crate) fn parse(args: &[String]) -> Self {
        let mut found = Self::default();
        for arg in args {
            if let Some(umid) = arg.strip_prefix("umid=") {
                found.umid = Some(umid.to_owned());
            } else if let Some(dir) = arg.strip_prefix("uml_dir=") {
                found.uml_dir = Some(dir.to_owned());
            } else if let Some(n) = arg.strip_prefix("ncpus=") {
                found.ncpus = n.parse().ok();
            } else if let Some(disk) = arg.strip_prefix("ubd").and_then(parse_ubd) {
                found.disks.push(disk);
            } else if let Some(nic) = parse_vec(arg).or_else(|| parse_eth(arg)) {
                found.nics.push(nic);
            }
        }
        found
    }

    /// Whether the arguments justify examining the program.
    fn looks_like_uml(args: &[String]) -> bool {
        const HINTS: [&str; 8] = [
            "umid=",
            "uml_dir=",
            "ubd",
            "vec0:",
            "mem=",
            "root=",
            "rootfstype=",
            "init=",
        ];
        args.iter()
            .any(|arg| HINTS.iter().any(|hint| arg.starts_with(hint)))
    }
}

/// `ubd<unit><flags>=<file>[(,|:)<backing file>]`, the part after `ubd`. A unit is a number or a letter.
fn parse_ubd(rest: &str) -> Option<Disk> {
    let (unit_and_flags, files) = rest.split_once('=')?;
    let digits = unit_and_flags
        .bytes()
        .take_while(u8::is_ascii_digit)
        .count();
    let (unit, flags) = if digits > 0 {
        (
            unit_and_flags[..digits].parse::<u8>().ok()?,
            &unit_and_flags[digits..],
        )
    } else {
        let letter = unit_and_flags
            .bytes()
            .next()
            .filter(u8::is_ascii_lowercase)?;
        (letter - b'a', &unit_and_flags[1..])
    };
    if unit >= 26 || !flags.bytes().all(|f| f.is_ascii_lowercase()) {
        return None;
    }
    let (file, backing) = match files.find([',', ':']) {
        Some(at) => (&files[..at], true),
        None => (files, false),
    };
    Some(Disk {
        path: PathBuf::from(file),
        device: format!("ubd{}", char::from(b'a' + unit)),
        read_only: flags.contains('r'),
        format: backing.then(|| "cow".to_owned()),
    })
}

/// `vec<unit>:transport=<kind>,ifname=<name>,mac=<address>,...` where the interface is one of the host.
fn parse_vec(arg: &str) -> Option<ConfiguredNic> {
    let rest = arg
        .strip_prefix("vec")?
        .trim_start_matches(|c: char| c.is_ascii_digit());
    let options = rest.strip_prefix([':', '='])?;
    let option = |key: &str| {
        options
            .split(',')
            .find_map(|o| o.strip_prefix(key)?.strip_prefix('='))
    };
    let kind = match option("transport")? {
        "tap" | "hybrid" => NicKind::Tap,
        "raw" => NicKind::Raw,
        _ => return None,
    };
    Some(ConfiguredNic {
        interface: Interface::Name(printable(option("ifname")?)),
        kind,
        mac: option("mac").map(printable),
    })
}

/// `eth<unit>=tuntap,<name>[,<address>[,...]]`, the form of kernels before 6.13.
fn parse_eth(arg: &str) -> Option<ConfiguredNic> {
    let rest = arg
        .strip_prefix("eth")?
        .trim_start_matches(|c: char| c.is_ascii_digit());
    let mut parts = rest.strip_prefix("=tuntap,")?.split(',');
    Some(ConfiguredNic {
        interface: Interface::Name(printable(parts.next().filter(|n| !n.is_empty())?)),
        kind: NicKind::Tap,
        mac: parts.next().filter(|m| !m.is_empty()).map(printable),
    })
}

/// Whether the process runs a UML kernel: its arguments look so, and its program has sections that only the `um`
/// architecture creates. A shell or tracer with the same arguments has none.
pub(crate) fn is_uml(pid: Tid, args: &[String]) -> Result<bool, HostError> {
    if !UmlArgs::looks_like_uml(args.get(1..).unwrap_or_default()) {
        return Ok(false);
    }
    let exe = PathBuf::from(format!("/proc/{pid}/exe"));
    match elf::has_section(&exe, ".uml.") {
        Ok(found) => Ok(found),
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => Ok(false),
        Err(e) => Err(HostError::read(exe, e)),
    }
}

/// The guest's name: its umid.
///
/// A UML kernel whose umid is in use chooses a random one, and so does one without `umid=`. The pid file in its folder
/// (`<uml_dir>/<umid>/pid`, by default in `~/.uml`) shows which. Without that file the argument counts.
pub(crate) fn name(pid: Tid, args: &UmlArgs) -> Result<String, HostError> {
    let name = folder(pid, args)?
        .and_then(|f| f.file_name()?.to_str().map(str::to_owned))
        .or_else(|| args.umid.clone());
    Ok(name.map_or_else(|| format!("pid-{pid}"), |umid| printable(&umid)))
}

/// The guest's umid folder, with the socket of its console, as this program can open it; `None` when no folder names this
/// process.
pub(crate) fn folder(pid: Tid, args: &UmlArgs) -> Result<Option<PathBuf>, HostError> {
    let folder = match &args.uml_dir {
        Some(dir) => Some(through_root(pid, dir)),
        None => proc::environment(pid, "HOME")?.map(|home| through_root(pid, &home).join(".uml")),
    };
    let Some(folder) = folder else {
        return Ok(None);
    };
    let own = pid_in_its_namespace(pid)?;
    let is_mine = |umid: &Path| {
        std::fs::read_to_string(umid.join("pid")).is_ok_and(|text| is_pid_file_of(&text, own))
    };
    if let Some(umid) = args.umid.as_ref().map(|umid| folder.join(umid))
        && is_mine(&umid)
    {
        return Ok(Some(umid));
    }
    let entries = std::fs::read_dir(folder).ok();
    let mut entries = entries.into_iter().flatten().flatten();
    Ok(entries.find(|e| is_mine(&e.path())).map(|e| e.path()))
}

/// Whether a pid file names this process. UML writes at most six characters of the number.
fn is_pid_file_of(text: &str, pid: Tid) -> bool {
    let (text, pid) = (text.trim(), pid.to_string());
    text == pid || (text.len() == 6 && pid.starts_with(text))
}

fn pid_in_its_namespace(pid: Tid) -> Result<Tid, HostError> {
    Ok(proc::inner_tid(pid)?.unwrap_or(pid))
}

/// The present threads of a guest with `ncpus` vCPUs. `before` is the service list of the last
/// call: a thread that once was in epoll_wait counts as a helper from then on. Returns fewer vCPUs
/// while some are not up, or where the kernel does not show the timers.
pub(crate) fn threads(
    pid: Tid,
    ncpus: u32,
    before: &[ServiceThread],
) -> Result<(Vec<Vcpu>, Vec<ServiceThread>), HostError> {
    let kernel = kernel_threads(pid, ncpus)?;
    let mut vcpus: Vec<Vcpu> = Vec::new();
    let mut service = Vec::new();
    for (thread, _) in proc::threads(pid)? {
        if let Some(index) = kernel.iter().position(|tid| *tid == thread.tid) {
            vcpus.push(Vcpu {
                index: index as u32,
                threads: vec![thread],
                kernel_thread: Some(thread.tid),
                cores: proc::affinity(thread.tid)?.unwrap_or_default(),
            });
            continue;
        }
        let was_helper = before.contains(&ServiceThread {
            thread,
            kind: ServiceKind::Helper,
        });
        let kind = if was_helper || waits_in_epoll(thread.tid)? {
            ServiceKind::Helper
        } else {
            ServiceKind::Iothread
        };
        service.push(ServiceThread { thread, kind });
    }
    vcpus.sort_by_key(|vcpu| vcpu.index);
    let mut children = proc::children_by_thread(pid)?;
    let mut seen = 0;
    while let Some(&(maker, child)) = children.get(seen).filter(|_| seen < MAX_CHILDREN) {
        seen += 1;
        let Some(stat) = proc::stat(child)?.filter(|s| !s.is_dead()) else {
            continue;
        };
        let thread = Thread {
            pid: child,
            tid: child,
            start_time: stat.start_time,
        };
        if is_stub(pid, &stat)? {
            // Its seccomp filter or tracer keeps it from creating processes.
            let of = vcpus.iter().position(|v| v.kernel_thread == Some(maker));
            if let Some(vcpu) = vcpus.get_mut(of.unwrap_or(0)) {
                vcpu.threads.push(thread);
            }
        } else {
            let kind = ServiceKind::Helper;
            service.push(ServiceThread { thread, kind });
            let more = proc::children_by_thread(child)?;
            children.extend(more.into_iter().filter(|(_, c)| *c != pid));
        }
    }
    Ok((vcpus, service))
}

/// The guest's kernel threads by vCPU: the main thread, and those with a timer of their own.
fn kernel_threads(pid: Tid, ncpus: u32) -> Result<Vec<Tid>, HostError> {
    let mut threads = vec![pid];
    if ncpus > 1 {
        let others = proc::timer_threads(pid)?;
        threads.extend(others.into_iter().filter(|tid| *tid != pid));
        threads.truncate(ncpus as usize);
    }
    Ok(threads)
}

/// Whether a child process carries guest user code: it runs UML's stub program or (on older kernels always) still the UML
/// kernel itself. Terminals and network tools that UML starts do neither.
fn is_stub(main: Tid, child: &Stat) -> Result<bool, HostError> {
    Ok(child.comm == STUB_NAME || proc::exe(child.tid)? == proc::exe(main)?)
}

fn waits_in_epoll(tid: Tid) -> Result<bool, HostError> {
    // Reading it needs the right to trace the guest. Without it the thread counts as the disk
    // helper.
    let wchan = match proc::wchan(tid) {
        Err(HostError::Read { .. }) => None,
        other => other?,
    };
    Ok(wchan.is_some_and(|w| w.contains("epoll") || w.starts_with("ep_")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn args(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn reads_the_command_line_of_a_guest() {
        let line = "umid=probe1 uml_dir=/run/lab mem=128M root=/dev/ubda ro ubd0=/a/disk.img ubd1r=b.img \
vec0:transport=tap,ifname=vt0,depth=128,gro=1,mac=52:54:00:00:00:01 con=null con0=fd:0,fd:1 seccomp=on";
        let parsed = UmlArgs::parse(&args(line));
        assert_eq!(parsed.umid.as_deref(), Some("probe1"));
        assert_eq!(parsed.uml_dir.as_deref(), Some("/run/lab"));
        let disks: Vec<_> = parsed
            .disks
            .iter()
            .map(|d| (d.device.as_str(), d.path.to_str().unwrap(), d.read_only))
            .collect();
        assert_eq!(
            disks,
            [("ubda", "/a/disk.img", false), ("ubdb", "b.img", true)]
        );
        assert_eq!(parsed.nics.len(), 1);
        assert_eq!(parsed.nics[0].interface, Interface::Name("vt0".into()));
        assert_eq!(parsed.nics[0].mac.as_deref(), Some("52:54:00:00:00:01"));
    }

    #[test]
    fn all_forms_of_ubd_are_parsed() {
        let disk = |text: &str| parse_ubd(text.strip_prefix("ubd").unwrap());
        let cow = disk("ubdarc=cow:back").unwrap();
        assert_eq!((cow.device.as_str(), cow.read_only), ("ubda", true));
        assert_eq!(
            (cow.path.to_str().unwrap(), cow.format.as_deref()),
            ("cow", Some("cow"))
        );
        assert_eq!(disk("ubd11=x").unwrap().device, "ubdl");
        for text in [
            "ubd", "ubd=sync", "ubd0", "ubd0R=x", "ubd300=x", "ubd26=x", "ubdé=x",
        ] {
            assert_eq!(disk(text), None, "{text}");
        }
    }

    #[test]
    fn only_nics_on_host_interfaces_are_listed() {
        let nics = UmlArgs::parse(&args(
            "vec1:transport=raw,ifname=veth0 vec2:transport=l2tpv3,src=::1 vec3:ifname=x eth0=tuntap,t0,,1.2.3.4 \
eth1=daemon vec4:transport=tap",
        ))
        .nics;
        assert_eq!(nics.len(), 2);
        assert_eq!((nics[0].kind, nics[1].kind), (NicKind::Raw, NicKind::Tap));
        assert_eq!(nics[1].interface, Interface::Name("t0".into()));
        assert_eq!(nics[1].mac, None);
    }

    #[test]
    fn a_pid_file_cut_to_six_characters_still_names_its_process() {
        assert!(is_pid_file_of("7820\n", 7820));
        assert!(!is_pid_file_of("782\n", 7820));
        assert!(is_pid_file_of("123456", 1_234_567));
        assert!(!is_pid_file_of("123456", 1_234_067));
        assert!(!is_pid_file_of("", 7820));
    }

    #[test]
    fn a_program_with_the_arguments_of_a_guest_is_no_guest() {
        let me = std::process::id();
        assert!(!is_uml(me, &args("sh umid=x ubd0=y")).unwrap());
        assert!(!UmlArgs::looks_like_uml(&args("-c true")));
    }

    proptest! {
        #[test]
        fn any_arguments_parse_without_a_panic(
            args in proptest::collection::vec("(ubd|vec|eth|umid=|ncpus=)?[0-9a-z=:,é]{0,20}", 0..5),
        ) {
            let _ = UmlArgs::parse(&args);
        }

        #[test]
        fn a_ubd_argument_of_any_form_names_a_file_or_nothing(text in "\\PC{0,30}") {
            let _ = parse_ubd(&text);
            let _ = parse_vec(&text);
            let _ = parse_eth(&text);
        }
    }
}
