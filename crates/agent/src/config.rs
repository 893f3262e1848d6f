// SPDX-License-Identifier: Apache-2.0
//! The agent's configuration: a TOML file, and words on the kernel's command line that override it.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::Value;

use crate::blocks::block::Timing;
use crate::blocks::types::Bounds;
use crate::io::channel::Address;
use crate::lane::settings::Settings as LaneSettings;
use crate::pipe::settings::Settings as PipeSettings;
use crate::relay::settings::Settings as MountSettings;
use crate::turbo::settings::Settings as TurboSettings;

/// Default path of the configuration file.
pub const DEFAULT_PATH: &str = "/etc/viola/agent.toml";

/// Value of `datanode` that names blocks without asking a DataNode.
pub const NO_DATANODE: &str = "none";

/// Prefix of the agent's words on the kernel's command line.
const CMDLINE_PREFIX: &str = "viola.agent.";
/// Keys whose value is a list; on the kernel's command line it is separated by commas.
const LISTS: [&str; 4] = ["data", "pipe.files", "pipe.into", "pipe.users"];

/// The configuration with all defaults filled in.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Transport to the host: a character device or `unix:PATH`.
    pub channel: String,
    /// Data directories of the DataNode, as in `dfs.datanode.data.dir`.
    pub data: Vec<PathBuf>,
    /// Where the DataNode listens for clients, `HOST:PORT`, or [`NO_DATANODE`].
    pub datanode: String,
    /// Milliseconds without an event before a block is linked, 100 to 3,600,000.
    pub quiet_ms: u64,
    /// Milliseconds between linking a block, and mapping and naming it, 50 to 60,000.
    pub settle_ms: u64,
    /// Maximum MiB of deleted or replaced blocks that links hold, 1 to 2^30. Above it the agent
    /// names no new block.
    #[serde(alias = "hold_mib")]
    pub max_held_mib: u64,
    /// Maximum number of linked blocks, and so of named ones, 1 to 10,000,000.
    pub blocks: u32,
    /// Maximum number of blocks named per second, 1 to 100,000.
    pub names_per_s: u32,
    /// Seconds between comparisons of a named block's extents, 1 to 2^30.
    pub recheck_s: u64,
    /// Seconds between scans of all data directories, 1 to 2^30.
    pub rescan_s: u64,
    /// Unix socket that answers `viola-agent status`.
    pub status: PathBuf,
    /// `[mount]`: where this VM reads the blocks of other VMs over a byte stream.
    pub mount: Option<MountSettings>,
    /// `[pipe]`: what the host may move for this VM's programs.
    pub pipe: Option<PipeSettings>,
    /// `[turbo]`: the vCPU that the host runs on a turbo core.
    pub turbo: Option<TurboSettings>,
    /// `[lane]`: a bond with a virtual function of the host's NIC.
    pub lane: Option<LaneSettings>,
}

/// Why a configuration is not usable, as one sentence that names the file and the key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

impl Default for Config {
    fn default() -> Self {
        Self {
            channel: "/dev/virtio-ports/org.viola.agent.0".into(),
            data: Vec::new(),
            datanode: "127.0.0.1:9866".into(),
            quiet_ms: 3000,
            settle_ms: 500,
            max_held_mib: 2048,
            blocks: 100_000,
            names_per_s: 200,
            recheck_s: 600,
            rescan_s: 3600,
            status: "/run/viola-agent.sock".into(),
            mount: None,
            pipe: None,
            turbo: None,
            lane: None,
        }
    }
}

impl Config {
    /// Reads `file` and `/proc/cmdline`. Without `file` it reads [`DEFAULT_PATH`], which may be missing.
    ///
    /// # Errors
    /// When the file cannot be read, or as [`Config::read`].
    pub fn load(file: Option<&Path>) -> Result<Self, ConfigError> {
        let line = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
        let path = file.unwrap_or(Path::new(DEFAULT_PATH));
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && file.is_none() => String::new(),
            Err(e) => return Err(ConfigError(format!("{}: {e}", path.display()))),
        };
        Self::read(&text, &path.display().to_string(), &line)
    }

    /// Parses the text of a file called `origin` and a kernel command line.
    ///
    /// # Errors
    /// When a key is unknown or has no usable value, or nothing is configured.
    pub fn read(text: &str, origin: &str, line: &str) -> Result<Self, ConfigError> {
        let mut config: Self = toml::from_str(text).map_err(|e| {
            let at = e
                .span()
                .map(|s| text[..s.start].matches('\n').count() + 1)
                .map_or_else(String::new, |line| format!("line {line}: "));
            ConfigError(format!(
                "{origin}: {at}{}",
                e.message().trim().replace('\n', " ")
            ))
        })?;
        let words = line
            .split_whitespace()
            .filter_map(|word| word.strip_prefix(CMDLINE_PREFIX));
        if words.clone().next().is_some() {
            let mut table: toml::Table = toml::from_str(text).unwrap_or_default();
            for word in words {
                set(&mut table, word);
                config = table.clone().try_into().map_err(|e: toml::de::Error| {
                    let what = e.message().trim().replace('\n', " ");
                    ConfigError(format!(
                        "kernel command line: {CMDLINE_PREFIX}{word}: {what}"
                    ))
                })?;
            }
        }
        config.check(origin)?;
        Ok(config)
    }

    fn check(&self, origin: &str) -> Result<(), ConfigError> {
        let bad = |what: String| Err(ConfigError(format!("{origin}: {what}")));
        let alone = self.turbo.is_some() || self.lane.is_some();
        let does_more = self.mount.is_some() || self.pipes().is_some() || alone;
        if self.data.is_empty() && !does_more {
            return bad(
                "nothing to do: set `data` to the DataNode's data directories, or add [mount], [turbo], [lane], or [pipe] with `files`, `into` or `relay`"
                    .into(),
            );
        }
        if let Some(turbo) = &self.turbo {
            turbo.check().or_else(bad)?;
        }
        if let Some(lane) = &self.lane {
            lane.check().or_else(bad)?;
        }
        if let Some(pipe) = &self.pipe {
            pipe.check().or_else(bad)?;
        }
        if let Some(mount) = &self.mount {
            mount.check().or_else(bad)?;
        }
        if let Some(path) = self.data.iter().find(|p| !p.is_absolute()) {
            return bad(format!(
                "`data`: `{}` must be an absolute path",
                path.display()
            ));
        }
        let port = self
            .datanode
            .rsplit_once(':')
            .map(|(_, port)| port.parse::<u16>());
        if self.datanode != NO_DATANODE && !matches!(port, Some(Ok(1..))) {
            return bad(format!(
                "`datanode` is `{}`; it must be HOST:PORT as in dfs.datanode.address, or `{NO_DATANODE}`",
                self.datanode
            ));
        }
        if !self.status.is_absolute() {
            return bad("`status` must be an absolute path".into());
        }
        Address::parse(&self.channel)
            .map_err(|what| ConfigError(format!("{origin}: `channel`: {what}")))?;
        for (key, value, low, high) in [
            ("quiet_ms", self.quiet_ms, 100, 3_600_000),
            ("settle_ms", self.settle_ms, 50, 60_000),
            ("max_held_mib", self.max_held_mib, 1, 1 << 30),
            ("blocks", self.blocks.into(), 1, 10_000_000),
            ("names_per_s", self.names_per_s.into(), 1, 100_000),
            ("recheck_s", self.recheck_s, 1, 1 << 30),
            ("rescan_s", self.rescan_s, 1, 1 << 30),
        ] {
            if !(low..=high).contains(&value) {
                return bad(format!("`{key}` is {value}; it must be {low} to {high}"));
            }
        }
        Ok(())
    }

    /// Whether the agent serves neither blocks nor pipes, so that it needs no channel to the host.
    #[must_use]
    pub fn is_standalone(&self) -> bool {
        self.data.is_empty() && self.pipes().is_none()
    }

    /// `[pipe]`, if it allows anything.
    #[must_use]
    pub fn pipes(&self) -> Option<&PipeSettings> {
        self.pipe.as_ref().filter(|pipe| pipe.is_used())
    }

    /// The timing of a block's life.
    pub fn times(&self) -> Timing {
        Timing {
            quiet: self.quiet_ms,
            settle: self.settle_ms,
            recheck: self.recheck_s * 1000,
            repeat: 2000,
            answer_timeout: 10_000,
            retry: 5000,
        }
    }

    /// The bounds of the ledger.
    pub fn bounds(&self) -> Bounds {
        Bounds {
            max_held_bytes: self.max_held_mib << 20,
            max_blocks: self.blocks as usize,
            max_names_per_s: self.names_per_s,
        }
    }
}

/// Sets the key of a word `KEY=VALUE` of the kernel's command line, such as `pipe.relay=true`.
fn set(table: &mut toml::Table, word: &str) {
    let (path, text) = word.split_once('=').unwrap_or((word, ""));
    let scalar = |text: &str| match (text.parse::<i64>(), text.parse::<bool>()) {
        (Ok(number), _) => Value::Integer(number),
        (_, Ok(flag)) => Value::Boolean(flag),
        _ => Value::String(text.into()),
    };
    let value = match LISTS.contains(&path) {
        true => Value::Array(text.split(',').map(scalar).collect()),
        false => scalar(text),
    };
    match path.split_once('.') {
        Some((name, key)) => {
            let inner = table
                .entry(name)
                .or_insert_with(|| Value::Table(toml::Table::new()));
            if let Value::Table(inner) = inner {
                inner.insert(key.into(), value);
            }
        }
        None => drop(table.insert(path.into(), value)),
    }
}

#[cfg(test)]
mod tests;
