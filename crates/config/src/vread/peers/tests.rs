// SPDX-License-Identifier: Apache-2.0
use std::path::Path;

use super::super::super::{Config, ConfigError};
use super::super::{Named, Vread};
use super::*;

const A: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

fn parse(text: &str) -> Result<Vread, ConfigError> {
    Config::parse(Path::new("v.toml"), text).map(|c| c.vread)
}

fn said(text: &str) -> String {
    parse(text).unwrap_err().to_string()
}

fn peer(name: &str, more: &str) -> String {
    let digit = name.bytes().map(u32::from).sum::<u32>() % 10;
    let digits = digit.to_string().repeat(64);
    format!("[[vread.peer]]\nname = \"{name}\"\nfingerprint = \"{digits}\"\n{more}\n")
}

fn vm(name: &str) -> Named {
    Named {
        id: format!("uml:{name}"),
        name: name.into(),
    }
}

#[test]
fn a_host_is_known_by_its_fingerprint_however_it_is_written() {
    let colons: Vec<String> = A
        .to_uppercase()
        .as_bytes()
        .chunks(2)
        .map(|c| String::from_utf8(c.to_vec()).unwrap())
        .collect();
    for text in [A.to_owned(), format!("sha256:{A}"), colons.join(":")] {
        assert_eq!(fingerprint(&text), Ok(A.to_owned()));
    }
    let v = parse(&format!(
        "[[vread.peer]]\nname = \"b\"\naddress = \"hostb:7670\"\nfingerprint = [\"{A}\", \"{}\"]",
        "f".repeat(64)
    ))
    .unwrap();
    assert_eq!(v.peers[0].fingerprints.len(), 2);
    assert_eq!(v.peers[0].datanodes, ["*"]);
    assert_eq!(v.ports(), [7670]);
}

#[test]
fn what_is_wrong_with_a_host_is_told_with_its_line() {
    for (text, what) in [
        (
            "[[vread.peer]]\nname = \"b\"".to_owned(),
            "v.toml:1: missing key fingerprint",
        ),
        (
            "[[vread.peer]]\nname = \"b\"\nfingerprint = \"12\"".to_owned(),
            "v.toml:3: fingerprint: \"12\" is not a fingerprint; it has 64 hexadecimal digits",
        ),
        (
            "[[vread.peer]]\nname = \"b\"\nfingerprint = []".to_owned(),
            "v.toml:3: fingerprint: missing; run viola keys show on that host",
        ),
        (
            "[[vread.peer]]\nname = \"b\"\nfingerprint = 1".to_owned(),
            "v.toml:3: fingerprint: a fingerprint in quotes, or a list of them",
        ),
        (
            peer("a b", ""),
            "v.toml:2: name: \"a b\" is not a host name",
        ),
        (
            peer("b", "address = \"10.0.0.1\""),
            "v.toml:4: address: \"10.0.0.1\" is not an address; write HOST:PORT",
        ),
        (
            peer("b", "address = \"h:0\""),
            "v.toml:4: address: \"h:0\" is not an address",
        ),
        (
            peer("b", "adress = \"h:1\""),
            "v.toml:4: unknown key adress; allowed are name, fingerprint, address, datanodes",
        ),
        (
            peer("b", "") + &peer("b", ""),
            "v.toml:6: name: a second [[vread.peer]] for \"b\"",
        ),
        (
            peer("b", "") + &peer("l", ""),
            "v.toml:6: fingerprint: \"b\" and \"l\" have the same one",
        ),
        (
            "[vread]\nlisten = \"hostb:7670\"".to_owned(),
            "v.toml:2: listen: \"hostb:7670\" is not an address; write IP:PORT",
        ),
        (
            "[vread]\nallow = [{ host = \"b\", datanode = \"dn1\" }]".to_owned(),
            "v.toml:2: host: no [[vread.peer]] has the name \"b\"",
        ),
        (
            "[vread]\nallow = [{ host = \"b\", datanode = \"dn1\" }]\n".to_owned() + &peer("b", ""),
            "v.toml:2: host: \"b\" cannot connect, because this host does not listen",
        ),
        (
            "[vread]\nallow = [{ datanode = \"dn1\" }]\n".to_owned(),
            "v.toml:2: reader: missing; write reader for a VM of this host, or host for readers of another host",
        ),
        (
            "[vread]\nkey = \"x\"".to_owned(),
            "v.toml:2: key: \"x\" is not an absolute path",
        ),
    ] {
        let said = said(&text);
        assert!(said.starts_with(what), "{said}\n{what}");
    }
}

#[test]
fn other_hosts_may_read_nothing_by_default() {
    let v = parse(
        &("[vread]\nlisten = \"10.0.0.1:7670\"\nallow = [{ reader = \"c\", datanode = \"dn*\" }]\n"
            .to_owned() + &peer("b", "")),
    )
    .unwrap();
    assert!(v.grants("b", &vm("dn1")).is_empty() && v.is_datanode(&vm("dn1")));
    // It has no address: nothing is looked for there.
    assert!(v.sources("c").is_empty());
}

#[test]
fn a_line_with_a_host_is_for_readers_there() {
    let v = parse(
        &("[vread]\nlisten = \"10.0.0.1:7670\"\n\
           allow = [{ host = \"b\", datanode = \"dn*\", pools = [\"BP-1-*\"] }, \
                    { host = \"b\", reader = \"c?\", datanode = \"web\" }]\n"
            .to_owned()
            + &peer("b", "")),
    )
    .unwrap();
    assert!(v.readers().is_empty());
    assert!(v.is_datanode(&vm("dn1")) && v.pools("c", &vm("dn1")).is_empty());
    assert_eq!(
        v.grants("b", &vm("dn1")),
        [("*".to_owned(), vec!["BP-1-*".to_owned()])]
    );
    assert_eq!(
        v.grants("b", &vm("web")),
        [("c?".to_owned(), vec!["*".to_owned()])]
    );
    assert!(v.grants("x", &vm("dn1")).is_empty());
}

#[test]
fn a_reader_looks_elsewhere_for_what_both_lines_name() {
    let v = parse(
        &("[vread]\nallow = [{ reader = \"c\", datanode = \"dn*\", pools = [\"BP-1-*\"] }, \
                             { reader = \"d\", datanode = \"web\" }]\n"
            .to_owned()
            + &peer(
                "b",
                "address = \"10.0.0.2:7670\"\ndatanodes = [\"dn1\", \"dn2\"]",
            )
            + &peer("e", "address = \"[fd00::2]:7671\"")),
    )
    .unwrap();
    let text = |t: &[&str]| t.iter().map(|t| (*t).to_owned()).collect::<Vec<_>>();
    assert_eq!(
        v.sources("c"),
        [
            ("b".to_owned(), text(&["dn1", "dn2"]), text(&["BP-1-*"])),
            ("e".to_owned(), text(&["dn*"]), text(&["BP-1-*"])),
        ]
    );
    assert_eq!(
        v.sources("d"),
        [("e".to_owned(), text(&["web"]), text(&["*"]))]
    );
    assert_eq!(v.ports(), [7670, 7671]);
}

#[test]
fn an_address_has_a_port() {
    for (text, wanted) in [
        ("10.0.0.2:7670", Some(7670)),
        ("[fd00::2]:1", Some(1)),
        ("hostb.example:65535", Some(65535)),
        ("fd00::2:7670", None),
        ("host b:1", None),
        (":1", None),
        ("hostb:", None),
        ("hostb:65536", None),
    ] {
        assert_eq!(port(text), wanted, "{text}");
    }
}
