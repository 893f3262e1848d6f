// SPDX-License-Identifier: Apache-2.0
//! The agent's configuration: a TOML file, and words on the kernel's command line that override it.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::blocks::block::Timing;
use crate::blocks::types::Bounds;
use crate::io::channel::Address;
use crate::lane::settings::Settings as LaneSettings;
use crate::pipe::settings::{Settings as PipeSettings, User};
use crate::relay::settings::Settings as MountSettings;
use crate::turbo::settings::{Applications, Settings as TurboSettings};

/// Default path of the configuration file.
pub const DEFAULT_PATH: &str = "/etc/viola/agent.toml";

/// Value of `datanode` that names blocks without asking a DataNode.
pub const NO_DATANODE: &str = "none";

/// Prefix of the agent's words on the kernel's command line.
const CMDLINE_PREFIX: &str = "viola.agent.";

/// The configuration with all defaults filled in.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Transport to the host: a character device, `vsock:CID:PORT` or `unix:PATH`.
    pub channel: String,
    /// Data directories of the DataNode, as in `dfs.datanode.data.dir`.
    pub data: Vec<PathBuf>,
    /// Where the DataNode listens for clients, `HOST:PORT`, or [`NO_DATANODE`].
    pub datanode: String,
    /// Milliseconds without an event before a block is linked.
    pub quiet_ms: u64,
    /// Milliseconds between linking a block, and mapping and naming it.
    pub settle_ms: u64,
    /// Maximum MiB of deleted or replaced blocks that links hold; above it the agent names no new block.
    pub hold_mib: u64,
    /// Maximum number of named blocks.
    pub blocks: u32,
    /// Maximum number of blocks named per second.
    pub names_per_s: u32,
    /// Seconds between comparisons of a named block's extents.
    pub recheck_s: u64,
    /// Seconds between scans of all data directories.
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
            hold_mib: 2048,
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
        for word in line.split_whitespace() {
            if let Some(word) = word.strip_prefix(CMDLINE_PREFIX) {
                config.set(word)?;
            }
        }
        config.check(origin)?;
        Ok(config)
    }

    /// Applies one `key=value` of the kernel's command line.
    fn set(&mut self, word: &str) -> Result<(), ConfigError> {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        let bad = || {
            ConfigError(format!(
                "kernel command line: {CMDLINE_PREFIX}{key} cannot be `{value}`"
            ))
        };
        let number = || value.parse::<u64>().map_err(|_| bad());
        let small = || value.parse::<u32>().map_err(|_| bad());
        match key {
            "channel" => self.channel = value.into(),
            "data" => self.data = value.split(',').map(PathBuf::from).collect(),
            "datanode" => self.datanode = value.into(),
            "quiet_ms" => self.quiet_ms = number()?,
            "settle_ms" => self.settle_ms = number()?,
            "hold_mib" => self.hold_mib = number()?,
            "blocks" => self.blocks = small()?,
            "names_per_s" => self.names_per_s = small()?,
            "recheck_s" => self.recheck_s = number()?,
            "rescan_s" => self.rescan_s = number()?,
            "status" => self.status = value.into(),
            "mount" => self.mount.get_or_insert_default().path = value.into(),
            "port" => self.mount.get_or_insert_default().port = value.into(),
            "pipe" => {
                self.pipe.get_or_insert_default().files =
                    value.split(',').map(PathBuf::from).collect();
            }
            "pipe_into" => {
                self.pipe.get_or_insert_default().into =
                    value.split(',').map(PathBuf::from).collect();
            }
            "pipe_relay" => {
                self.pipe.get_or_insert_default().relay = value.parse().map_err(|_| bad())?;
            }
            "pipe_users" => {
                self.pipe.get_or_insert_default().users =
                    value.split(',').map(User::from).collect();
            }
            "pipe_socket" => self.pipe.get_or_insert_default().socket = value.into(),
            "pipe_most" => self.pipe.get_or_insert_default().most = small()?,
            "turbo" => self.turbo.get_or_insert_default().cpu = small()?,
            "turbo_applications" => {
                self.turbo.get_or_insert_default().applications = match value {
                    "move" => Applications::Move,
                    "leave" => Applications::Leave,
                    _ => return Err(bad()),
                };
            }
            "turbo_bandwidth_mbit" => {
                self.turbo.get_or_insert_default().bandwidth_mbit = small()?;
            }
            "turbo_delay_ms" => self.turbo.get_or_insert_default().delay_ms = small()?,
            "turbo_headroom" => self.turbo.get_or_insert_default().headroom = small()?,
            "turbo_default_buffers" => {
                self.turbo.get_or_insert_default().default_buffers =
                    value.parse().map_err(|_| bad())?;
            }
            "lane" => self.lane.get_or_insert_default().nic = value.into(),
            "lane_bond" => self.lane.get_or_insert_default().bond = value.into(),
            "lane_port" => self.lane.get_or_insert_default().port = value.into(),
            "turbo_journal" => self.turbo.get_or_insert_default().journal = value.into(),
            _ => {
                return Err(ConfigError(format!(
                    "kernel command line: unknown key {CMDLINE_PREFIX}{key}"
                )));
            }
        }
        Ok(())
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
            ("hold_mib", self.hold_mib, 1, 1 << 30),
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
            max_held_bytes: self.hold_mib << 20,
            max_blocks: self.blocks as usize,
            max_names_per_s: self.names_per_s,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, line: &str) -> Result<Config, String> {
        Config::read(text, "a.toml", line).map_err(|e| e.to_string())
    }

    #[test]
    fn every_key_is_in_the_reference() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/reference.md");
        let text = std::fs::read_to_string(file).unwrap();
        for table in ["", "[mount]\n", "[pipe]\n", "[turbo]\n", "[lane]\n"] {
            let said = Config::read(&format!("{table}no_such_key = 1"), "x", "").unwrap_err();
            let said = said.to_string();
            let keys = said.split_once("expected ").unwrap().1;
            for key in keys.split('`').skip(1).step_by(2) {
                let stands = [format!("`{key}`"), format!("`[{key}]`")];
                assert!(stands.iter().any(|s| text.contains(s)), "{key}: {said}");
            }
        }
    }

    #[test]
    fn the_kernel_command_line_wins() {
        let config = read(
            "data = ['/d']\nquiet_ms = 1000\n",
            "ro viola.agent.data=/x,/y viola.name=z viola.agent.blocks=7\n",
        )
        .unwrap();
        assert_eq!(config.data, [PathBuf::from("/x"), PathBuf::from("/y")]);
        assert_eq!((config.quiet_ms, config.blocks), (1000, 7));
        assert_eq!(config.hold_mib, Config::default().hold_mib);
        assert!(config.mount.is_none() && !config.is_standalone());
        let pipes = read(
            "[pipe]\nmost = 5",
            "viola.agent.pipe=/srv viola.agent.pipe_users=www-data,7",
        )
        .unwrap();
        assert!(!pipes.is_standalone());
        let pipe = pipes.pipes().unwrap();
        assert_eq!(
            (pipe.files.as_slice(), pipe.most),
            (["/srv".into()].as_slice(), 5)
        );
        assert_eq!(pipe.users, [User::Name("www-data".into()), User::Uid(7)]);
        for (word, is_used) in [
            ("relay=true", true),
            ("into=/up", true),
            ("relay=false", false),
        ] {
            let line = format!("viola.agent.data=/d viola.agent.pipe_{word}");
            let config = read("", &line).unwrap();
            assert_eq!(config.pipes().is_some(), is_used, "{word}");
        }
        let turbo = read(
            "[turbo]\ncpu = 1\nheadroom = 2",
            "viola.agent.turbo=3 viola.agent.turbo_applications=leave viola.agent.turbo_delay_ms=30 \
             viola.agent.turbo_bandwidth_mbit=10 viola.agent.turbo_default_buffers=true",
        )
        .unwrap();
        assert!(turbo.is_standalone());
        let wanted = TurboSettings {
            cpu: 3,
            applications: Applications::Leave,
            bandwidth_mbit: 10,
            delay_ms: 30,
            headroom: 2,
            default_buffers: true,
            ..TurboSettings::default()
        };
        assert_eq!(turbo.turbo, Some(wanted));
        let lane = read("[lane]\nnic = 'e'", "viola.agent.lane_bond=b9").unwrap();
        assert!(lane.is_standalone());
        let lane = lane.lane.unwrap();
        assert_eq!((lane.nic.as_str(), lane.bond.as_str()), ("e", "b9"));
        let reads = read("[mount]", "viola.agent.port=unix:/p").unwrap();
        assert!(reads.is_standalone());
        let mount = reads.mount.unwrap();
        assert_eq!(
            (mount.path, mount.port),
            (MountSettings::default().path, "unix:/p".into())
        );
    }

    #[test]
    fn what_is_wrong_is_said_in_one_sentence_with_its_place() {
        for (text, line, says) in [
            ("", "", "a.toml: nothing to do: set `data`"),
            (
                "data = ['d']",
                "",
                "a.toml: `data`: `d` must be an absolute path",
            ),
            (
                "data = ['/d']\nquit_ms = 5",
                "",
                "a.toml: line 2: unknown field `quit_ms`",
            ),
            (
                "data = ['/d']\nquiet_ms = 5",
                "",
                "a.toml: `quiet_ms` is 5; it must be 100 to",
            ),
            ("data = ['/d']\nchannel = 'x'", "", "a.toml: `channel`:"),
            (
                "data = ['/d']\ndatanode = 'here'",
                "",
                "a.toml: `datanode` is `here`; it must be HOST:PORT",
            ),
            ("[mount]\npath = 'm'", "", "`path` in [mount]: `m` must be"),
            (
                "[mount]\nport = 'vsock:2:1'",
                "",
                "`port` in [mount]: vsock is not supported",
            ),
            ("[mount]\nuid = 5", "", "line 2: unknown field `uid`"),
            (
                "[pipe]\nusers = [7]",
                "",
                "a.toml: nothing to do: set `data`",
            ),
            (
                "[pipe]\nfiles = ['srv']",
                "",
                "`files` in [pipe]: `srv` must be an absolute path",
            ),
            (
                "[pipe]\ninto = ['up']",
                "",
                "`into` in [pipe]: `up` must be an absolute path",
            ),
            (
                "data = ['/d']",
                "viola.agent.pipe_relay=often",
                "viola.agent.pipe_relay cannot be `often`",
            ),
            (
                "[pipe]\nfiles = ['/srv']\nmost = 0",
                "",
                "`most` in [pipe] is 0; it must be 1 to",
            ),
            (
                "[pipe]\nfiles = ['/srv']\nsocket = 's'",
                "",
                "`socket` in [pipe] must be an absolute path",
            ),
            (
                "[pipe]\nfiles = ['/srv']\nusers = ['']",
                "",
                "`users` in [pipe]: a name is empty",
            ),
            ("[pipe]\nfile = '/srv'", "", "line 2: unknown field `file`"),
            (
                "[turbo]\nheadroom = 0",
                "",
                "`headroom` in [turbo] is 0; it must be 1 to 16",
            ),
            (
                "[turbo]\njournal = 'j'",
                "",
                "`journal` in [turbo] must be an absolute path",
            ),
            (
                "[lane]\nbond = 'a/b'",
                "",
                "`bond` in [lane]: `a/b` is not an interface name",
            ),
            (
                "",
                "viola.agent.lane_port=x",
                "`port` in [lane]: `x` must be a device",
            ),
            ("[turbo]\ncpus = 1", "", "line 2: unknown field `cpus`"),
            (
                "",
                "viola.agent.turbo=one",
                "viola.agent.turbo cannot be `one`",
            ),
            (
                "",
                "viola.agent.turbo_applications=kill",
                "viola.agent.turbo_applications cannot be `kill`",
            ),
            (
                "data = ['/d']",
                "viola.agent.blocks=many",
                "viola.agent.blocks cannot be `many`",
            ),
            (
                "data = ['/d']",
                "viola.agent.x=1",
                "unknown key viola.agent.x",
            ),
        ] {
            let error = read(text, line).unwrap_err();
            assert!(error.contains(says), "{error}");
            assert_eq!(error.lines().count(), 1);
        }
    }

    #[test]
    fn the_sample_has_every_key_with_its_default() {
        let sample = include_str!("../../../dist/agent.toml");
        let all: String = sample
            .lines()
            .map(|line| {
                line.strip_prefix("# ")
                    .filter(|l| l.contains(" = ") || l.starts_with('['))
                    .unwrap_or(line)
            })
            .map(|line| format!("{line}\n"))
            .collect();
        let config = read(&all, "").unwrap();
        let defaults = Config {
            data: config.data.clone(),
            mount: Some(MountSettings::default()),
            pipe: Some(PipeSettings {
                files: vec!["/srv".into()],
                into: vec!["/srv/upload".into()],
                ..PipeSettings::default()
            }),
            turbo: Some(TurboSettings::default()),
            lane: Some(LaneSettings::default()),
            ..Config::default()
        };
        assert_eq!(config, defaults);
        let keys: Vec<_> = all
            .parse::<toml::Table>()
            .unwrap()
            .keys()
            .cloned()
            .collect();
        assert_eq!(keys.len(), 15, "{keys:?}");
        assert!(read(sample, "").is_ok());
    }
}
