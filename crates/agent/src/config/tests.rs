// SPDX-License-Identifier: Apache-2.0
//! The configuration file, the kernel command line over it, and their errors.

use super::*;
use crate::pipe::settings::User;
use crate::turbo::settings::Applications;

fn read(text: &str, line: &str) -> Result<Config, String> {
    Config::read(text, "a.toml", line).map_err(|e| e.to_string())
}

#[test]
fn every_key_is_in_the_reference() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/reference.md");
    let text = std::fs::read_to_string(file).unwrap();
    for table in ["", "[mount]\n", "[pipe]\n", "[turbo]\n", "[lane]\n"] {
        let error = Config::read(&format!("{table}no_such_key = 1"), "x", "").unwrap_err();
        let error = error.to_string();
        let keys = error.split_once("expected ").unwrap().1;
        for key in keys.split('`').skip(1).step_by(2) {
            let stands = [format!("`{key}`"), format!("`[{key}]`")];
            assert!(stands.iter().any(|s| text.contains(s)), "{key}: {error}");
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
    assert_eq!(config.max_held_mib, Config::default().max_held_mib);
    assert!(config.mount.is_none() && !config.is_standalone());
    let former = read("data = ['/d']\nhold_mib = 9\n[pipe]\nmost = 4", "").unwrap();
    assert_eq!(former.max_held_mib, 9);
    let pipes = read(
        "[pipe]\nmax_pipes = 5",
        "viola.agent.pipe.files=/srv viola.agent.pipe.users=www-data,7",
    )
    .unwrap();
    assert!(!pipes.is_standalone());
    let pipe = pipes.pipes().unwrap();
    assert_eq!(
        (pipe.files.as_slice(), pipe.max_pipes),
        (["/srv".into()].as_slice(), 5)
    );
    assert_eq!(pipe.users, [User::Name("www-data".into()), User::Uid(7)]);
    for (word, is_used) in [
        ("relay=true", true),
        ("into=/up", true),
        ("relay=false", false),
    ] {
        let line = format!("viola.agent.data=/d viola.agent.pipe.{word}");
        let config = read("", &line).unwrap();
        assert_eq!(config.pipes().is_some(), is_used, "{word}");
    }
    let turbo = read(
        "[turbo]\ncpu = 1\nheadroom = 2",
        "viola.agent.turbo.cpu=3 viola.agent.turbo.applications=leave viola.agent.turbo.delay_ms=30 \
         viola.agent.turbo.bandwidth_mbit=10 viola.agent.turbo.default_buffers=true",
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
    let lane = read("[lane]\nnic = 'e'", "viola.agent.lane.bond=b9").unwrap();
    assert!(lane.is_standalone());
    let lane = lane.lane.unwrap();
    assert_eq!((lane.nic.as_str(), lane.bond.as_str()), ("e", "b9"));
    let reads = read("[mount]", "viola.agent.mount.port=unix:/p").unwrap();
    assert!(reads.is_standalone());
    let mount = reads.mount.unwrap();
    assert_eq!(
        (mount.path, mount.port),
        (MountSettings::default().path, "unix:/p".into())
    );
}

#[test]
fn an_invalid_configuration_gives_one_sentence_with_file_and_key() {
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
            "`port` in [mount]: `vsock:2:1` must be a device",
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
            "viola.agent.pipe.relay=often",
            "viola.agent.pipe.relay=often: invalid type: string",
        ),
        (
            "[pipe]\nfiles = ['/srv']\nmax_pipes = 0",
            "",
            "`max_pipes` in [pipe] is 0; it must be 1 to",
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
            "viola.agent.lane.port=x",
            "`port` in [lane]: `x` must be a device",
        ),
        ("[turbo]\ncpus = 1", "", "line 2: unknown field `cpus`"),
        (
            "",
            "viola.agent.turbo.cpu=one",
            "viola.agent.turbo.cpu=one: invalid type: string",
        ),
        (
            "",
            "viola.agent.turbo.applications=kill",
            "viola.agent.turbo.applications=kill: unknown variant `kill`",
        ),
        (
            "data = ['/d']",
            "viola.agent.blocks=many",
            "viola.agent.blocks=many: invalid type: string",
        ),
        (
            "data = ['/d']",
            "viola.agent.x=1",
            "viola.agent.x=1: unknown field `x`",
        ),
    ] {
        let error = read(text, line).unwrap_err();
        assert!(error.contains(says), "{error}");
        assert_eq!(error.lines().count(), 1);
    }
}

#[test]
fn the_sample_has_every_key_with_its_default() {
    let sample = include_str!("../../../../dist/agent.toml");
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
