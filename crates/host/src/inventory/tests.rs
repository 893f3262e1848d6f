// SPDX-License-Identifier: Apache-2.0
//! How often the inventory reads processes that are no VM.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::*;

/// A shell that executes a program of QEMU's name on request.
struct Shell(Child);

impl Shell {
    fn start(program: &Path) -> Self {
        std::fs::copy("/bin/sleep", program).unwrap();
        let script = "echo here; read word; exec \"$0\" 600";
        let child = Command::new("sh")
            .args(["-c", script])
            .arg(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut shell = Self(child);
        let mut line = String::new();
        let out = shell.0.stdout.as_mut().unwrap();
        BufReader::new(out).read_line(&mut line).unwrap();
        shell
    }

    fn exec(&mut self, program: &Path) {
        self.0.stdin.take().unwrap().write_all(b"go\n").unwrap();
        let begin = Instant::now();
        while proc::exe(self.0.id()).unwrap().as_deref() != Some(program) {
            assert!(begin.elapsed().as_secs() < 20);
            std::thread::yield_now();
        }
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_process_that_becomes_a_vm_is_found_at_once_while_young_else_within_ten_seconds() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().canonicalize().unwrap().join("qemu-system-x");
    let (mut young, mut old) = (Shell::start(&program), Shell::start(&program));
    let start = Instant::now();
    let mut inventory = Inventory::new().unwrap();
    let mut refresh = |seconds: u64| -> Vec<Tid> {
        let at = start + Duration::from_secs(seconds);
        let vms = inventory.refresh_at(at).unwrap();
        vms.iter().map(|vm| vm.pid).collect()
    };
    let (a, b) = (young.0.id(), old.0.id());
    assert!(!refresh(0).contains(&a));
    young.exec(&program);
    assert!(refresh(3).contains(&a));
    assert!(!refresh(9).contains(&b));
    old.exec(&program);
    assert!(!refresh(12).contains(&b), "it was no VM for ten seconds");
    let found = refresh(20);
    assert!(found.contains(&a) && found.contains(&b), "{found:?}");
    drop((young, old));
    assert!(!refresh(21).iter().any(|pid| [a, b].contains(pid)));
}

#[test]
fn an_ended_process_is_forgotten_at_once() {
    let mut child = Command::new("sleep").arg("600").spawn().unwrap();
    let start = Instant::now();
    let mut inventory = Inventory::new().unwrap();
    for seconds in [0, 9, 12] {
        inventory
            .refresh_at(start + Duration::from_secs(seconds))
            .unwrap();
    }
    let pid = child.id();
    let read = |i: &Inventory| i.non_vms.get(&pid).map(|o| o.read - start);
    assert_eq!(read(&inventory), Some(Duration::from_secs(9)));
    child.kill().unwrap();
    child.wait().unwrap();
    inventory
        .refresh_at(start + Duration::from_secs(13))
        .unwrap();
    assert_eq!(read(&inventory), None);
}

#[test]
fn a_process_that_nobody_confirms_is_named_in_a_warning_after_five_seconds() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().canonicalize().unwrap().join("qemu-system-x");
    let mut shell = Shell::start(&program);
    let pid = shell.0.id();
    let start = Instant::now();
    let mut inventory = Inventory::new().unwrap();
    shell.exec(&program);
    let mut warning = |seconds: u64| -> Option<String> {
        let at = start + Duration::from_secs(seconds);
        inventory.refresh_at(at).unwrap();
        let about = format!("process {pid} ");
        inventory
            .warnings()
            .iter()
            .find(|w| w.contains(&about))
            .cloned()
    };
    assert_eq!(warning(0), None);
    assert_eq!(warning(4), None);
    let text = warning(6).unwrap();
    assert!(
        text.contains("gets no accelerator: nothing confirms that it is a VM"),
        "{text}"
    );
}
