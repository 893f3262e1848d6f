// SPDX-License-Identifier: Apache-2.0
//! `viola-agent setup`: finds what runs in this VM that the host could serve, writes the agent's configuration, what systemd needs and
//! HDFS clients' configuration for it, and takes all of it back.
//!
//! | file | role |
//! |---|---|
//! | `find` | what runs here |
//! | `hdfs_client` | HDFS clients: where they are, and what they need |
//! | `plan` | what to write, and what is left to the operator |
//! | `record` | writes, remembers what was written, and takes it back |

mod find;
mod hdfs_client;
mod plan;
mod record;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use hdfs_client::Site;
use plan::Plan;
use record::{Changes, Record, of, read};

/// The root of this VM's files, the agent's configuration, and what is kept for taking everything back.
#[derive(Debug, Clone)]
pub struct Places {
    /// The agent's configuration.
    pub config: PathBuf,
    /// `/`.
    pub root: PathBuf,
    /// The file with what was written.
    pub state: PathBuf,
    /// The program that controls systemd.
    pub systemctl: PathBuf,
}

impl Places {
    /// The places of this VM, with this configuration of the agent.
    pub fn of(config: &Path) -> Self {
        Self {
            config: config.into(),
            root: "/".into(),
            state: "/var/lib/viola-agent/setup.json".into(),
            systemctl: "systemctl".into(),
        }
    }
}

/// How far setup goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// It only says what it would do.
    DryRun,
    /// It writes, and says which units have to be started anew.
    Write,
    /// It writes, and starts them anew.
    Now,
}

/// Why setup cannot do its work.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// Setup has written another file than the one that is named now.
    #[error("setup has written {path}; name that file by --config")]
    OtherFile {
        /// The file that setup has written.
        path: PathBuf,
    },
    /// The agent's configuration is no TOML.
    #[error("{path}: {what}; correct it, and run setup again")]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong, in one line.
        what: String,
    },
    /// A command of systemd failed.
    #[error("systemctl {command}: {why}; what comes after it was not done")]
    Systemd {
        /// Its arguments.
        command: String,
        /// The reason.
        why: String,
    },
}

/// Finds what runs here, and prepares it as far as `extent` says. `say` gets a text for the operator, some lines at a time.
///
/// # Errors
/// See [`SetupError`].
pub fn setup(places: &Places, extent: Extent, say: &mut dyn FnMut(&str)) -> Result<(), SetupError> {
    let found = find::find(&places.root).map_err(of(&places.root.join("proc")))?;
    let now = read(&places.config)?;
    let record = record(places)?;
    let mut plan =
        plan::plan(&found, now.as_deref().unwrap_or_default()).map_err(|e| SetupError::Config {
            path: places.config.clone(),
            what: e.message().to_owned(),
        })?;
    if plan.found.is_empty() {
        say(
            "no DataNode, nginx, Apache, lighttpd or haproxy runs here, and the host gives no blocks; start it, and run setup again\n",
        );
    }
    let (changes, commands) = changes(places, now, &record, &mut plan)?;
    if extent != Extent::DryRun && changes != Changes::default() {
        record.write(&places.state, &changes)?;
    }
    for line in &plan.found {
        say(&format!("found: {line}\n"));
    }
    let wrote = if extent == Extent::DryRun {
        "would write"
    } else {
        "wrote"
    };
    let written = changes
        .edits
        .iter()
        .chain(&changes.files)
        .map(|(path, _)| path);
    for path in written.chain(changes.links.iter().map(|(path, _)| path)) {
        say(&format!("{wrote}: {}\n", path.display()));
    }
    finish(places, &commands, extent == Extent::Now, &plan.by_hand, say)
}

/// Carries commands of systemd out, or leaves them to the operator with the rest.
fn finish(
    places: &Places,
    commands: &[String],
    now: bool,
    by_hand: &[String],
    say: &mut dyn FnMut(&str),
) -> Result<(), SetupError> {
    for command in commands.iter().filter(|_| now) {
        systemctl(places, command)?;
        say(&format!("done: systemctl {command}\n"));
    }
    let left = commands
        .iter()
        .filter(|_| !now)
        .map(|c| format!("systemctl {c}"));
    let left: Vec<String> = left.chain(by_hand.iter().cloned()).collect();
    if !left.is_empty() {
        say(&format!("left to do:\n  {}\n", left.join("\n  ")));
    }
    Ok(())
}

fn systemctl(places: &Places, command: &str) -> Result<(), SetupError> {
    let failed = |why: String| SetupError::Systemd {
        command: command.to_owned(),
        why,
    };
    let mut run = Command::new(&places.systemctl);
    let done = run.args(command.split_whitespace()).output();
    let done = done.map_err(|e| failed(format!("{}: {e}", places.systemctl.display())))?;
    match done.status.success() {
        true => Ok(()),
        false => {
            let said = String::from_utf8_lossy(&done.stderr);
            let said: Vec<&str> = said.lines().map(str::trim).collect();
            Err(failed(format!("{}: {}", done.status, said.join(" "))))
        }
    }
}

/// What is to be written, and the commands of systemd that follow. What setup may not change is left to the operator.
fn changes(
    places: &Places,
    now: Option<String>,
    record: &Record,
    plan: &mut Plan,
) -> Result<(Changes, Vec<String>), SetupError> {
    let mut changes = Changes::default();
    if now.as_deref() != Some(&plan.config) && plan.for_agent {
        changes
            .edits
            .push((places.config.clone(), plan.config.clone()));
    }
    let mut commands = Vec::new();
    for file in std::mem::take(&mut plan.files) {
        let at = places.root.join("etc").join(&file.path);
        match read(&at)? {
            Some(now) if now != file.text && !record.has(&at, &now) => {
                let line = format!("{} is there already; {}", at.display(), file.by_hand);
                plan.by_hand.push(line);
            }
            _ => {
                changes.files.push((at, file.text));
                commands.push(file.then);
            }
        }
    }
    for client in std::mem::take(&mut plan.clients) {
        let text = read(&client.site)?.unwrap_or_default();
        match hdfs_client::with_property(&client.site, &text) {
            Site::IsThere => {}
            Site::New(text) => changes.edits.push((client.site, text)),
            Site::ByHand(what) => plan.by_hand.push(what),
        }
        let link = client.libraries.map(|folder| folder.join("viola-hdfs.jar"));
        // A jar that is there is of the operator, or the link.
        let link = link.filter(|link| fs::symlink_metadata(link).is_err());
        changes
            .links
            .extend(link.map(|link| (link, hdfs_client::JAR.into())));
    }
    let reload = (!changes.files.is_empty()).then(|| "daemon-reload".to_owned());
    let agent = ["enable viola-agent", "restart viola-agent"].map(str::to_owned);
    let agent = agent.into_iter().filter(|_| plan.for_agent);
    Ok((
        changes,
        reload.into_iter().chain(agent).chain(commands).collect(),
    ))
}

/// Takes back what [`setup`] has written, as far as nobody has changed it since; with `now` it also starts units anew.
///
/// # Errors
/// See [`SetupError`].
pub fn remove(places: &Places, now: bool, say: &mut dyn FnMut(&str)) -> Result<(), SetupError> {
    if !places.state.exists() {
        say("there is nothing to take back\n");
        return Ok(());
    }
    let record = record(places)?;
    let units = places.root.join("etc/systemd/system");
    let mount = units.join(hdfs_client::MOUNT_UNIT);
    if now && record.files.iter().any(|(path, _)| *path == mount) && mount.exists() {
        // systemd does so only while it knows the unit.
        systemctl(
            places,
            &format!("disable --now {}", hdfs_client::MOUNT_UNIT),
        )?;
    }
    let undone = record.undo()?;
    say(&undone.text);
    if undone.removed.contains(&mount) {
        // What `systemctl enable` has made; without the unit `disable` fails.
        let wanted = units.join("multi-user.target.wants");
        let _ = fs::remove_file(wanted.join(hdfs_client::MOUNT_UNIT));
    }
    fs::remove_file(&places.state).map_err(of(&places.state))?;
    let folders = undone
        .removed
        .iter()
        .filter_map(|path| path.parent()?.file_name()?.to_str());
    let units = folders.filter_map(|folder| folder.strip_suffix(".d"));
    let mut commands: Vec<String> = units.map(|unit| format!("restart {unit}")).collect();
    if undone.removed.contains(&mount) && !now {
        commands.push(format!("stop {}", hdfs_client::MOUNT_UNIT));
    }
    if undone.restored.contains(&record.config) || undone.removed.contains(&record.config) {
        // Somebody else may have started it, so it goes on.
        commands.push("try-restart viola-agent".into());
    }
    if !commands.is_empty() || undone.removed.contains(&mount) {
        commands.insert(0, "daemon-reload".into());
    }
    finish(places, &commands, now, &[], say)
}

/// What setup has written.
fn record(places: &Places) -> Result<Record, SetupError> {
    match Record::read(&places.state)? {
        Some(record) if record.config != places.config => Err(SetupError::OtherFile {
            path: record.config,
        }),
        Some(record) => Ok(record),
        None => Ok(Record {
            config: places.config.clone(),
            ..Record::default()
        }),
    }
}

#[cfg(test)]
mod tests;
