// SPDX-License-Identifier: Apache-2.0
//! What to write for what was found: the agent's configuration, drop-ins and units of systemd, and HDFS clients'
//! configuration.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use toml_edit::{Array, DocumentMut, Item, Table, TomlError, Value, value};

use super::find::{Found, Server, ServerKind};
use super::hdfs_client::{self, Client, Source};

/// The preload library, where the package installs it.
pub const LIBRARY: &str = "/usr/lib/libvpipe_preload.so";

/// The folder in the sample of the agent's configuration.
const SAMPLE: &str = "/data/1/dfs";

/// What is to be written, and done afterwards.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// The new text of the agent's configuration.
    pub config: String,
    /// Whether the agent has work here.
    pub for_agent: bool,
    /// New files below `/etc`.
    pub files: Vec<NewFile>,
    /// HDFS clients to prepare.
    pub clients: Vec<Client>,
    /// What was found, a line each.
    pub found: Vec<String>,
    /// What is left to the operator, a line each.
    pub by_hand: Vec<String>,
}

/// A file that setup makes for systemd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewFile {
    /// Its path below `/etc`.
    pub path: PathBuf,
    /// Its text.
    pub text: String,
    /// Arguments of systemctl once it is there.
    pub then: String,
    /// What the operator has to do if there is another file of that name.
    pub by_hand: String,
}

/// Makes a plan from what was found and the present text of the configuration. Values that the operator has written stay.
///
/// # Errors
/// The text is no TOML.
pub fn plan(found: &Found, config: &str) -> Result<Plan, TomlError> {
    let mut document: DocumentMut = config.parse()?;
    let mut plan = Plan::default();
    if !found.data.is_empty() {
        let paths = paths(&found.data);
        plan.found
            .push(format!("a DataNode with data in {}", paths.join(", ")));
        drop_sample(&mut document);
        add(document.as_table_mut(), "data", &paths);
        plan.for_agent = true;
    }
    for server in &found.servers {
        plan_server(&mut plan, &mut document, server);
        plan.for_agent = true;
    }
    plan_clients(&mut plan, &mut document, found);
    plan.config = document.to_string();
    Ok(plan)
}

/// A VM to which the host gives blocks gets their mount, and its HDFS clients the plug-in.
fn plan_clients(plan: &mut Plan, document: &mut DocumentMut, found: &Found) {
    let sites = found.clients.iter().map(|client| client.site.display());
    let sites = sites.map(|site| site.to_string()).collect::<Vec<_>>();
    let Some(source) = found.blocks else {
        if !sites.is_empty() && found.data.is_empty() {
            plan.by_hand.push(format!(
                "for the HDFS client of {}: the host gives this VM no blocks; there, `viola prepare` it for vread, and run setup again",
                sites.join(", ")
            ));
        }
        return;
    };
    plan.found.push(match sites.is_empty() {
        true => "blocks of DataNodes from the host, and no HDFS client".into(),
        false => format!(
            "blocks of DataNodes from the host, and an HDFS client of {}",
            sites.join(", ")
        ),
    });
    match source {
        Source::Stream => {
            plan.for_agent = true;
            if !document.contains_key("mount") {
                add_table(document, "mount");
                document["mount"]["path"] = value(hdfs_client::MOUNT);
            }
        }
        Source::VirtioFs => match &found.mounted_at {
            None => plan.files.push(NewFile {
                path: Path::new("systemd/system").join(hdfs_client::MOUNT_UNIT),
                text: hdfs_client::mount_unit(),
                then: format!("enable --now {}", hdfs_client::MOUNT_UNIT),
                by_hand: format!(
                    "mount the blocks: mount -t virtiofs viola {}",
                    hdfs_client::MOUNT
                ),
            }),
            Some(path) if path == Path::new(hdfs_client::MOUNT) => {}
            Some(path) => plan.by_hand.push(format!(
                "hdfs-site.xml: viola.vread.mount is {}, where the blocks are mounted",
                path.display()
            )),
        },
    }
    for client in &found.clients {
        plan.clients.push(client.clone());
        if client.libraries.is_none() {
            plan.by_hand.push(format!(
                "put {} on the class path of programs that use {}",
                hdfs_client::JAR,
                client.site.display()
            ));
        }
    }
    if sites.is_empty() {
        plan.by_hand.push(format!(
            "put {} on the class path of the HDFS client, and run setup while it runs",
            hdfs_client::JAR
        ));
    } else {
        plan.by_hand.push(format!(
            "start programs that use HDFS anew; those that bring libraries of their own need {} on their class path",
            hdfs_client::JAR
        ));
    }
}

fn plan_server(plan: &mut Plan, document: &mut DocumentMut, server: &Server) {
    let name = server.kind.name();
    let users: Vec<String> = server.users.iter().cloned().collect();
    if !document.contains_key("pipe") {
        add_table(document, "pipe");
    }
    let pipe = &mut document["pipe"];
    let Some(pipe) = pipe.as_table_mut() else {
        plan.found.push(format!("{name} ({})", users.join(", ")));
        plan.by_hand.push(format!(
            "{name}: pipe in the agent's configuration is no table; write [pipe]"
        ));
        return;
    };
    let folders = paths(&server.folders);
    match server.kind {
        ServerKind::Haproxy => {
            plan.found.push(format!("{name} ({})", users.join(", ")));
            match pipe.get("relay").and_then(Item::as_bool) {
                None => drop(pipe.insert("relay", value(true))),
                Some(true) => {}
                Some(false) => {
                    let hint =
                        "relay in [pipe] of the agent's configuration is false; set it to true";
                    plan.by_hand.push(hint.into());
                }
            }
            plan.by_hand
                .push("haproxy.cfg: option splice-response".into());
        }
        _ if folders.is_empty() => {
            plan.found.push(format!(
                "{name} ({}), without a folder of files in its configuration",
                users.join(", ")
            ));
            plan.by_hand.push(format!(
                "{name}: name its folders as files in [pipe] of the agent's configuration"
            ));
        }
        _ => {
            plan.found.push(format!(
                "{name} ({}) with files in {}",
                users.join(", "),
                folders.join(", ")
            ));
            add(pipe, "files", &folders);
        }
    }
    let with_root: Vec<String> = std::iter::once("root".to_owned()).chain(users).collect();
    add(pipe, "users", &with_root);
    if server.kind == ServerKind::Apache {
        plan.by_hand
            .push("Apache's configuration: EnableSendfile On".into());
    }
    match (&server.unit, &server.preload) {
        (_, Some(preload)) if preload.contains("libvpipe_preload.so") => {}
        (_, Some(preload)) => plan.by_hand.push(format!(
            "{name} has LD_PRELOAD={preload}; add {LIBRARY} to it"
        )),
        (None, None) => plan.by_hand.push(format!(
            "{name} (process {}) is of no unit of systemd; start it with LD_PRELOAD={LIBRARY}",
            server.pid
        )),
        (Some(unit), None) => {
            let path = Path::new("systemd/system").join(format!("{unit}.d/viola.conf"));
            let text =
                format!("# viola-agent setup\n[Service]\nEnvironment=LD_PRELOAD={LIBRARY}\n");
            plan.files.push(NewFile {
                by_hand: format!("add Environment=LD_PRELOAD={LIBRARY} to it"),
                then: format!("restart {unit}"),
                path,
                text,
            });
        }
    }
}

/// Adds an empty table at the end. Comments there are of keys above all tables, so they stay above it.
fn add_table(document: &mut DocumentMut, name: &str) {
    let comments = document.trailing().as_str().unwrap_or_default().to_owned();
    document.set_trailing("");
    let mut table = Table::new();
    table.decor_mut().set_prefix(format!("{comments}\n"));
    document.insert(name, Item::Table(table));
}

fn paths(folders: &BTreeSet<PathBuf>) -> Vec<String> {
    folders
        .iter()
        .map(|path| path.display().to_string())
        .collect()
}

/// Takes the sample's folder out of `data`, unless this VM has it.
fn drop_sample(document: &mut DocumentMut) {
    if let Some(data) = document.get_mut("data").and_then(Item::as_array_mut) {
        data.retain(|folder| folder.as_str() != Some(SAMPLE) || Path::new(SAMPLE).is_dir());
    }
}

/// Adds words to a list; the list is made if there is none. A user without a name is a number.
fn add(table: &mut Table, key: &str, words: &[String]) {
    let list = table.entry(key).or_insert_with(|| value(Array::new()));
    let Some(list) = list.as_array_mut() else {
        return;
    };
    for word in words {
        let number = word.parse::<i64>().ok().filter(|_| key == "users");
        let is_it = |old: &Value| {
            old.as_str() == Some(word) || (number.is_some() && old.as_integer() == number)
        };
        match number {
            _ if list.iter().any(is_it) => {}
            Some(number) => list.push(number),
            None => list.push(word.as_str()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nginx() -> Server {
        Server {
            kind: ServerKind::Nginx,
            unit: Some("nginx.service".into()),
            users: ["root", "www-data"].map(String::from).into(),
            folders: [PathBuf::from("/srv/www")].into(),
            preload: None,
            pid: 20,
        }
    }

    fn sample() -> &'static str {
        include_str!("../../../../dist/agent.toml")
    }

    #[test]
    fn the_sample_gets_the_datanodes_folders_and_keeps_its_comments() {
        let found = Found {
            data: ["/data/7/dfs", "/data/8/dfs"].map(PathBuf::from).into(),
            ..Found::default()
        };
        let plan = plan(&found, sample()).unwrap();
        let expected = sample().replace(
            "data = [\"/data/1/dfs\"]",
            "data = [\"/data/7/dfs\", \"/data/8/dfs\"]",
        );
        assert_eq!(plan.config, expected);
        assert_eq!(
            plan.found,
            ["a DataNode with data in /data/7/dfs, /data/8/dfs"]
        );
        assert!(plan.files.is_empty() && plan.by_hand.is_empty(), "{plan:?}");
    }

    #[test]
    fn a_server_gets_its_folders_users_and_the_library() {
        let found = Found {
            servers: vec![nginx()],
            ..Found::default()
        };
        let done = plan(&found, sample()).unwrap();
        let added = done.config.strip_prefix(sample()).unwrap();
        assert_eq!(
            added,
            "\n[pipe]\nfiles = [\"/srv/www\"]\nusers = [\"root\", \"www-data\"]\n"
        );
        let file = &done.files[0];
        let path = "systemd/system/nginx.service.d/viola.conf";
        assert_eq!(file.path, Path::new(path));
        let line = "Environment=LD_PRELOAD=/usr/lib/libvpipe_preload.so";
        assert!(file.text.contains(line), "{file:?}");
        assert_eq!(file.then, "restart nginx.service");
        assert!(done.by_hand.is_empty() && done.for_agent);
        // A second time changes nothing.
        assert_eq!(plan(&found, &done.config).unwrap().config, done.config);
    }

    #[test]
    fn what_the_operator_has_written_stays() {
        let own = "[pipe] # mine\nfiles = [\"/srv\"] # all\nusers = [\"alice\"]\nmax_pipes = 7\n";
        let found = Found {
            servers: vec![nginx()],
            ..Found::default()
        };
        let config = plan(&found, own).unwrap().config;
        assert_eq!(
            config,
            "[pipe] # mine\nfiles = [\"/srv\", \"/srv/www\"] # all\nusers = [\"alice\", \"root\", \"www-data\"]\nmax_pipes = 7\n"
        );
    }

    #[test]
    fn what_cannot_be_done_is_left_to_the_operator() {
        let of = |unit: Option<&str>, preload: Option<&str>, kind| {
            let server = Server {
                unit: unit.map(str::to_owned),
                preload: preload.map(str::to_owned),
                kind,
                ..nginx()
            };
            let found = Found {
                servers: vec![server],
                ..Found::default()
            };
            let plan = plan(&found, "").unwrap();
            (plan.files.len(), plan.by_hand.join("; "), plan.config)
        };
        let (files, left, _) = of(None, None, ServerKind::Nginx);
        assert!(
            files == 0 && left.contains("of no unit of systemd"),
            "{left}"
        );
        let (files, left, _) = of(Some("nginx.service"), Some("/other.so"), ServerKind::Nginx);
        assert!(
            files == 0 && left.contains("has LD_PRELOAD=/other.so"),
            "{left}"
        );
        let (files, left, _) = of(Some("nginx.service"), Some(LIBRARY), ServerKind::Nginx);
        assert_eq!((files, left.as_str()), (0, ""));
        let (files, left, config) = of(Some("haproxy.service"), None, ServerKind::Haproxy);
        assert!(
            files == 1
                && left.contains("option splice-response")
                && config.contains("relay = true"),
            "{left}: {config}"
        );
        let (_, left, _) = of(Some("apache2.service"), None, ServerKind::Apache);
        assert!(left.contains("EnableSendfile On"), "{left}");
    }

    #[test]
    fn a_user_without_a_name_is_a_number_and_no_word_of_the_operator_changes() {
        let haproxy = Server {
            kind: ServerKind::Haproxy,
            users: ["61234".to_owned()].into(),
            ..nginx()
        };
        let found = Found {
            servers: vec![haproxy],
            data: ["/data/7/dfs".into()].into(),
            ..Found::default()
        };
        let own = "data = [\"/not/mounted/now\"]\n[pipe]\nrelay = false # no\n";
        let done = plan(&found, own).unwrap();
        assert_eq!(
            done.config,
            "data = [\"/not/mounted/now\", \"/data/7/dfs\"]\n[pipe]\nrelay = false # no\nusers = [\"root\", 61234]\n"
        );
        assert!(
            done.by_hand
                .iter()
                .any(|line| line.contains("relay in [pipe]")),
            "{done:?}"
        );
        assert_eq!(plan(&found, &done.config).unwrap().config, done.config);
        // A table on one line is left to the operator, and said.
        let inline = plan(&found, "pipe = {relay = true}\n").unwrap();
        assert!(
            inline
                .by_hand
                .iter()
                .any(|line| line.contains("is no table")),
            "{inline:?}"
        );
        assert_eq!(inline.found.len(), 2);
    }

    #[test]
    fn a_configuration_that_is_no_toml_is_named() {
        assert!(plan(&Found::default(), "data = [").is_err());
    }
}
