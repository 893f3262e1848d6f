// SPDX-License-Identifier: Apache-2.0
//! `viola-agent setup`: finds what runs in this VM that the host could serve, writes the agent's configuration and drop-ins of systemd
//! for it, and takes both back.

mod find;
mod plan;

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
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
}

/// What was written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Written {
    /// The agent's configuration.
    path: PathBuf,
    /// Its text before the first setup; `None` if there was none.
    before: Option<String>,
    /// Its text before the last setup, which may have ended before it wrote the file.
    was: Option<String>,
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
    let earlier = written(places)?;
    let mut plan =
        plan::plan(&found, now.as_deref().unwrap_or_default()).map_err(|e| SetupError::Config {
            path: places.config.clone(),
            what: e.message().to_owned(),
        })?;
    keep_others_files(places, earlier.as_ref(), &mut plan)?;
    let is_new = now.as_deref() != Some(&plan.config) && !plan.found.is_empty();
    if !dry_run && (is_new || !plan.files.is_empty()) {
        write(places, now, earlier, &plan)?;
    }
    Ok(text(places, &plan, is_new, dry_run))
}

/// A drop-in of that name that setup has not written stays, and the line is left to the operator.
fn keep_others_files(
    places: &Places,
    earlier: Option<&Written>,
    plan: &mut Plan,
) -> Result<(), SetupError> {
    let own: &[(PathBuf, String)] = earlier.map_or(&[], |earlier| &earlier.files);
    for (path, text) in std::mem::take(&mut plan.files) {
        let at = places.etc.join(&path);
        let is_own = |now: &String| *now == text || own.iter().any(|(p, t)| *p == at && t == now);
        match read(&at)? {
            Some(now) if !is_own(&now) => {
                let (at, library) = (at.display(), plan::LIBRARY);
                plan.by_hand.push(format!(
                    "{at} is there already; add Environment=LD_PRELOAD={library} to it"
                ));
            }
            _ => plan.files.push((path, text)),
        }
    }
    Ok(())
}

fn write(
    places: &Places,
    now: Option<String>,
    earlier: Option<Written>,
    plan: &Plan,
) -> Result<(), SetupError> {
    let mut record = Written {
        path: places.config.clone(),
        // What setup itself has written is not what was before.
        before: match &earlier {
            Some(e) if now.as_ref() == Some(&e.config) || now == e.was => e.before.clone(),
            _ => now.clone(),
        },
        was: now,
        config: plan.config.clone(),
        files: earlier.map(|e| e.files).unwrap_or_default(),
    };
    let files: Vec<(PathBuf, String)> = (plan.files.iter())
        .map(|(path, text)| (places.etc.join(path), text.clone()))
        .collect();
    record
        .files
        .retain(|(old, _)| files.iter().all(|(new, _)| new != old));
    record.files.extend(files.iter().cloned());
    // The record comes first, so that what follows can be taken back whenever it ends.
    let json = serde_json::to_string_pretty(&record).unwrap_or_default();
    replace(&places.state, &json, 0o600)?;
    for (path, text) in &files {
        replace(path, text, 0o644)?;
    }
    replace(&places.config, &record.config, 0o644)
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
    let mut by_hand = String::new();
    for (path, text) in &record.files {
        match read(path)? {
            Some(now) if now == *text => {
                fs::remove_file(path).map_err(of(path))?;
                // The folder of drop-ins goes if it is empty.
                let _ = path.parent().map(fs::remove_dir);
                done.push_str(&format!("removed {}\n", path.display()));
                let unit = path
                    .parent()
                    .and_then(Path::file_name)
                    .and_then(|name| name.to_str());
                if let Some(unit) = unit.and_then(|name| name.strip_suffix(".d")) {
                    by_hand.push_str(&format!("  systemctl restart {unit}\n"));
                }
            }
            Some(_) => done.push_str(&format!("{} was changed since and stays\n", path.display())),
            None => {}
        }
    }
    let config = places.config.display();
    let is_own = |now: &String| *now == record.config || record.was.as_ref() == Some(now);
    match (read(&places.config)?, &record.before) {
        (now, before) if now == *before => {}
        (Some(now), Some(before)) if is_own(&now) => {
            replace(&places.config, before, 0o644)?;
            done.push_str(&format!("{config} is as it was\n"));
        }
        (Some(now), None) if is_own(&now) => {
            fs::remove_file(&places.config).map_err(of(&places.config))?;
            done.push_str(&format!("removed {config}\n"));
        }
        _ => done.push_str(&format!("{config} was changed since and stays\n")),
    }
    fs::remove_file(&places.state).map_err(of(&places.state))?;
    if !by_hand.is_empty() {
        done.push_str(&format!(
            "left to do:\n  systemctl daemon-reload\n{by_hand}"
        ));
    }
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

/// What setup has written, if it has.
fn written(places: &Places) -> Result<Option<Written>, SetupError> {
    let Some(text) = read(&places.state)? else {
        return Ok(None);
    };
    let record: Written = serde_json::from_str(&text).map_err(|e| of(&places.state)(e.into()))?;
    if record.path != places.config {
        return Err(SetupError::OtherFile { path: record.path });
    }
    Ok(Some(record))
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

/// Replaces a file at once: whoever reads it has the old or the new text, also after a power cut. A link stays a link, and owner and
/// mode stay; a new file gets `mode`.
fn replace(path: &Path, text: &str, mode: u32) -> Result<(), SetupError> {
    let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let folder = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder).map_err(of(folder))?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = folder.join(name);
    // One that an earlier end has left.
    let _ = fs::remove_file(&new);
    let write = || {
        let mut options = fs::OpenOptions::new();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&new)?;
        file.write_all(text.as_bytes())?;
        let mode = match fs::metadata(path) {
            Ok(old) => {
                fchown(&file, Some(old.uid()), Some(old.gid()))?;
                old.mode() & 0o7777
            }
            Err(_) => mode,
        };
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        file.sync_all()
    };
    write().map_err(of(&new))?;
    fs::rename(&new, path).map_err(of(path))?;
    let folder_entry = fs::File::open(folder).and_then(|file| file.sync_all());
    folder_entry.map_err(of(folder))
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
    fn what_was_there_before_is_known_however_often_setup_ran_and_ended() {
        let (_dir, places) = vm();
        setup(&places, false).unwrap();
        let first = read(&places.config).unwrap().unwrap();
        // Another server; the second setup ends after its record.
        let process = places.proc.join("30");
        fs::create_dir_all(&process).unwrap();
        fs::write(process.join("comm"), "haproxy\n").unwrap();
        setup(&places, false).unwrap();
        assert_ne!(read(&places.config).unwrap().unwrap(), first);
        fs::write(&places.config, &first).unwrap();
        setup(&places, false).unwrap();
        remove(&places).unwrap();
        assert_eq!(read(&places.config).unwrap().unwrap(), "# mine\n");
    }

    #[test]
    fn another_files_record_is_not_lost() {
        let (_dir, places) = vm();
        setup(&places, false).unwrap();
        let other = Places {
            config: places.etc.join("other.toml"),
            ..places.clone()
        };
        for refused in [
            setup(&other, false).unwrap_err(),
            remove(&other).unwrap_err(),
        ] {
            assert!(
                matches!(&refused, SetupError::OtherFile { path } if *path == places.config),
                "{refused}"
            );
        }
    }

    #[test]
    fn a_drop_in_of_the_operator_stays() {
        let (_dir, places) = vm();
        fs::create_dir_all(drop_in(&places).parent().unwrap()).unwrap();
        fs::write(drop_in(&places), "[Service]\nNice=5\n").unwrap();
        let said = setup(&places, false).unwrap();
        assert!(said.contains("is there already; add Environment"), "{said}");
        remove(&places).unwrap();
        assert_eq!(
            read(&drop_in(&places)).unwrap().unwrap(),
            "[Service]\nNice=5\n"
        );
    }

    #[test]
    fn a_link_stays_a_link_and_a_private_file_private() {
        let (_dir, places) = vm();
        let target = places.etc.join("managed.toml");
        fs::rename(&places.config, &target).unwrap();
        fs::set_permissions(&target, fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(&target, &places.config).unwrap();
        setup(&places, false).unwrap();
        assert!(fs::symlink_metadata(&places.config).unwrap().is_symlink());
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&target), mode(&places.state)), (0o640, 0o600));
        assert!(read(&target).unwrap().unwrap().contains("[pipe]"));
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
