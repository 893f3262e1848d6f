// SPDX-License-Identifier: Apache-2.0
//! Fuzz targets: what a hypervisor that a VM has taken over can send, and what other programs of the host say of VMs.
//! `scripts/fuzz.sh` runs them, and tests replay the corpora.

use std::fmt::Debug;

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::confirm::{libvirt as pid_file, registrations};
use crate::libvirt::Message;
use crate::microvm::{Answer, Page};
use crate::monitor::decode;
use crate::qemu::devices::VirtioNic;
use crate::qemu::disk_watch::BackingChain;
use crate::qemu::state::QemuState;
use crate::qemu::{QemuArgs, fuzzing};
use crate::uml::{UmlArgs, console};

/// Runs one input; panics when a property does not hold.
///
/// The first byte chooses the target: 0 command-line arguments, separated by zero bytes; 1 raw output of a QMP server for
/// the inventory; 2 the same for the disk watch; 3 and 4 the server's answers, one a line, to which [`numbered`] adds the
/// greeting and the numbers so that the fuzzer gets past them.
pub fn hypervisor(input: &[u8]) {
    let Some((target, rest)) = input.split_first() else {
        return;
    };
    match target % 5 {
        0 => arguments(rest),
        1 => inventory(rest),
        2 => drop(fuzzing::watch(rest)),
        3 => inventory(&numbered(rest)),
        _ => drop(fuzzing::watch(&numbered(rest))),
    }
}

/// Runs one input; panics when a property does not hold.
///
/// The first byte chooses the target: 0 a line of libvirt's helper; 1 datagrams of a UML guest's console, each after two bytes
/// of length, little endian; 2 a registration; 3 a pid file; 4 the path of a control group, a zero byte and the name of a VM;
/// 5 and 6 answers of Firecracker and Cloud Hypervisor, separated by zero bytes; 7 an answer of a monitor's process.
pub fn host_answers(input: &[u8]) {
    let Some((target, rest)) = input.split_first() else {
        return;
    };
    let text = String::from_utf8_lossy(rest);
    match target % 8 {
        0 => {
            if let Ok(message) = serde_json::from_str::<Message>(&text) {
                let line = serde_json::to_string(&message).expect("JSON");
                assert!(!line.contains('\n'), "{line}");
                assert_eq!(serde_json::from_str::<Message>(&line).ok(), Some(message));
            }
        }
        1 => console_answer(rest),
        2 => {
            if let Some(found) = registrations::parse(&text) {
                assert!(!found.name.is_empty() && !found.name.contains(char::is_control));
                let line = format!("{} {}\n", found.start_time, found.name);
                assert_eq!(registrations::parse(&line), Some(found));
            }
        }
        3 => {
            if let Some(pid) = pid_file::pid_in(&text) {
                assert!(text.contains(&pid.to_string()), "{text:?}: {pid}");
            }
        }
        4 => machine(&text),
        5 => microvm(&[Page::FirecrackerInstance, Page::FirecrackerConfig], rest),
        6 => microvm(&[Page::CloudHypervisorInfo], rest),
        _ => monitor(rest),
    }
}

fn console_answer(mut rest: &[u8]) {
    let datagrams = std::iter::from_fn(|| {
        let (length, after) = rest.split_first_chunk()?;
        let length = usize::from(u16::from_le_bytes(*length));
        let (datagram, after) = after.split_at(after.len().min(length));
        rest = after;
        Some(datagram)
    });
    match console::answer_of(datagrams) {
        // 64 parts of 512 bytes, each of which may become a replacement character
        Ok(text) => assert!(text.len() <= 64 * 512 * 3),
        Err(e) => assert!(!e.to_string().contains(char::is_control), "{e}"),
    }
}

fn machine(text: &str) {
    let (group, name) = text.split_once('\0').unwrap_or((text, "db01"));
    let Some((scope, machine)) = pid_file::machine_of(group) else {
        return;
    };
    assert!(group.starts_with(scope) && scope.starts_with("/machine.slice/machine-"));
    assert!(!scope["/machine.slice/".len()..].contains('/'), "{scope}");
    if pid_file::is_machine_of(&machine, name) {
        let is_plain = |c: char| c.is_ascii_alphanumeric();
        assert!(name.contains(is_plain), "{machine:?} is {name:?}");
    }
}

fn microvm(pages: &[Page], output: &[u8]) {
    for (page, answer) in pages.iter().zip(output.split(|b| *b == 0)) {
        for text in crate::microvm::texts_of(*page, answer).unwrap_or_default() {
            assert!(!text.contains(char::is_control), "{text:?}");
        }
    }
}

/// What a process that reads an emulator's answers may say once it is the emulator's.
fn monitor(line: &[u8]) {
    let Ok(answer) = serde_json::from_slice::<Value>(line) else {
        return;
    };
    let shown = [
        shown::<QemuState>(&answer),
        shown::<Vec<BackingChain>>(&answer),
        shown::<Vec<VirtioNic>>(&answer),
        shown::<Answer>(&answer),
        shown::<()>(&answer),
    ];
    for text in shown.into_iter().flatten() {
        assert!(!text.contains(char::is_control), "{text:?}");
    }
}

fn shown<T: DeserializeOwned + Debug>(answer: &Value) -> Option<String> {
    Some(match decode::<T>(answer.clone()) {
        Ok(Ok(answer)) => format!("{answer:?}"),
        Ok(Err(e)) | Err(e) => e.to_string(),
    })
}

fn arguments(bytes: &[u8]) {
    let args: Vec<String> = bytes
        .split(|b| *b == 0)
        .map(|arg| String::from_utf8_lossy(arg).into_owned())
        .collect();
    let qemu = QemuArgs::parse(&args);
    let _ = QemuArgs::port_chardev(&args, crate::sockets::AGENT_PORT);
    let uml = UmlArgs::parse(&args);
    // These reach the operator's terminal.
    for text in qemu.name.iter() {
        assert!(!text.chars().any(char::is_control), "{text:?}");
    }
    for disk in qemu.disks.iter().chain(&uml.disks) {
        assert!(!disk.device.chars().any(char::is_control), "{disk:?}");
    }
    for nic in &uml.nics {
        let mac = nic.mac.iter().flat_map(|mac| mac.chars());
        assert!(!mac.clone().any(char::is_control), "{nic:?}");
    }
    assert_eq!(qemu.nics(&[]), qemu.nics(&[]));
}

fn inventory(output: &[u8]) {
    let Ok(answer) = fuzzing::inventory(output) else {
        return;
    };
    let names = answer.name.iter().chain([&answer.status]);
    let devices = answer.disks.iter().map(|d| &d.device);
    for text in names.chain(devices) {
        assert!(!text.chars().any(char::is_control), "{text:?}");
    }
}

/// Adds the greeting and makes each line the answer to the next command; a line that begins with `!` is sent as it is.
fn numbered(lines: &[u8]) -> Vec<u8> {
    let mut output = b"{\"QMP\":{}}\n{\"return\":{},\"id\":1}\n".to_vec();
    let mut number = 1;
    for line in lines.split(|b| *b == b'\n') {
        if let Some(as_it_is) = line.strip_prefix(b"!") {
            output.extend_from_slice(as_it_is);
        } else {
            number += 1;
            output.extend_from_slice(b"{\"return\":");
            output.extend_from_slice(line);
            output.extend_from_slice(format!(",\"id\":{number}}}").as_bytes());
        }
        output.push(b'\n');
    }
    output
}

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpus_breaks_no_property() {
        super::replay::replay("hypervisor", super::hypervisor);
    }

    #[test]
    fn the_corpus_of_other_programs_breaks_no_property() {
        super::replay::replay("host_answers", super::host_answers);
    }
}
