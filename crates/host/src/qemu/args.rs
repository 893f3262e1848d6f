// SPDX-License-Identifier: Apache-2.0
//! The parts of QEMU's command line that name a VM, its monitor sockets, disks and NICs.
//!
//! QMP does not report NICs and sockets; disks come from here while the QMP socket is busy. Devices may have changed since the
//! start, so QMP's answer takes precedence.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use super::options::{Options, get, is_on, options};
use crate::netns::{ConfiguredNic, Interface};
use crate::proc::TapFd;
use crate::vm::{Disk, NicKind, printable};

/// Most steps from a format node to the file below it.
const MAX_CHAIN_STEPS: usize = 16;

/// The host's end of a character device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Chardev {
    /// QEMU created the socket at this path.
    Path(String),
    /// QEMU was given a listening socket, as libvirt does.
    Fd(u32),
}

/// What the command line says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct QemuArgs {
    /// `-name guest=`.
    pub(crate) name: Option<String>,
    /// `-uuid`, in lower case.
    pub(crate) uuid: Option<String>,
    /// Unix sockets of QMP monitors, in the order given.
    pub(crate) qmp: Vec<String>,
    /// Disks with a file behind them.
    pub(crate) disks: Vec<Disk>,
    netdevs: Vec<Options>,
    /// MAC addresses by netdev.
    macs: BTreeMap<String, String>,
}

impl QemuArgs {
    /// Parses the arguments after the program's name.
    pub(crate) fn parse(args: &[String]) -> Self {
        let mut found = Self::default();
        let mut chardevs: BTreeMap<String, String> = BTreeMap::new();
        let mut monitors: Vec<String> = Vec::new();
        let mut nodes: Vec<Options> = Vec::new();
        let mut devices: Vec<Options> = Vec::new();
        let mut drives = 0;
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let Some(option) = arg.strip_prefix("--").or_else(|| arg.strip_prefix('-')) else {
                continue;
            };
            if !KNOWN_OPTIONS.contains(&option) {
                continue;
            }
            let Some(value) = args.next() else {
                break;
            };
            match option {
                "name" => {
                    let name = options(value, "guest");
                    found.name = get(&name, "guest").map(printable).or(found.name);
                }
                "uuid" => found.uuid = Some(printable(&value.to_ascii_lowercase())),
                "qmp" | "qmp-pretty" => match value.strip_prefix("chardev:") {
                    Some(id) => monitors.push(id.to_owned()),
                    None => found.qmp.extend(compat_socket(value)),
                },
                "chardev" => {
                    let chardev = options(value, "backend");
                    if get(&chardev, "backend") == Some("socket")
                        && let (Some(id), Some(path)) = (get(&chardev, "id"), get(&chardev, "path"))
                    {
                        chardevs.insert(id.to_owned(), path.to_owned());
                    }
                }
                "mon" => {
                    let mon = options(value, "chardev");
                    if get(&mon, "mode") == Some("control") {
                        monitors.extend(get(&mon, "chardev").map(str::to_owned));
                    }
                }
                "drive" => {
                    found.disks.extend(drive(&options(value, "file"), drives));
                    drives += 1;
                }
                "blockdev" => nodes.push(options(value, "driver")),
                "hda" | "hdb" | "hdc" | "hdd" => found.disks.push(Disk {
                    path: PathBuf::from(value),
                    device: option.to_owned(),
                    read_only: false,
                    format: None,
                }),
                "cdrom" => found.disks.push(Disk {
                    path: PathBuf::from(value),
                    device: "cdrom".to_owned(),
                    read_only: true,
                    format: None,
                }),
                "device" => devices.push(options(value, "driver")),
                "netdev" | "nic" | "net" => found.netdevs.push(options(value, "type")),
                _ => {}
            }
        }
        found
            .qmp
            .extend(monitors.iter().filter_map(|id| chardevs.get(id).cloned()));
        found.disks.extend(blockdevs(&nodes, &devices));
        for device in &devices {
            if let (Some(netdev), Some(mac)) = (get(device, "netdev"), get(device, "mac")) {
                found.macs.insert(netdev.to_owned(), printable(mac));
            }
        }
        found
    }

    /// The host's end of the virtio-serial port of this name.
    pub(crate) fn port_chardev(args: &[String], name: &str) -> Option<Chardev> {
        let values = |wanted: &'static str| {
            let pairs = args.iter().zip(args.iter().skip(1));
            pairs
                .filter(move |(option, _)| option.trim_start_matches('-') == wanted)
                .map(|(_, value)| value)
        };
        let is_port = |device: &Options| {
            get(device, "driver") == Some("virtserialport") && get(device, "name") == Some(name)
        };
        let port = values("device")
            .map(|v| options(v, "driver"))
            .find(is_port)?;
        let id = get(&port, "chardev")?;
        let chardev = values("chardev")
            .map(|v| options(v, "backend"))
            .find(|c| get(c, "id") == Some(id) && get(c, "backend") == Some("socket"))?;
        match (get(&chardev, "path"), get(&chardev, "fd")) {
            (Some(path), _) => Some(Chardev::Path(path.to_owned())),
            (None, Some(fd)) => fd.parse().ok().map(Chardev::Fd),
            (None, None) => None,
        }
    }

    /// NICs of the command line and of the process's open taps. A tap that was plugged in later has no MAC address here.
    pub(crate) fn nics(&self, open: &[TapFd]) -> Vec<ConfiguredNic> {
        let mut found: Vec<ConfiguredNic> = Vec::new();
        for netdev in &self.netdevs {
            let mac = get(netdev, "id")
                .and_then(|id| self.macs.get(id).cloned())
                .or_else(|| get(netdev, "mac").or(get(netdev, "macaddr")).map(printable));
            for (interface, kind) in taps_of(netdev, open) {
                // A tap with several queues has one descriptor for each.
                if !found.iter().any(|n| n.interface == interface) {
                    found.push(ConfiguredNic {
                        interface,
                        kind,
                        mac: mac.clone(),
                    });
                }
            }
        }
        for (interface, kind) in open.iter().map(interface_of) {
            if !found.iter().any(|n| n.interface == interface) {
                found.push(ConfiguredNic {
                    interface,
                    kind,
                    mac: None,
                });
            }
        }
        found
    }
}

/// The options that this module reads; each takes one value.
const KNOWN_OPTIONS: [&str; 17] = [
    "name",
    "uuid",
    "qmp",
    "qmp-pretty",
    "chardev",
    "mon",
    "drive",
    "blockdev",
    "hda",
    "hdb",
    "hdc",
    "hdd",
    "cdrom",
    "device",
    "netdev",
    "nic",
    "net",
];

/// `unix:PATH,server,nowait` of `-qmp`.
fn compat_socket(value: &str) -> Option<String> {
    let parsed = options(value.strip_prefix("unix:")?, "path");
    get(&parsed, "path")
        .filter(|p| !p.is_empty())
        .map(str::to_owned)
}

fn drive(drive: &Options, index: usize) -> Option<Disk> {
    let interface = get(drive, "if").unwrap_or("");
    let file = get(drive, "file").or(get(drive, "file.filename"))?;
    if file.is_empty() || interface == "pflash" {
        return None;
    }
    Some(Disk {
        path: PathBuf::from(file.strip_prefix("file:").unwrap_or(file)),
        device: match get(drive, "id") {
            Some(id) => printable(id),
            None => printable(&format!("{interface}drive{index}")),
        },
        read_only: is_on(drive, "readonly")
            || is_on(drive, "read-only")
            || get(drive, "media") == Some("cdrom"),
        format: get(drive, "format").or(get(drive, "driver")).map(printable),
    })
}

/// The top nodes of `-blockdev`, each with the file at the bottom of its chain.
fn blockdevs(nodes: &[Options], devices: &[Options]) -> Vec<Disk> {
    let by_name: BTreeMap<&str, &Options> = nodes
        .iter()
        .filter_map(|n| Some((get(n, "node-name")?, n)))
        .collect();
    let below: BTreeSet<&str> = nodes
        .iter()
        .flat_map(|n| [get(n, "file"), get(n, "backing")])
        .flatten()
        .collect();
    let mut disks = Vec::new();
    for (&name, &top) in by_name.iter().filter(|(name, _)| !below.contains(*name)) {
        let user = devices.iter().find(|d| get(d, "drive") == Some(name));
        // Firmware has nodes too, but no device.
        if user.is_none() && name.contains("pflash") {
            continue;
        }
        let mut node = top;
        for _ in 0..MAX_CHAIN_STEPS {
            let Some(lower) = get(node, "file").and_then(|f| by_name.get(f)) else {
                break;
            };
            node = lower;
        }
        let Some(path) = get(node, "filename").or(get(node, "file.filename")) else {
            continue;
        };
        let driver = get(top, "driver").filter(|d| !matches!(*d, "file" | "host_device"));
        disks.push(Disk {
            path: PathBuf::from(path),
            device: user
                .and_then(|d| get(d, "id"))
                .map_or_else(|| printable(name), printable),
            read_only: is_on(top, "read-only"),
            format: Some(printable(driver.unwrap_or("raw"))),
        });
    }
    disks
}

fn interface_of(tap: &TapFd) -> (Interface, NicKind) {
    match tap {
        TapFd::Tap { name, .. } => (Interface::Name(name.clone()), NicKind::Tap),
        TapFd::Macvtap { ifindex, .. } => (Interface::Index(*ifindex), NicKind::Macvtap),
    }
}

fn taps_of(netdev: &Options, open: &[TapFd]) -> Vec<(Interface, NicKind)> {
    if get(netdev, "type") != Some("tap") {
        return Vec::new();
    }
    if let Some(name) = get(netdev, "ifname") {
        return vec![(Interface::Name(printable(name)), NicKind::Tap)];
    }
    let fds: Vec<u32> = [get(netdev, "fd"), get(netdev, "fds")]
        .into_iter()
        .flatten()
        .flat_map(|list| list.split(':'))
        .filter_map(|n| n.parse().ok())
        .collect();
    open.iter()
        .filter(|tap| {
            let (TapFd::Tap { fd, .. } | TapFd::Macvtap { fd, .. }) = tap;
            fds.contains(fd)
        })
        .map(interface_of)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(args: &[&str]) -> QemuArgs {
        QemuArgs::parse(&args.iter().map(|&a| a.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn a_port_is_found_by_its_name() {
        let find = |line: &str| {
            let args: Vec<String> = line.split(' ').map(str::to_owned).collect();
            QemuArgs::port_chardev(&args, "org.viola.agent.0")
        };
        assert_eq!(
            find(
                "-chardev socket,id=c0,path=/run/a,server=on,wait=off -device virtserialport,bus=b.0,chardev=c0,name=org.viola.agent.0"
            ),
            Some(Chardev::Path("/run/a".into()))
        );
        assert_eq!(
            find(
                "-device {\"driver\":\"virtserialport\",\"chardev\":\"c1\",\"name\":\"org.viola.agent.0\"} -chardev socket,id=c1,fd=33,server=on"
            ),
            Some(Chardev::Fd(33))
        );
        assert_eq!(
            find(
                "-chardev socket,id=c0,path=/a -device virtserialport,chardev=c0,name=org.qemu.guest_agent.0"
            ),
            None
        );
        assert_eq!(
            find("-device virtserialport,chardev=c0,name=org.viola.agent.0"),
            None
        );
        assert_eq!(find("-device"), None);
    }

    #[test]
    fn a_name_is_taken_with_and_without_its_key() {
        assert_eq!(
            parse(&["-name", "guest=probe,debug-threads=on"])
                .name
                .unwrap(),
            "probe"
        );
        assert_eq!(parse(&["--name", "a b"]).name.unwrap(), "a b");
        assert_eq!(parse(&["-name", "debug-threads=on"]).name, None);
        assert_eq!(parse(&["-name"]).name, None);
    }

    #[test]
    fn monitor_sockets_come_from_qmp_and_from_mon() {
        let args = parse(&[
            "-chardev",
            "socket,id=qmp,path=/run/a.qmp,server=on,wait=off",
            "-mon",
            "chardev=qmp,mode=control",
            "-chardev",
            "socket,id=hmp,path=/run/a.hmp,server=on",
            "-mon",
            "chardev=hmp,mode=readline",
            "-qmp",
            "unix:/run/b,,1.qmp,server,nowait",
            "-qmp",
            "tcp:localhost:4444,server",
            "-qmp",
            "chardev:hmp",
        ]);
        assert_eq!(args.qmp, ["/run/b,1.qmp", "/run/a.qmp", "/run/a.hmp"]);
    }

    #[test]
    fn libvirts_disks_are_followed_to_their_file() {
        let args = parse(&[
            "-blockdev",
            r#"{"driver":"file","filename":"/usr/share/OVMF.fd","node-name":"libvirt-pflash0-storage"}"#,
            "-blockdev",
            r#"{"driver":"file","filename":"/img/base.qcow2","node-name":"libvirt-2-storage"}"#,
            "-blockdev",
            r#"{"node-name":"libvirt-2-format","read-only":true,"driver":"qcow2","file":"libvirt-2-storage","backing":null}"#,
            "-blockdev",
            r#"{"driver":"file","filename":"/img/web.qcow2","node-name":"libvirt-1-storage"}"#,
            "-blockdev",
            r#"{"node-name":"libvirt-1-format","read-only":false,"driver":"qcow2","file":"libvirt-1-storage","backing":"libvirt-2-format"}"#,
            "-device",
            r#"{"driver":"virtio-blk-pci","drive":"libvirt-1-format","id":"virtio-disk0"}"#,
        ]);
        assert_eq!(
            args.disks,
            [Disk {
                path: "/img/web.qcow2".into(),
                device: "virtio-disk0".into(),
                read_only: false,
                format: Some("qcow2".into()),
            }]
        );
    }

    #[test]
    fn disks_of_drive_and_of_the_old_options_are_found() {
        let args = parse(&[
            "-drive",
            "file=/a,,b.img,format=raw,if=none,id=d0,readonly=on",
            "-drive",
            "if=pflash,file=/fw",
            "-hda",
            "/c.img",
            "-cdrom",
            "/d.iso",
        ]);
        let seen: Vec<_> = args
            .disks
            .iter()
            .map(|d| (d.path.to_str().unwrap(), d.device.as_str(), d.read_only))
            .collect();
        assert_eq!(
            seen,
            [
                ("/a,b.img", "d0", true),
                ("/c.img", "hda", false),
                ("/d.iso", "cdrom", true)
            ]
        );
    }

    #[test]
    fn a_circular_block_chain_ends() {
        let args = parse(&[
            "-blockdev",
            "raw,node-name=a,file=b",
            "-blockdev",
            "raw,node-name=b,file=a",
        ]);
        assert_eq!(args.disks, []);
    }

    #[test]
    fn nics_are_named_by_argument_or_by_descriptor() {
        let args = parse(&[
            "-netdev",
            "tap,id=n0,ifname=tap7,script=no",
            "-device",
            "virtio-net-pci,netdev=n0,mac=52:54:00:00:00:07",
            "-netdev",
            r#"{"type":"tap","fds":"33:34","vhost":true,"id":"hostnet1"}"#,
            "-device",
            r#"{"driver":"virtio-net-pci","netdev":"hostnet1","mac":"52:54:00:00:00:08"}"#,
            "-netdev",
            "user,id=u",
            "-nic",
            "tap,ifname=tap9,mac=52:54:00:00:00:09",
        ]);
        let name = |n: &str| n.to_owned();
        let open = [
            TapFd::Tap {
                fd: 20,
                name: name("tap7"),
            },
            TapFd::Tap {
                fd: 33,
                name: name("vnet3"),
            },
            TapFd::Tap {
                fd: 34,
                name: name("vnet3"),
            },
            TapFd::Macvtap {
                fd: 40,
                ifindex: 12,
            },
        ];
        let nics = args.nics(&open);
        let seen: Vec<_> = nics
            .iter()
            .map(|n| (&n.interface, n.mac.as_deref()))
            .collect();
        assert_eq!(
            seen,
            [
                (&Interface::Name(name("tap7")), Some("52:54:00:00:00:07")),
                (&Interface::Name(name("vnet3")), Some("52:54:00:00:00:08")),
                (&Interface::Name(name("tap9")), Some("52:54:00:00:00:09")),
                (&Interface::Index(12), None),
            ]
        );
        assert_eq!(nics[3].kind, NicKind::Macvtap);
    }

    proptest! {
        #[test]
        fn any_command_line_parses_without_a_panic(
            args in proptest::collection::vec(
                "(-{0,2}(name|qmp|chardev|mon|drive|blockdev|device|netdev|nic|hda))|\
                 (\\{?[a-z\",=:.{}é\\[\\]0-9]{0,40})|(\\PC{0,20})", 0..12),
        ) {
            let parsed = QemuArgs::parse(&args);
            let _ = parsed.nics(&[TapFd::Macvtap { fd: 1, ifindex: 1 }]);
        }

    }
}
