// SPDX-License-Identifier: Apache-2.0
//! `viola-agent setup`: finds what runs in this VM that the host could serve, writes the agent's configuration and drop-ins of systemd
//! for it, and takes both back.

mod find;
mod plan;

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use plan::Plan;

/// Where the configuration of programs is, what is kept for taking everything back, and the processes.
#[derive(Debug, Clone)]
pub struct Places {
    /// The agent's configuration.
    pub config: PathBuf,
    /// `/etc`.
    pub etc: PathBuf,
    /// `/proc`.
    pub proc: PathBuf,
    /// The file with what was written.
    pub state: PathBuf,
}

impl Places {
    /// The places of this VM, with this configuration of the agent.
    pub fn of(config: &Path) -> Self {
        Self {
            config: config.into(),
            etc: "/etc".into(),
            proc: "/proc".into(),
            state: "/var/lib/viola-agent/setup.json".into(),
        }
    }
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
    /// The agent's configuration is no TOML.
    #[error("{path}: {what}; correct it, and run setup again")]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong, in one line.
        what: String,
    },
}

/// What was written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Written {
    /// The agent's configuration before; `None` if there was none.
    before: Option<String>,
    /// The agent's configuration as it was written.
    config: String,
    /// Other files, with their text.
    files: Vec<(PathBuf, String)>,
}

/// Finds what runs here and writes what it needs; with `dry_run` it only says so. Returns a text for the operator.
///
/// # Errors
/// See [`SetupError`].
pub fn setup(places: &Places, dry_run: bool) -> Result<String, SetupError> {
    let found = find::find(&places.proc, &places.etc).map_err(of(&places.proc))?;
    let now = read(&places.config)?;
    let plan =
        plan::plan(&found, now.as_deref().unwrap_or_default()).map_err(|e| SetupError::Config {
            path: places.config.clone(),
            what: e.message().to_owned(),
        })?;
    let is_new = now.as_deref() != Some(&plan.config) && !plan.found.is_empty();
    if !dry_run && (is_new || !plan.files.is_empty()) {
        write(places, now, &plan)?;
    }
    Ok(text(places, &plan, is_new, dry_run))
}

fn write(places: &Places, now: Option<String>, plan: &Plan) -> Result<(), SetupError> {
    let earlier = written(places)?;
    let mut record = Written {
        // What setup itself has written is not what was before.
        before: match &earlier {
            Some(earlier) if now.as_ref() == Some(&earlier.config) => earlier.before.clone(),
            _ => now,
        },
        config: plan.config.clone(),
        files: earlier.map(|e| e.files).unwrap_or_default(),
    };
    for (path, text) in &plan.files {
        let path = places.etc.join(path);
        record.files.retain(|(old, _)| *old != path);
        record.files.push((path, text.clone()));
    }
    // The record comes first, so that what follows can be taken back whenever it ends.
    let json = serde_json::to_string_pretty(&record).unwrap_or_default();
    replace(&places.state, &json)?;
    for (path, text) in &record.files {
        replace(path, text)?;
    }
    replace(&places.config, &record.config)
}

/// Takes back what [`setup`] has written, as far as nobody has changed it since. Returns a text for the operator.
///
/// # Errors
/// See [`SetupError`].
pub fn remove(places: &Places) -> Result<String, SetupError> {
    let Some(record) = written(places)? else {
        return Ok("there is nothing to take back\n".into());
    };
    let mut done = String::new();
    for (path, text) in &record.files {
        match read(path)? {
            Some(now) if now == *text => {
                fs::remove_file(path).map_err(of(path))?;
                // The folder of drop-ins goes if it is empty.
                let _ = path.parent().map(fs::remove_dir);
                done.push_str(&format!("removed {}\n", path.display()));
            }
            Some(_) => done.push_str(&format!("{} was changed since and stays\n", path.display())),
            None => {}
        }
    }
    let config = places.config.display();
    match (read(&places.config)?, &record.before) {
        (Some(now), Some(before)) if now == record.config => {
            replace(&places.config, before)?;
            done.push_str(&format!("{config} is as it was\n"));
        }
        (Some(now), None) if now == record.config => {
            fs::remove_file(&places.config).map_err(of(&places.config))?;
            done.push_str(&format!("removed {config}\n"));
        }
        (now, before) if now == *before => {}
        _ => done.push_str(&format!("{config} was changed since and stays\n")),
    }
    fs::remove_file(&places.state).map_err(of(&places.state))?;
    Ok(done)
}

fn text(places: &Places, plan: &Plan, is_new: bool, dry_run: bool) -> String {
    if plan.found.is_empty() {
        return "no DataNode, nginx, Apache, lighttpd or haproxy runs here; start it, and run setup again\n".into();
    }
    let mut text = String::new();
    for line in &plan.found {
        text.push_str(&format!("found: {line}\n"));
    }
    let wrote = if dry_run { "would write" } else { "wrote" };
    if is_new {
        text.push_str(&format!("{wrote}: {}\n", places.config.display()));
    }
    for (path, _) in &plan.files {
        text.push_str(&format!("{wrote}: {}\n", places.etc.join(path).display()));
    }
    text.push_str("left to do:\n");
    if !plan.files.is_empty() {
        text.push_str("  systemctl daemon-reload\n");
    }
    text.push_str("  systemctl enable viola-agent; systemctl restart viola-agent\n");
    for line in &plan.by_hand {
        text.push_str(&format!("  {line}\n"));
    }
    text
}

fn written(places: &Places) -> Result<Option<Written>, SetupError> {
    let Some(text) = read(&places.state)? else {
        return Ok(None);
    };
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|e| SetupError::File {
            path: places.state.clone(),
            source: e.into(),
        })
}

fn of(path: &Path) -> impl Fn(io::Error) -> SetupError {
    move |source| SetupError::File {
        path: path.into(),
        source,
    }
}

/// The text of a file; `None` if there is none.
fn read(path: &Path) -> Result<Option<String>, SetupError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(of(path)(e)),
    }
}

/// Replaces a file at once: whoever reads it has the old or the new text.
fn replace(path: &Path, text: &str) -> Result<(), SetupError> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder).map_err(of(folder))?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = folder.join(name);
    fs::write(&new, text).map_err(of(&new))?;
    fs::rename(&new, path).map_err(of(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A VM in which nginx runs.
    fn vm() -> (tempfile::TempDir, Places) {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let process = path("proc/20");
        fs::create_dir_all(&process).unwrap();
        fs::write(process.join("comm"), "nginx\n").unwrap();
        fs::write(process.join("status"), "Uid:\t33\t33\t33\t33\n").unwrap();
        fs::write(process.join("cgroup"), "0::/system.slice/nginx.service\n").unwrap();
        fs::create_dir_all(path("etc/nginx")).unwrap();
        fs::create_dir_all(path("etc/viola")).unwrap();
        fs::write(
            path("etc/nginx/nginx.conf"),
            format!("root {};\n", dir.path().display()),
        )
        .unwrap();
        fs::write(path("etc/viola/agent.toml"), "# mine\n").unwrap();
        let places = Places {
            config: path("etc/viola/agent.toml"),
            etc: path("etc"),
            proc: path("proc"),
            state: path("lib/setup.json"),
        };
        (dir, places)
    }

    fn drop_in(places: &Places) -> PathBuf {
        places.etc.join("systemd/system/nginx.service.d/viola.conf")
    }

    #[test]
    fn what_is_written_is_taken_back() {
        let (_dir, places) = vm();
        let dry = setup(&places, true).unwrap();
        assert!(dry.contains("would write"), "{dry}");
        assert_eq!(read(&places.config).unwrap().unwrap(), "# mine\n");
        let said = setup(&places, false).unwrap();
        assert!(said.contains("found: nginx (33) with files in"), "{said}");
        assert!(said.contains("systemctl restart nginx.service"), "{said}");
        assert!(drop_in(&places).exists());
        let first = read(&places.config).unwrap();
        setup(&places, false).unwrap();
        assert_eq!(
            read(&places.config).unwrap(),
            first,
            "a second time changes nothing"
        );
        remove(&places).unwrap();
        assert_eq!(read(&places.config).unwrap().unwrap(), "# mine\n");
        assert!(!drop_in(&places).exists() && !places.state.exists());
        assert_eq!(remove(&places).unwrap(), "there is nothing to take back\n");
    }

    #[test]
    fn what_was_changed_since_stays() {
        let (_dir, places) = vm();
        setup(&places, false).unwrap();
        fs::write(drop_in(&places), "[Service]\n").unwrap();
        fs::write(&places.config, "data = []\n").unwrap();
        let said = remove(&places).unwrap();
        assert_eq!(
            said.matches("was changed since and stays").count(),
            2,
            "{said}"
        );
        assert_eq!(read(&places.config).unwrap().unwrap(), "data = []\n");
    }

    #[test]
    fn a_setup_that_was_killed_after_its_record_is_taken_back() {
        let (_dir, places) = vm();
        setup(&places, false).unwrap();
        // As if it had ended before it wrote the files.
        fs::remove_file(drop_in(&places)).unwrap();
        fs::write(&places.config, "# mine\n").unwrap();
        assert_eq!(remove(&places).unwrap(), "");
        assert_eq!(read(&places.config).unwrap().unwrap(), "# mine\n");
        assert!(!places.state.exists());
    }

    #[test]
    fn a_vm_without_servers_and_a_broken_file_are_named() {
        let (_dir, mut places) = vm();
        fs::write(&places.config, "data = [").unwrap();
        let refused = setup(&places, false).unwrap_err().to_string();
        assert!(
            refused.contains("agent.toml") && refused.contains("correct it"),
            "{refused}"
        );
        places.proc = places.etc.clone();
        fs::write(&places.config, "").unwrap();
        let said = setup(&places, false).unwrap();
        assert!(said.starts_with("no DataNode"), "{said}");
        assert!(!places.state.exists());
    }
}
