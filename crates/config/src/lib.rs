// SPDX-License-Identifier: Apache-2.0
//! The daemon's configuration: a TOML file. Unknown keys are refused; each error names file, line and key.
//!
//! | module | table of the file |
//! |---|---|
//! | `daemon` | `[daemon]` |
//! | `slices` | `[slices]` |
//! | `vm` | `[[vm]]` |
//! | `turbo` | `[turbo]` |
//! | `vread`, `vread::peers` | `[vread]`, `[vm.vread]`, `[[vread.peer]]` |
//! | `pipe` | `[vm.pipe]` |
//! | `lanes` | `[lanes]`, `[vm.lane]` |
//!
//! dist/viola.toml describes every key. `reference` makes the book's page of it.

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::Spanned;
use viola_cli::toml_text::{explain, line_of};
use viola_host::CpuSet;

use viola_cli::error::Failure;
use viola_cli::quantities;

pub mod daemon;
pub mod lanes;
pub mod pipe;
#[cfg(test)]
mod reference;
pub mod slices;
pub mod turbo;
mod value;
pub mod vm;
pub mod vread;

pub use daemon::{Daemon, VmScope};
pub use lanes::{Lanes, VmLane};
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

/// The whole configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The file that it was read from.
    pub path: PathBuf,
    /// `[daemon]`
    pub daemon: Daemon,
    /// `[slices]`
    pub slices: Slices,
    /// `[turbo]`
    pub turbo: Turbo,
    /// `[vread]`
    pub vread: Vread,
    /// `[lanes]`
    pub lanes: Lanes,
    /// `[[vm]]`, in the order of the file.
    pub vms: Vec<VmConfig>,
}

impl Config {
    /// Reads and parses a file.
    ///
    /// # Errors
    /// [`ConfigError`].
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
    /// [`ConfigError::At`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let at = |span: Range<usize>, what: String| ConfigError::At {
            path: path.to_owned(),
            line: line_of(text, span.start),
            what,
        };
        let raw: Raw = toml::from_str(text).map_err(|e| {
            let span = e.span().unwrap_or(0..0);
            at(span.clone(), explain(e.message(), text, span.start))
        })?;
        let mut vms: Vec<VmConfig> = Vec::new();
        for vm in raw.vm {
            let name = vm.name.get_ref().trim();
            if name.is_empty() {
                return Err(at(
                    vm.name.span(),
                    "name: empty; write the name or identity of a VM".into(),
                ));
            }
            if let Some(first) = vms.iter().find(|v| v.name == name) {
                let what = format!(
                    "name: a second [[vm]] for {}; the first one is in line {}",
                    quantities::quoted(name),
                    first.line
                );
                return Err(at(vm.name.span(), what));
            }
            let line = line_of(
                text,
                vm.cap.as_ref().map_or(vm.name.span(), Spanned::span).start,
            );
            vms.push(VmConfig {
                name: name.to_owned(),
                class: vm.class,
                microslice: vm.microslice,
                weight: vm.weight,
                cap: vm.cap.map(|c| c.into_inner().0),
                vread: vm.vread,
                pipe: vm.pipe,
                lane: vm.lane,
                line,
            });
        }
        let s = raw.slices;
        let cores_line = s
            .cores
            .as_ref()
            .map_or(0, |c| line_of(text, c.span().start));
        Ok(Self {
            path: path.to_owned(),
            daemon: raw.daemon,
            slices: Slices {
                enabled: s.enabled,
                mechanisms: s.mechanism,
                cores: s.cores.map(|c| c.into_inner().0).unwrap_or_default(),
                mode: s.mode,
                batch_slice: s.batch_slice,
                auto: s.auto,
                force: s.force,
                cores_line,
            },
            turbo: {
                let cores = raw.turbo.cores.as_ref();
                let line = cores.map_or(0, |c| line_of(text, c.span().start));
                raw.turbo.validate(line)
            },
            vread: raw
                .vread
                .validate()
                .map_err(|(span, what)| at(span, what))?,
            lanes: raw
                .lanes
                .validate()
                .map_err(|(span, what)| at(span, what))?,
            vms,
        })
    }

    /// Checks the configuration against the host: cores have to be online, caps must not exceed them.
    ///
    /// # Errors
    /// [`ConfigError::At`].
    pub fn check_host(&self, online: &CpuSet) -> Result<(), ConfigError> {
        let at = |line, what| ConfigError::At {
            path: self.path.clone(),
            line,
            what,
        };
        if let Some(cpu) = self.slices.cores.iter().find(|&c| !online.contains(c)) {
            let what = format!("cores: CPU {cpu} is not online; this host has {online}");
            return Err(at(self.slices.cores_line, what));
        }
        if let Some(what) = self.turbo.conflict(online, &self.slices.cores) {
            return Err(at(self.turbo.line, what));
        }
        let (cores, whose) = match self.slices.cores.len() {
            0 => (online.len(), "this host"),
            n => (n, "[slices]"),
        };
        for vm in &self.vms {
            if let Some(Some(cap)) = vm.cap {
                quantities::cap_fits(cap, cores, whose).map_err(|e| at(vm.line, e.to_string()))?;
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    #[serde(default)]
    daemon: Daemon,
    #[serde(default)]
    slices: slices::Raw,
    #[serde(default)]
    turbo: turbo::Raw,
    #[serde(default)]
    vread: vread::Raw,
    #[serde(default)]
    lanes: lanes::Raw,
    #[serde(default)]
    vm: Vec<vm::Raw>,
}

#[cfg(test)]
mod tests;
