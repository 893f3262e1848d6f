// SPDX-License-Identifier: Apache-2.0
//! The processes of a daemon with all accelerators in use are what the page on threats says (docs/src/threats.md).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use viola_host::proc;

use crate::common::{Daemon, network_sockets, output, viola, write_config};
use crate::rig::{Web, WebSpec, guest_permit, vm, wait_until_served};

const PAGE: &str = include_str!("../../../../docs/src/threats.md");
/// Port of the worker for other hosts, on the loopback interface.
const PORT: u16 = 7671;

/// A row of the page's first table on processes.
struct Row<'a> {
    user: &'a str,
    capabilities: &'a str,
    namespaces: &'a str,
    system_calls: &'a str,
}

/// The table with this head, by the first cell.
fn table<'a>(head: &str) -> BTreeMap<&'a str, Vec<&'a str>> {
    let rows = PAGE
        .lines()
        .skip_while(|line| !line.starts_with(head))
        .skip(2);
    let rows = rows.take_while(|line| line.starts_with('|'));
    let cells = |line: &'a str| {
        line.trim_matches('|')
            .split('|')
            .map(str::trim)
            .collect::<Vec<_>>()
    };
    let table: BTreeMap<_, _> = rows.map(cells).map(|cells| (cells[0], cells)).collect();
    assert!(
        !table.is_empty(),
        "the page has no table with the head {head}"
    );
    table
}

fn rows() -> BTreeMap<&'static str, Row<'static>> {
    let rows = table("| process | user |").into_iter();
    rows.map(|(name, cells)| {
        let row = Row {
            user: cells[1],
            capabilities: cells[2],
            namespaces: cells[3],
            system_calls: cells[4],
        };
        (name, row)
    })
    .collect()
}

/// The name of a process on the page.
fn name_of(pid: u32, has_pipe: bool) -> &'static str {
    let args = proc::cmdline(pid).unwrap().unwrap_or_default().join(" ");
    let is = |what: &str| args.contains(what);
    match () {
        () if is("worker agent") && has_pipe => "vpipe worker",
        () if is("worker agent") => "agent's worker",
        () if is("worker reader") => "reader's worker",
        () if is("worker peer") => "peer worker",
        () if is("slots-watchdog") || is("slots-controller") => "watchdog, controller",
        () if is("viola run") || is(" run ") => "daemon (`viola run`)",
        () => panic!("process {pid} is not on the page: {args}"),
    }
}

fn status(pid: u32, key: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix(key)?.strip_prefix(":\t"));
    line.unwrap_or_else(|| panic!("{key}: {status}")).to_owned()
}

fn capabilities(pid: u32) -> u64 {
    let [effective, permitted] =
        ["CapEff", "CapPrm"].map(|key| u64::from_str_radix(&status(pid, key), 16).unwrap());
    assert_eq!(effective, permitted);
    assert_eq!(status(pid, "CapInh"), "0000000000000000");
    effective
}

/// The set of these names (include/uapi/linux/capability.h).
fn set_of(names: &str) -> u64 {
    let names = names
        .split(',')
        .map(str::trim)
        .filter(|n| n.starts_with("CAP_"));
    names.fold(0, |set, name| {
        set | match name {
            "CAP_NET_BIND_SERVICE" => 1 << 10,
            "CAP_NET_ADMIN" => 1 << 12,
            other => panic!("{other}"),
        }
    })
}

/// Compares a process with its row.
fn compare(pid: u32, daemon: u32, name: &str, row: &Row<'_>) {
    let what = format!("{name}, process {pid}");
    let user = proc::users(pid).unwrap();
    assert_eq!(
        user.iter().collect::<BTreeSet<_>>().len(),
        1,
        "{what}: {user:?}"
    );
    match row.user {
        "root" => assert_eq!(user[0], 0, "{what}"),
        "its own number" => assert!(user[0] >= 100_000 && user[0] != 65_534, "{what}: {user:?}"),
        other => panic!("{other}"),
    }
    let wanted = match row.capabilities {
        "none" => 0,
        names if names.starts_with("CAP_") => set_of(names),
        // Without the unit the daemon has all.
        _ => capabilities(daemon),
    };
    assert_eq!(capabilities(pid), wanted, "{what}");
    let same = |space: &str| {
        let of = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/{space}")).unwrap();
        of(pid) == of(daemon)
    };
    assert_eq!(
        same("net"),
        !row.namespaces.starts_with("network: "),
        "{what}"
    );
    for space in ["mnt", "pid", "ipc", "user"] {
        assert!(same(space), "{what}: {space}");
    }
    // Without the unit only the workers' own lists are in force.
    let is_worker = row.system_calls != "unit" && row.user != "root";
    assert_eq!(
        status(pid, "Seccomp"),
        if is_worker { "2" } else { "0" },
        "{what}"
    );
    assert_eq!(
        status(pid, "NoNewPrivs"),
        if is_worker { "1" } else { "0" },
        "{what}"
    );
}

/// The files that a worker has open, without those of `/run` of this daemon.
fn files(pid: u32, run: &Path) -> Vec<String> {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let targets = open.filter_map(|fd| fs::read_link(fd.path()).ok());
    let files = targets.filter(|t| t.is_absolute() && !t.starts_with(run));
    files.map(|t| t.to_string_lossy().into_owned()).collect()
}

/// Whether a process of this user may read the memory map of another (or itself, `self`), which takes what tracing it takes
/// (`PTRACE_MODE_READ`, ptrace(2)).
fn maps_are_readable(process: &str, user: u32) -> bool {
    let read = Command::new("cat")
        .arg(format!("/proc/{process}/maps"))
        .uid(user)
        .gid(user)
        .output()
        .unwrap();
    assert!(
        read.status.success() || String::from_utf8_lossy(&read.stderr).contains("denied"),
        "{read:?}"
    );
    read.status.success()
}

#[test]
fn each_process_is_what_the_page_on_threats_says() {
    // The only daemon with slots: the VM of another test on this core would be late.
    let _permits = [guest_permit(), guest_permit()];
    let name = "pi-proc";
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let d = dir.path().display().to_string();
    let keys = format!("[vread]\nkey = \"{d}/host.key\"\ncertificate = \"{d}/host.crt\"\n");
    let config = write_config(dir.path(), &keys);
    let config = config.to_str().unwrap();
    let made = output(&["keys", "init", "--host", "a", "--config", config]);
    assert!(made.status.success(), "{made:?}");
    let shown = output(&["keys", "show", "--config", config]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    let fingerprint = shown
        .lines()
        .next()
        .unwrap()
        .strip_prefix("fingerprint ")
        .unwrap();
    write_config(
        dir.path(),
        &format!(
            "[slices]\ncores = \"1\"\n{keys}listen = \"127.0.0.1:{PORT}\"\n\
             allow = [{{ reader = \"{name}-rd\", datanode = \"uml:{name}-web\" }}, \
             {{ host = \"b\", datanode = \"uml:{name}-web\" }}]\n\
             [[vread.peer]]\nname = \"b\"\naddress = \"127.0.0.1:1\"\nfingerprint = \"{fingerprint}\"\n\
             {}",
            vm(name).replacen("[vm.pipe]", "class = \"ls\"\n[vm.pipe]", 1)
        ),
    );
    let path = dir.path().join("viola.toml");
    let mut daemon = Daemon::spawn(dir, viola().args(["run", "-c"]).arg(path));
    let web = Web::boot(&WebSpec {
        name,
        ..WebSpec::default()
    });
    wait_until_served(&mut daemon, 1);
    let root = daemon.pid();
    let all = |of: u32| -> Vec<u32> {
        let mut found = proc::children(of).unwrap();
        let below: Vec<u32> = found
            .iter()
            .flat_map(|p| proc::children(*p).unwrap())
            .collect();
        found.extend(below);
        found
    };
    let expected: BTreeSet<&str> = [
        "watchdog, controller",
        "vpipe worker",
        "reader's worker",
        "peer worker",
    ]
    .into();
    daemon.wait("all processes", |d| {
        let names: BTreeSet<&str> = all(d.pid()).into_iter().map(|p| name_of(p, true)).collect();
        names == expected
    });
    let rows = rows();
    compare(
        root,
        root,
        "daemon (`viola run`)",
        &rows["daemon (`viola run`)"],
    );
    let mut users = BTreeSet::new();
    for pid in all(root) {
        let name = name_of(pid, true);
        compare(pid, root, name, &rows[name]);
        if name == "peer worker" {
            let port = format!(":{PORT:04X} ");
            let sockets = network_sockets(pid);
            assert!(sockets.iter().any(|s| s.contains(&port)), "{sockets:?}");
        } else if !rows[name].namespaces.starts_with("network: ") {
            assert_eq!(network_sockets(pid), [""; 0], "{name}, process {pid}");
        }
        if name.ends_with("worker") {
            let user = proc::users(pid).unwrap()[0];
            assert!(users.insert(user), "two workers of one user");
            // A process may look at itself, but not even one of the same user at a worker.
            assert!(maps_are_readable("self", user));
            assert!(!maps_are_readable(&pid.to_string(), user), "{name}");
        }
    }

    // No worker has a file open but those of its VM.
    let disk = web.folder.path().join("d.img");
    for pid in all(root) {
        let name = name_of(pid, true);
        if !name.ends_with("worker") {
            continue;
        }
        for file in files(pid, &daemon.run_dir()) {
            let is_vms = name == "vpipe worker"
                && (Path::new(&file) == disk
                    || file.starts_with("/proc/")
                    || file.ends_with("cgroup.events"));
            let is_memory = file.starts_with("/memfd:") || file == "/dev/null";
            let is_journal = Path::new(&file) == daemon.dir.path().join("log");
            assert!(is_vms || is_memory || is_journal, "{name} has {file} open");
        }
    }
    let folder = fs::metadata(daemon.run_dir().join("vread")).unwrap();
    assert_eq!((folder.uid(), folder.mode() & 0o777), (0, 0o700));
    let socket = daemon.run_dir().join(format!("mounts/{name}-rd.sock"));
    assert_eq!(fs::metadata(socket).unwrap().mode() & 0o777, 0o600);

    // The page describes each of them.
    let descriptors = table("| process | descriptors |");
    for name in expected {
        assert!(descriptors.contains_key(name), "{name}");
    }
}
