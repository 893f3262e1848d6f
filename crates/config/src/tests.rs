// SPDX-License-Identifier: Apache-2.0
use super::*;
use proptest::prelude::*;

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(Path::new("v.toml"), text)
}

fn said(text: &str) -> String {
    parse(text).unwrap_err().to_string()
}

#[test]
fn an_empty_file_is_all_defaults() {
    let c = parse("").unwrap();
    assert_eq!(c.daemon, Daemon::default());
    assert!(c.slices.enabled && c.slices.cores.is_empty() && !c.slices.auto && !c.slices.force);
    assert_eq!(c.slices.batch_slice(), 4_000_000);
    assert!(c.vms.is_empty());
}

#[test]
fn the_sample_is_the_default_configuration() {
    let sample = include_str!("../../../dist/viola.toml");
    let c = parse(sample).unwrap();
    assert_eq!(c.daemon, Daemon::default());
    assert!(c.slices.enabled && c.vms.is_empty());
    assert_eq!(c.vread, Vread::default());
    // With its comment signs taken away the sample still has to be a configuration.
    let all: String = sample
        .lines()
        .map(|l| {
            l.strip_prefix('#')
                .filter(|r| !r.starts_with(' '))
                .unwrap_or(l)
        })
        .fold(String::new(), |t, l| t + l + "\n");
    let all = parse(&all).unwrap();
    assert_eq!(all.slices.cores, "1,4-7".parse().unwrap());
    assert_eq!((all.vread.allow.len(), all.vread.peers.len()), (1, 1));
    let vm = all.vm("x", "db01").unwrap();
    assert!(vm.vread.agent.is_some() && vm.vread.qmp.is_some() && vm.vread.image.len() == 1);
    assert!(
        vm.class.is_some() && vm.microslice.is_some() && vm.weight.is_some() && vm.cap.is_some()
    );
}

#[test]
fn the_read_socket_lies_beside_the_control_socket_unless_told_otherwise() {
    let path = |text: &str| parse(text).unwrap().daemon.read_socket();
    assert_eq!(path(""), Some("/run/viola/viola-read.sock".into()));
    assert_eq!(
        path("[daemon]\nsocket = \"/tmp/v.sock\""),
        Some("/tmp/v-read.sock".into())
    );
    assert_eq!(
        path("[daemon]\nread_socket = \"/tmp/r.sock\""),
        Some("/tmp/r.sock".into())
    );
    assert_eq!(path("[daemon]\nread_socket = \"none\""), None);
    assert_eq!(path("[daemon]\nread_socket = \"\""), None);
    assert_eq!(
        said("[daemon]\nsocket = \"/tmp/v.sock\"\nread_socket = \"/tmp/v.sock\""),
        "v.toml:3: read_socket: this is the control socket; name another path, or \"none\""
    );
    let s = said("[daemon]\nread_socket = \"r.sock\"");
    assert!(s.contains("is not an absolute path"), "{s}");
}

#[test]
fn papers_modes_have_the_papers_slice_unless_told_otherwise() {
    assert_eq!(
        parse("[slices]\nmode = \"paper\"")
            .unwrap()
            .slices
            .batch_slice(),
        30_000_000
    );
    assert_eq!(
        parse("[slices]\nmode = \"credit\"\nbatch_slice = \"10ms\"")
            .unwrap()
            .slices
            .batch_slice(),
        10_000_000
    );
}

#[test]
fn an_unknown_key_is_named_with_its_line_and_those_allowed() {
    let s = said("[daemon]\n\n[slices]\ncore = \"1\"\n");
    assert!(
        s.starts_with("v.toml:4: unknown key core; allowed are enabled, mechanism, cores"),
        "{s}"
    );
    assert!(said("[slice]\n").starts_with(
        "v.toml:1: unknown key slice; allowed are auto, daemon, slices, turbo, vread, lanes, launcher, vm"
    ));
    assert!(said("[[vm]]\nname = \"a\"\nprio = 3").starts_with("v.toml:3: unknown key prio"));
}

#[test]
fn a_wrong_value_is_named_with_its_line_and_key() {
    assert_eq!(
        said("[[vm]]\nname = \"a\"\nmicroslice = \"300\""),
        "v.toml:3: microslice: \"300\" has no unit; the units are us, ms, s, m and h, for example 300us"
    );
    assert!(said("[daemon]\ninterval = 100").starts_with(
        "v.toml:2: interval: invalid type: integer 100, expected a duration with its unit"
    ));
    assert!(said("[daemon]\ninterval = \"10ms\"").contains("30ms to 1s is allowed"));
    assert_eq!(
        said("[[vm]]\nname = \"a\"\nweight = -3"),
        "v.toml:3: weight: -3 is not a weight; 1 to 65535 is allowed"
    );
    assert!(
        said("[slices]\ncores = \"x\"").starts_with("v.toml:2: cores: \"x\" is not a CPU list")
    );
    assert_eq!(
        said("[slices]\nmode = \"fast\""),
        "v.toml:2: mode: fast is not allowed; write one of interleaved, paper, credit"
    );
    assert!(said("[slices]\nmode = ").starts_with("v.toml:2: "));
    assert_eq!(
        said("[daemon]\nrun_dir = \"run\""),
        "v.toml:2: run_dir: \"run\" is not an absolute path"
    );
    assert_eq!(said("[[vm]]\nclass = \"ls\""), "v.toml:1: missing key name");
}

#[test]
fn a_vm_has_one_entry() {
    let s = said("[[vm]]\nname = \"a\"\n[[vm]]\nname = \"b\"\n[[vm]]\nname = \"a\"\n");
    assert_eq!(
        s,
        "v.toml:6: name: a second [[vm]] for \"a\"; the first one is in line 2"
    );
    assert!(said("[[vm]]\nname = \" \"").contains("empty"));
}

#[test]
fn cores_and_caps_have_to_fit_on_the_host() {
    let online: CpuSet = "0-1".parse().unwrap();
    let check = |text: &str| {
        parse(text)
            .unwrap()
            .check_host(&online)
            .map_err(|e| e.to_string())
    };
    assert_eq!(check("[slices]\ncores = \"1\""), Ok(()));
    assert_eq!(
        check("[slices]\nauto = true\ncores = \"1,4\""),
        Err("v.toml:3: cores: CPU 4 is not online; this host has 0-1".into())
    );
    assert_eq!(check("[[vm]]\nname = \"a\"\ncap = \"200%\""), Ok(()));
    assert_eq!(
        check("[slices]\ncores = \"1\"\n[[vm]]\nname = \"a\"\ncap = \"200%\""),
        Err("v.toml:5: cap 200% is over the 1 core of [slices]; at most 100%".into())
    );
}

#[test]
fn an_identity_goes_before_a_name() {
    let c =
        parse("[[vm]]\nname = \"g1\"\nweight = 1\n[[vm]]\nname = \"uml:g1\"\nweight = 2").unwrap();
    assert_eq!(c.vm("uml:g1", "g1").unwrap().weight, Some(2));
    assert_eq!(c.vm("qemu:g1", "g1").unwrap().weight, Some(1));
    assert_eq!(c.vm("qemu:g2", "g2"), None);
}

proptest! {
    #[test]
    fn no_text_makes_the_parser_panic(text in "(\\PC|\n){0,80}") {
        let _ = parse(&text);
    }

    #[test]
    fn no_value_makes_the_parser_panic(
        key in "interval|cores|mode|batch_slice|socket",
        table in "daemon|slices",
        value in "\"[^\"\\\\\n]{0,12}\"|-?[0-9]{1,30}|true|\\[\\]|\\{\\}",
    ) {
        let _ = parse(&format!("[{table}]\n{key} = {value}\n"));
    }
}

#[test]
fn auto_is_a_word_or_a_table_that_names_what_viola_may_choose() {
    use Accelerator::{Lanes, Slices, Vpipe};
    for (text, mode) in [
        ("", Auto::Advise),
        ("auto = \"on\"", Auto::On),
        ("[auto]\nmode = \"off\"", Auto::Off),
        ("[auto]\nallow = [\"slices\"]", Auto::Advise),
    ] {
        assert_eq!(parse(text).unwrap().auto(), mode, "{text}");
    }
    let some = parse("auto = { mode = \"on\", allow = [\"slices\", \"vpipe\"] }").unwrap();
    assert!(some.advises(Slices) && some.advises(Vpipe) && !some.allows(Lanes));
    let all = parse("auto = \"off\"").unwrap();
    assert!(all.allows(Lanes) && !all.advises(Slices));

    assert_eq!(
        said("auto = \"yes\""),
        "v.toml:1: auto: yes is not allowed; write one of off, advise, on"
    );
    let wrong = said("auto = 3");
    assert!(wrong.contains("off, advise or on, or a table"), "{wrong}");
    let wrong = said("[auto]\nallow = [\"disks\"]");
    assert!(
        wrong.starts_with("v.toml:2: ")
            && wrong.contains("disks is not allowed; write one of slices, turbo"),
        "{wrong}"
    );
    assert!(said("[auto]\nallow = []").contains("leave the key out"));
    let wrong = said("[auto]\nmod = \"on\"");
    assert!(wrong.contains("unknown key mod"), "{wrong}");
}
