// SPDX-License-Identifier: Apache-2.0
//! The daemon's configuration: a TOML file. Unknown keys are refused; each error names file, line and key.
//!
//! | module | table of the file |
//! |---|---|
//! | `auto` | `auto`, `[auto]` |
//! | `daemon` | `[daemon]` |
//! | `slices` | `[slices]` |
//! | `launcher` | `[[launcher]]` |
//! | `vm` | `[[vm]]` |
//! | `turbo` | `[turbo]` |
//! | `vread`, `vread::peers` | `[vread]`, `[vm.vread]`, `[[vread.peer]]` |
//! | `pipe` | `[vm.pipe]` |
//! | `lanes` | `[lanes]`, `[vm.lane]` |
//!
//! dist/viola.toml describes every key. `reference` makes the book's page of it.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use viola_cli::toml_text::{explain, line_of, line_of_value};
use viola_host::CpuSet;

use viola_cli::error::{Failure, without_middle};
use viola_cli::quantities;

mod auto;
pub mod daemon;
pub mod lanes;
pub mod launcher;
pub mod pipe;
#[cfg(test)]
mod reference;
pub mod slices;
pub mod turbo;
mod value;
pub mod vm;
pub mod vread;

use auto::AutoKey;
pub use auto::{Accelerator, Auto};
pub use daemon::{Daemon, ReadSocket, VmScope};
pub use lanes::{Lanes, VmLane};
pub use launcher::Launcher;
pub use pipe::VmPipe;
pub use slices::{MechanismChoice, Mode, Slices};
pub use turbo::Turbo;
pub use vm::VmConfig;
pub use vread::{Transport, VmVread, Vread};

/// Default path of the configuration.
pub const DEFAULT_PATH: &str = "/etc/viola/viola.toml";
/// Default path of the control socket.
pub const DEFAULT_SOCKET: &str = "/run/viola/viola.sock";
/// Default folder of the daemon's run-time state.
pub const DEFAULT_RUN_DIR: &str = "/run/viola";

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// A key or its value is wrong.
    #[error("{}:{line}: {what}", path.display())]
    At {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// The key, and what is wrong with it.
        what: String,
    },
}

impl From<ConfigError> for Failure {
    fn from(e: ConfigError) -> Self {
        Self::usage(e)
    }
}

/// Two values that exclude each other, or a value that the host cannot have.
pub(crate) struct Conflict {
    /// Place of the value, as of [`line_of_value`].
    pub(crate) path: String,
    /// The key, and what is wrong with it.
    pub(crate) what: String,
}

/// The whole configuration.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The file that it was read from.
    #[serde(skip)]
    pub path: PathBuf,
    /// Its text, in which errors find their line.
    #[serde(skip)]
    text: String,
    /// `auto` or `[auto]`; [`Config::auto`] also takes the former name.
    #[serde(default)]
    auto: AutoKey,
    /// `[daemon]`
    #[serde(default)]
    pub daemon: Daemon,
    /// `[slices]`
    #[serde(default)]
    pub slices: Slices,
    /// `[turbo]`
    #[serde(default)]
    pub turbo: Turbo,
    /// `[vread]`
    #[serde(default)]
    pub vread: Vread,
    /// `[lanes]`
    #[serde(default)]
    pub lanes: Lanes,
    /// `[[launcher]]`, in the order of the file.
    #[serde(default, rename = "launcher")]
    pub launchers: Vec<Launcher>,
    /// `[[vm]]`, in the order of the file.
    #[serde(default, rename = "vm")]
    pub vms: Vec<VmConfig>,
}

impl Config {
    /// What viola does for VMs that have no class.
    pub fn auto(&self) -> Auto {
        match self.slices.auto {
            true => Auto::On,
            false => self.auto.mode,
        }
    }

    /// Whether viola may choose this for VMs of class auto, or advise it.
    pub fn allows(&self, what: Accelerator) -> bool {
        self.auto.allows(what)
    }

    /// Whether viola says which VMs this would help.
    pub fn advises(&self, what: Accelerator) -> bool {
        self.auto() != Auto::Off && self.allows(what)
    }

    /// Reads and parses a file.
    ///
    /// # Errors
    /// When the file cannot be read, or a key or value is wrong.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(path, &text)
    }

    /// Parses the text of a file; `path` is for messages.
    ///
    /// # Errors
    /// [`ConfigError::At`] for the first key or value that is wrong.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let config: Self = toml::from_str(text).map_err(|e| {
            let at = e.span().map_or(0, |span| span.start);
            ConfigError::At {
                path: path.to_owned(),
                line: line_of(text, at),
                what: without_middle(&explain(e.message(), text, at)),
            }
        })?;
        let config = Self {
            path: path.to_owned(),
            text: text.to_owned(),
            ..config
        };
        let checked = config
            .daemon
            .check()
            .and_then(|()| config.check_vms())
            .and_then(|()| config.check_launchers())
            .and_then(|()| config.vread.check())
            .and_then(|()| config.lanes.check());
        config.located(checked).map(|()| config)
    }

    fn located(&self, checked: Result<(), Conflict>) -> Result<(), ConfigError> {
        checked.map_err(|conflict| ConfigError::At {
            path: self.path.clone(),
            line: line_of_value(&self.text, &conflict.path),
            what: without_middle(&conflict.what),
        })
    }

    fn check_launchers(&self) -> Result<(), Conflict> {
        let mut launchers = self.launchers.iter().enumerate();
        launchers.try_for_each(|(i, launcher)| launcher.check(i))
    }

    fn check_vms(&self) -> Result<(), Conflict> {
        for (i, vm) in self.vms.iter().enumerate() {
            if let Some(first) = self.vms[..i].iter().position(|v| v.name == vm.name) {
                let line = line_of_value(&self.text, &format!("vm.{first}.name"));
                return Err(Conflict {
                    path: format!("vm.{i}.name"),
                    what: format!(
                        "name: a second [[vm]] for {}; the first one is in line {line}",
                        quantities::quoted(&vm.name)
                    ),
                });
            }
        }
        Ok(())
    }

    /// Checks the configuration against the host: its cores are online, and no cap exceeds them.
    ///
    /// # Errors
    /// [`ConfigError::At`] for the first value that this host cannot have.
    pub fn check_host(&self, online: &CpuSet) -> Result<(), ConfigError> {
        self.located(self.check_cores(online))
    }

    fn check_cores(&self, online: &CpuSet) -> Result<(), Conflict> {
        let wrong = |path: &str, what: String| Conflict {
            path: path.into(),
            what,
        };
        let cores = &self.slices.cores;
        if let Some(cpu) = cores.iter().find(|&c| !online.contains(c)) {
            let what = format!("cores: CPU {cpu} is not online; this host has {online}");
            return Err(wrong("slices.cores", what));
        }
        if let Some(what) = self.turbo.conflict(online, cores) {
            return Err(wrong("turbo.cores", what));
        }
        let (count, whose) = match cores.len() {
            0 => (online.len(), "this host"),
            n => (n, "[slices]"),
        };
        for (i, vm) in self.vms.iter().enumerate() {
            if let Some(Some(cap)) = vm.cap {
                quantities::cap_fits(cap, count, whose)
                    .map_err(|e| wrong(&format!("vm.{i}.cap"), e.to_string()))?;
            }
        }
        Ok(())
    }

    /// Whether any VM needs a worker (vread, vpipe).
    pub fn has_workers(&self) -> bool {
        !self.vread.is_off() || self.vms.iter().any(|vm| vm.pipe.is_some())
    }

    /// The entry of a VM: the one with its identity, else the one with its name.
    pub fn vm(&self, id: &str, name: &str) -> Option<&VmConfig> {
        self.vms
            .iter()
            .find(|v| v.name == id)
            .or_else(|| self.vms.iter().find(|v| v.name == name))
    }
}

#[cfg(test)]
mod tests;
