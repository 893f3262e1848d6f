// SPDX-License-Identifier: Apache-2.0
//! `viola keys` as an operator uses it.
#![allow(clippy::unwrap_used)]

mod common;

use std::os::unix::fs::PermissionsExt;

use common::{output, refusal, stderr, stdout, write_config};

#[test]
fn a_key_is_made_once_shown_as_often_as_wanted_and_never_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path().display();
    let config = write_config(
        dir.path(),
        &format!("[vread]\nkey = \"{d}/host.key\"\ncertificate = \"{d}/host.crt\"\n"),
    );
    let keys = |what: &str, more: &[&str]| {
        let args = [&["keys", what, "--config", config.to_str().unwrap()], more].concat();
        output(&args)
    };
    let said = refusal(&keys("show", &[]), 1);
    assert!(
        said.contains("host.key is missing; viola keys init makes it"),
        "{said}"
    );
    let said = refusal(&keys("init", &["--host", "no good"]), 2);
    assert!(said.contains("\"no good\" is not a host name"), "{said}");
    let made = keys("init", &["--host", "hosta"]);
    assert!(made.status.success(), "{}", stderr(&made));
    let key = dir.path().join("host.key");
    let mode = std::fs::metadata(&key).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let before = std::fs::read(&key).unwrap();
    let said = refusal(&keys("init", &["--host", "hosta"]), 2);
    assert!(said.contains("host.key is there already"), "{said}");
    assert_eq!(std::fs::read(&key).unwrap(), before);
    let shown = stdout(&keys("show", &["--host", "hosta"]));
    assert!(shown.contains("address = \"hosta:7670\""), "{shown}");
    assert!(stdout(&made).ends_with(&shown), "{shown} {}", stdout(&made));
    let text = String::from_utf8(before).unwrap();
    assert!(!shown.contains(text.lines().nth(1).unwrap()));
    // The printed lines are valid configuration, and `check` reads the key.
    let lines = &shown[shown.find("[[vread.peer]]").unwrap()..];
    let of_other = format!(
        "[vread]\nkey = \"{d}/other.key\"\ncertificate = \"{d}/other.crt\"\n\
         allow = [{{ reader = \"c\", datanode = \"*\" }}]\n{lines}"
    );
    let other = write_config(dir.path(), &of_other);
    let check = output(&["check", "--config", other.to_str().unwrap()]);
    assert!(check.status.success(), "{}", stderr(&check));
    assert!(
        stdout(&check).contains("other.key is missing; viola keys init makes it"),
        "{}",
        stdout(&check)
    );
}
