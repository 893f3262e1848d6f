// SPDX-License-Identifier: Apache-2.0
//! Runs each command of the book's first page in the part on hosts as it is written there. An unknown line fails the test, so
//! the page and the tested commands stay the same.

use std::time::Instant;

use crate::first_page::part;
use crate::host::{Host, VMS};

/// The part on hosts follows this line.
const BEGIN: &str = "On a host with VMs";
/// Commands in the page's part on hosts: indented lines without their comments, and inline commands.
fn commands() -> Vec<String> {
    let part = part(BEGIN);
    let mut found = Vec::new();
    for line in part.lines() {
        if let Some(line) = line.strip_prefix("    ") {
            found.push(line.split(" #").next().unwrap_or(line).trim().to_owned());
            continue;
        }
        let quoted = line.split('`').skip(1).step_by(2);
        let is_command = |text: &&str| text.contains(' ') && !text.starts_with("viola run");
        found.extend(quoted.filter(is_command).map(str::to_owned));
    }
    found
}

/// Runs the page up to its last line, which removes viola. Returns the factor by which the first VM answered sooner.
pub fn follow(host: &Host, begin: Instant, stock: (f64, f64)) -> f64 {
    let mut ratio = 0.0;
    let commands = commands();
    assert!(commands.len() >= 12, "{commands:?}");
    for command in &commands {
        match command.as_str() {
            // `make test-beds` has built the package, and the test has copied it.
            "make deb" => drop(host.good("ls build/deb/viola_*.deb")),
            "adduser NAME viola" => {
                host.until("the daemon answers", || host.vms().len() == VMS as usize);
                host.good(
                    "adduser --quiet --disabled-password --comment '' ann; adduser ann viola",
                );
                let said = host.good("su ann -c 'viola vms'");
                assert!(said.contains("db01"), "{said}");
            }
            "adduser NAME viola-read" => {
                host.good(
                    "adduser --quiet --disabled-password --comment '' bea; adduser bea viola-read",
                );
                let said = host.good("su bea -c 'viola vms'");
                assert!(said.contains("db01"), "{said}");
                host.good("! su bea -c 'viola set db01 --class ls'");
            }
            "viola check" => {
                let said = host.good(command);
                assert!(said.contains(&format!("{VMS} qemu")), "{said}");
                println!("{said}");
            }
            "viola vms" => {
                host.until("the daemon sees the VMs", || host.vms().len() == VMS as usize);
                println!("{}", host.good(command));
            }
            "viola top" => {
                let drawn = host.sh(
                    "(sleep 15; printf q) | timeout 60 script -qec 'stty rows 24 cols 80; viola top' /dev/null; echo ended $?",
                );
                assert!(
                    drawn.contains("P99") && drawn.contains("ended 0"),
                    "{drawn}"
                );
            }
            // A configuration key with a value for this host.
            "[slices]" => {}
            "cores = \"4-15\"" => drop(host.good(
                "sed -i '/^\\[slices\\]/,/^\\[turbo\\]/s/^#cores = .*/cores = \"1\"/' /etc/viola/viola.toml; \
                 grep -q '^cores = \"1\"' /etc/viola/viola.toml",
            )),
            // The rest of the page sets classes by hand.
            "auto = \"on\"" => drop(host.good(
                "sed 's/^auto = .*/auto = \"on\"/' /etc/viola/viola.toml >/tmp/auto.toml; \
                 grep -q '^auto = \"on\"' /tmp/auto.toml && viola check --config /tmp/auto.toml >/dev/null",
            )),
            "systemctl reload viola" => drop(host.good(command)),
            "viola set db01 --class ls" => ratio = sooner(host, begin, command, stock),
            "journalctl -u viola VIOLA_KIND=change" => {
                let said = host.good(command);
                assert!(said.contains("db01"), "{said}");
            }
            // [`removal`] runs at the end.
            "apt remove viola" => {}
            other => {
                let plain = ["apt install ", "viola set ", "viola advise", "viola why ", "viola stop ", "viola start", "curl "];
                assert!(
                    plain.iter().any(|p| other.starts_with(p)),
                    "the first page has the command `{other}`, which this test does not run"
                );
                let said = host.good(&other.replace("apt install", "apt install -y"));
                assert!(!said.trim().is_empty(), "{other}");
                host.step(begin, other);
            }
        }
    }
    ratio
}

/// With cores of its own and class ls the first VM answers many times sooner than with stock scheduling.
fn sooner(host: &Host, begin: Instant, command: &str, stock: (f64, f64)) -> f64 {
    host.busy(true);
    host.good(command);
    host.until_scheduled("db01", "ls", "slots");
    assert!(host.real_time() >= 1);
    host.pause(5);
    let now = host.answers(60);
    println!("{}", host.sh("viola vms"));
    host.busy(false);
    host.step(
        begin,
        &format!(
            "db01 answers in {:.1} ms, p99 {:.1}; by stock scheduling {:.1} ms, p99 {:.1}",
            now.0, now.1, stock.0, stock.1
        ),
    );
    (stock.0 / now.0).max(stock.1 / now.1)
}

/// The page's last command.
pub fn removal(host: &Host) -> String {
    assert!(commands().iter().any(|c| c == "apt remove viola"));
    host.good("apt remove -y viola 2>&1")
}
