// SPDX-License-Identifier: Apache-2.0
//! What runs in this VM that the host could serve: DataNodes, HDFS clients, and servers that send files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::hdfs_client::{self, Client, Source};
use crate::io::passwd;

/// The main classes of a DataNode.
const DATANODES: [&str; 2] = [
    "org.apache.hadoop.hdfs.server.datanode.DataNode",
    "org.apache.hadoop.hdfs.server.datanode.SecureDataNodeStarter",
];
/// The file that a DataNode locks in each of its data directories.
const LOCK: &str = "in_use.lock";
/// Deepest folder of a server's configuration.
const MAX_DEPTH: usize = 4;
/// Largest file of a server's configuration, bytes.
const MAX_BYTES: u64 = 1 << 20;

/// A server whose files or connections the host can move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ServerKind {
    /// nginx.
    Nginx,
    /// Apache's httpd.
    Apache,
    /// lighttpd.
    Lighttpd,
    /// haproxy.
    Haproxy,
}

impl ServerKind {
    /// The kind of a program, by its name in /proc.
    fn of(program: &str) -> Option<Self> {
        match program {
            "nginx" => Some(Self::Nginx),
            "apache2" | "httpd" => Some(Self::Apache),
            "lighttpd" => Some(Self::Lighttpd),
            "haproxy" => Some(Self::Haproxy),
            _ => None,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nginx => "nginx",
            Self::Apache => "Apache",
            Self::Lighttpd => "lighttpd",
            Self::Haproxy => "haproxy",
        }
    }

    /// Where its configuration is, and the directive that names a folder of files.
    fn configuration(self) -> (&'static [&'static str], &'static str) {
        match self {
            Self::Nginx => (&["nginx"], "root"),
            Self::Apache => (&["apache2", "httpd"], "DocumentRoot"),
            Self::Lighttpd => (&["lighttpd"], "server.document-root"),
            Self::Haproxy => (&[], ""),
        }
    }
}

/// The processes of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// Which one.
    pub kind: ServerKind,
    /// Its unit of systemd; `None` if systemd has not started it.
    pub unit: Option<String>,
    /// Users of its processes, by name where they have one.
    pub users: BTreeSet<String>,
    /// Folders from which it sends files.
    pub folders: BTreeSet<PathBuf>,
    /// What else is preloaded into it, of its first process.
    pub preload: Option<String>,
    /// A process of it.
    pub pid: u32,
}

/// What was found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// Data directories of DataNodes.
    pub data: BTreeSet<PathBuf>,
    /// Servers.
    pub servers: Vec<Server>,
    /// HDFS clients.
    pub clients: Vec<Client>,
    /// How the host gives blocks of DataNodes to this VM, if it does.
    pub blocks: Option<Source>,
    /// Where they are mounted already.
    pub mounted_at: Option<PathBuf>,
}

/// Looks at the processes and the configuration below `root`, which is `/` but for tests.
///
/// # Errors
/// `/proc` cannot be listed.
pub fn find(root: &Path) -> std::io::Result<Found> {
    let (proc, etc) = (&root.join("proc"), &root.join("etc"));
    let mut found = Found {
        blocks: hdfs_client::source(root),
        mounted_at: hdfs_client::mounted_at(root),
        ..Found::default()
    };
    let mut programs = Vec::new();
    let mut servers: BTreeMap<(ServerKind, Option<String>), Server> = BTreeMap::new();
    let users = passwd::users(&etc.join("passwd"));
    let users: BTreeMap<u32, String> = users.into_iter().map(|(name, uid)| (uid, name)).collect();
    let namespace = |process: &Path| fs::read_link(process.join("ns/pid")).ok();
    let own = namespace(&proc.join("self"));
    for entry in fs::read_dir(proc)?.flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let folder = entry.path();
        // The paths, users and units of a container are not those of the VM.
        if namespace(&folder) != own {
            continue;
        }
        // A process may end while it is looked at.
        if is_datanode(&folder) {
            found.data.extend(locked_folders(&folder));
        }
        let program = program(&folder).unwrap_or_default();
        if program == "java" {
            let of = |file: &str| text(&folder.join(file)).unwrap_or_default();
            programs.push((of("environ"), of("cmdline")));
        }
        let Some(kind) = ServerKind::of(&program) else {
            continue;
        };
        let unit = unit(&folder);
        let server = servers
            .entry((kind, unit.clone()))
            .or_insert_with(|| Server {
                kind,
                unit,
                users: BTreeSet::new(),
                folders: folders(kind, etc),
                preload: preload(&folder),
                pid,
            });
        server.pid = server.pid.min(pid);
        server.users.extend(user(&folder, &users));
    }
    found.servers = servers.into_values().collect();
    found.clients = hdfs_client::clients(root, &programs);
    Ok(found)
}

fn text(path: &Path) -> Option<String> {
    let bytes = fs::read(path).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

fn program(process: &Path) -> Option<String> {
    Some(text(&process.join("comm"))?.trim_end().to_owned())
}

fn is_datanode(process: &Path) -> bool {
    let words = text(&process.join("cmdline")).unwrap_or_default();
    words.split('\0').any(|word| DATANODES.contains(&word))
}

/// The folders in which the process holds a lock of HDFS.
fn locked_folders(process: &Path) -> BTreeSet<PathBuf> {
    let files = fs::read_dir(process.join("fd"))
        .into_iter()
        .flatten()
        .flatten();
    let targets = files.filter_map(|file| fs::read_link(file.path()).ok());
    let locks = targets.filter(|path| path.file_name().is_some_and(|name| name == LOCK));
    locks
        .filter_map(|path| path.parent().map(Path::to_owned))
        .collect()
}

/// The unit of systemd, from the process's control group.
fn unit(process: &Path) -> Option<String> {
    let groups = text(&process.join("cgroup"))?;
    let of_systemd = |line: &&str| line.starts_with("0::") || line.contains(":name=systemd:");
    let path = groups.lines().find(of_systemd)?.splitn(3, ':').nth(2)?;
    if path.contains("user.slice") {
        return None;
    }
    let unit = path.rsplit('/').find(|part| part.ends_with(".service"))?;
    Some(unit.to_owned())
}

/// What is preloaded into the process.
fn preload(process: &Path) -> Option<String> {
    let environment = text(&process.join("environ"))?;
    let value = environment
        .split('\0')
        .find_map(|word| word.strip_prefix("LD_PRELOAD="));
    value.filter(|value| !value.is_empty()).map(str::to_owned)
}

/// The effective user of a process, by name if it has one.
fn user(process: &Path, names: &BTreeMap<u32, String>) -> Option<String> {
    let status = text(&process.join("status"))?;
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    let effective: u32 = ids.split_whitespace().nth(1)?.parse().ok()?;
    let name = names.get(&effective).cloned();
    Some(name.unwrap_or_else(|| effective.to_string()))
}

/// The folders that a server's configuration names and that exist.
fn folders(kind: ServerKind, etc: &Path) -> BTreeSet<PathBuf> {
    let (places, directive) = kind.configuration();
    let mut found = BTreeSet::new();
    for place in places {
        read_configuration(&etc.join(place), MAX_DEPTH, &mut |text| {
            found.extend(text.lines().filter_map(|line| value(line, directive)));
        });
    }
    found.retain(|path| path.is_dir());
    found
}

/// Calls `take` with the text of each file below a folder.
fn read_configuration(folder: &Path, depth: usize, take: &mut dyn FnMut(&str)) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        // Enabled sites are links.
        match fs::metadata(&path) {
            Ok(data) if data.is_dir() && depth > 0 => read_configuration(&path, depth - 1, take),
            Ok(data) if data.is_file() && data.len() <= MAX_BYTES => {
                text(&path).iter().for_each(|text| take(text));
            }
            _ => {}
        }
    }
}

/// The absolute path that a line gives to a directive: `root /srv/www;`, `DocumentRoot "/srv/www"`, `name = "/srv/www"`.
fn value(line: &str, directive: &str) -> Option<PathBuf> {
    let rest = line.trim().strip_prefix(directive)?;
    if !rest.starts_with(|c: char| c.is_whitespace() || c == '=') {
        return None;
    }
    let rest = rest.trim_start_matches(|c: char| c.is_whitespace() || c == '=');
    let rest = rest.trim_end_matches(|c: char| c.is_whitespace() || c == ';');
    let path = rest.trim_matches('"').trim_matches('\'');
    // Variables are only known to the server.
    (path.starts_with('/') && !path.contains(['$', '"', ' ', '#'])).then(|| path.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A process in a folder like /proc.
    fn process(proc: &Path, pid: u32, files: &[(&str, &str)]) -> PathBuf {
        let folder = proc.join(pid.to_string());
        fs::create_dir_all(folder.join("fd")).unwrap();
        for (name, text) in files {
            fs::write(folder.join(name), text).unwrap();
        }
        folder
    }

    #[test]
    fn data_directories_are_those_that_a_datanode_has_locked() {
        let dir = tempfile::tempdir().unwrap();
        let proc = &dir.path().join("proc");
        let cmdline = format!("java\0-Xmx1g\0{}\0", DATANODES[0]);
        let datanode = process(proc, 7, &[("comm", "java\n"), ("cmdline", &cmdline)]);
        for (fd, path) in [
            "/data/1/dfs/in_use.lock",
            "/data/2/dfs/in_use.lock",
            "/var/log/x",
        ]
        .iter()
        .enumerate()
        {
            symlink(path, datanode.join("fd").join(fd.to_string())).unwrap();
        }
        // A NameNode locks its folders, too.
        let namenode = process(
            proc,
            8,
            &[(
                "cmdline",
                "java\0org.apache.hadoop.hdfs.server.namenode.NameNode\0",
            )],
        );
        symlink("/data/name/in_use.lock", namenode.join("fd/1")).unwrap();
        let found = find(dir.path()).unwrap();
        let expected: BTreeSet<PathBuf> = ["/data/1/dfs", "/data/2/dfs"].map(PathBuf::from).into();
        assert_eq!(found.data, expected);
    }

    #[test]
    fn the_processes_of_a_server_are_one() {
        let dir = tempfile::tempdir().unwrap();
        let (proc, etc) = (dir.path().join("proc"), dir.path().join("etc"));
        let www = dir.path().join("www");
        fs::create_dir_all(&www).unwrap();
        fs::create_dir_all(etc.join("nginx/sites-enabled")).unwrap();
        fs::write(
            etc.join("passwd"),
            "root:x:0:0::/:/bin/sh\nwww-data:x:33:33::/:/bin/sh\n",
        )
        .unwrap();
        let site = format!(
            "server {{\n  root {};\n  # root /old;\n  location / {{ root $home; }}\n}}\n",
            www.display()
        );
        fs::write(etc.join("nginx/sites-enabled/default"), site).unwrap();
        let group = ("cgroup", "0::/system.slice/nginx.service\n");
        process(
            &proc,
            20,
            &[
                ("comm", "nginx\n"),
                ("status", "Uid:\t0\t0\t0\t0\n"),
                group,
                ("environ", "A=1\0LD_PRELOAD=/x.so\0"),
            ],
        );
        process(
            &proc,
            21,
            &[
                ("comm", "nginx\n"),
                ("status", "Uid:\t33\t33\t33\t33\n"),
                group,
            ],
        );
        process(
            &proc,
            30,
            &[
                ("comm", "haproxy\n"),
                ("status", "Uid:\t99\t99\t99\t99\n"),
                ("cgroup", "0::/user.slice/a.service\n"),
            ],
        );
        let found = find(dir.path()).unwrap();
        let [nginx, haproxy] = found.servers.as_slice() else {
            panic!("{found:?}");
        };
        assert_eq!(
            (nginx.kind, nginx.unit.as_deref(), nginx.pid),
            (ServerKind::Nginx, Some("nginx.service"), 20)
        );
        assert_eq!(nginx.users, ["root", "www-data"].map(String::from).into());
        assert_eq!(nginx.folders, [www].into());
        assert_eq!((haproxy.kind, &haproxy.unit), (ServerKind::Haproxy, &None));
        assert_eq!(haproxy.users, ["99".to_owned()].into());
    }

    #[test]
    fn a_directive_gives_an_absolute_path() {
        let of = |line, directive| value(line, directive).map(|p| p.display().to_string());
        assert_eq!(of("  root  /srv/www ;", "root"), Some("/srv/www".into()));
        assert_eq!(
            of("DocumentRoot \"/var/www/html\"", "DocumentRoot"),
            Some("/var/www/html".into())
        );
        assert_eq!(
            of(
                "server.document-root = \"/var/www\"",
                "server.document-root"
            ),
            Some("/var/www".into())
        );
        for line in [
            "root html;",
            "root /srv/$host;",
            "rootless /srv;",
            "# root /srv;",
            "root",
        ] {
            assert_eq!(of(line, "root"), None, "{line}");
        }
    }
}
