// SPDX-License-Identifier: Apache-2.0
//! What setup has written, and how it is taken back: files and links of its own, and new text in files of others.

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown, symlink};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::SetupError;

/// What was written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The agent's configuration.
    pub config: PathBuf,
    /// Files that got another text.
    pub edits: Vec<Edit>,
    /// New files, with their text.
    pub files: Vec<(PathBuf, String)>,
    /// New links, with their targets.
    pub links: Vec<(PathBuf, PathBuf)>,
}

/// A file that got another text.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Edit {
    /// The file.
    pub path: PathBuf,
    /// Its text before the first setup; `None` if there was none.
    before: Option<String>,
    /// Its text before the last setup, which may have ended before it wrote the file.
    was: Option<String>,
    /// Its text as it was written.
    text: String,
}

/// What is to be written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Files of others with their new text.
    pub edits: Vec<(PathBuf, String)>,
    /// Files of setup's own with their text.
    pub files: Vec<(PathBuf, String)>,
    /// Links with their targets.
    pub links: Vec<(PathBuf, PathBuf)>,
}

/// What was taken back.
#[derive(Debug, Default)]
pub struct Undone {
    /// A line for each file.
    pub text: String,
    /// The files and links that were removed.
    pub removed: Vec<PathBuf>,
    /// The files that have their former text again.
    pub restored: Vec<PathBuf>,
}

impl Record {
    /// Reads the record; `None` if there is none.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(path: &Path) -> Result<Option<Self>, SetupError> {
        let Some(text) = read(path)? else {
            return Ok(None);
        };
        let record = serde_json::from_str(&text).map_err(|e| of(path)(e.into()))?;
        Ok(Some(record))
    }

    /// Whether setup itself has written this file with this text.
    pub fn has(&self, path: &Path, text: &str) -> bool {
        self.files.iter().any(|(p, t)| p == path && t == text)
    }

    /// Writes what is to be changed, and what was changed into the file `state`. That comes first, so that what follows
    /// can be taken back whenever it ends.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub fn write(mut self, state: &Path, changes: &Changes) -> Result<(), SetupError> {
        for (path, text) in &changes.edits {
            let now = read(path)?;
            let i = self.edits.iter().position(|e| e.path == *path);
            let earlier = i.map(|i| self.edits.remove(i));
            let before = match earlier {
                // What setup itself has written is not what was before.
                Some(e) if now.as_ref() == Some(&e.text) || now == e.was => e.before,
                _ => now.clone(),
            };
            self.edits.push(Edit {
                path: path.clone(),
                before,
                was: now,
                text: text.clone(),
            });
        }
        for (path, text) in &changes.files {
            self.files.retain(|(old, _)| old != path);
            self.files.push((path.clone(), text.clone()));
        }
        for (path, target) in &changes.links {
            self.links.retain(|(old, _)| old != path);
            self.links.push((path.clone(), target.clone()));
        }
        let json = serde_json::to_string_pretty(&self).unwrap_or_default();
        replace(state, &json, 0o600)?;
        for (path, text) in changes.files.iter().chain(&changes.edits) {
            replace(path, text, 0o644)?;
        }
        for (path, target) in &changes.links {
            match symlink(target, path) {
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                made => made.map_err(of(path))?,
            }
        }
        Ok(())
    }

    /// Takes everything back, as far as nobody has changed it since.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub fn undo(&self) -> Result<Undone, SetupError> {
        let mut undone = Undone::default();
        for (path, text) in &self.files {
            match read(path)? {
                Some(now) if now == *text => {
                    fs::remove_file(path).map_err(of(path))?;
                    // A folder of drop-ins goes if it is empty.
                    let folder = path.parent();
                    let of_drop_ins = |f: &&Path| f.extension().is_some_and(|e| e == "d");
                    let _ = folder.filter(of_drop_ins).map(fs::remove_dir);
                    undone.removed(path);
                }
                Some(_) => undone.stays(path),
                None => {}
            }
        }
        for (path, target) in &self.links {
            match fs::read_link(path) {
                Ok(now) if now == *target => {
                    fs::remove_file(path).map_err(of(path))?;
                    undone.removed(path);
                }
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                _ => undone.stays(path),
            }
        }
        for edit in &self.edits {
            edit.undo(&mut undone)?;
        }
        Ok(undone)
    }
}

impl Edit {
    fn undo(&self, undone: &mut Undone) -> Result<(), SetupError> {
        let path = &self.path;
        let is_own = |now: &String| *now == self.text || self.was.as_ref() == Some(now);
        match (read(path)?, &self.before) {
            (now, before) if now == *before => {}
            (Some(now), Some(before)) if is_own(&now) => {
                replace(path, before, 0o644)?;
                undone.text += &format!("{} is as it was\n", path.display());
                undone.restored.push(path.clone());
            }
            (Some(now), None) if is_own(&now) => {
                fs::remove_file(path).map_err(of(path))?;
                undone.removed(path);
            }
            _ => undone.stays(path),
        }
        Ok(())
    }
}

impl Undone {
    fn removed(&mut self, path: &Path) {
        self.text += &format!("removed {}\n", path.display());
        self.removed.push(path.to_owned());
    }

    fn stays(&mut self, path: &Path) {
        self.text += &format!("{} was changed since and stays\n", path.display());
    }
}

/// An error at this path.
pub fn of(path: &Path) -> impl Fn(io::Error) -> SetupError {
    move |source| SetupError::File {
        path: path.into(),
        source,
    }
}

/// The text of a file; `None` if there is none.
///
/// # Errors
/// The file cannot be read.
pub fn read(path: &Path) -> Result<Option<String>, SetupError> {
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
