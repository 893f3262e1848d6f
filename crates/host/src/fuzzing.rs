// SPDX-License-Identifier: Apache-2.0
//! What a hypervisor that a VM has taken over can show, for a fuzzer (`scripts/fuzz.sh`) and for the tests that repeat
//! what fuzzers found worth keeping.

use crate::qemu::{QemuArgs, fuzzing};
use crate::uml::UmlArgs;

/// Takes one input; panics when a promise is broken.
///
/// The first byte says what the rest is: 0 arguments, each up to a zero byte; 1 the bytes of a QMP server as they are,
/// asked by the inventory; 2 the same, heard by the watch over the disks; 3 and 4 its answers, a line each, to which
/// greeting and numbers are added, so that the fuzzer gets past them.
pub fn hypervisor(input: &[u8]) {
    let Some((how, rest)) = input.split_first() else {
        return;
    };
    match how % 5 {
        0 => arguments(rest),
        1 => inventory(rest),
        2 => drop(fuzzing::watch(rest)),
        3 => inventory(&numbered(rest)),
        _ => drop(fuzzing::watch(&numbered(rest))),
    }
}

fn arguments(bytes: &[u8]) {
    let args: Vec<String> = bytes
        .split(|b| *b == 0)
        .map(|arg| String::from_utf8_lossy(arg).into_owned())
        .collect();
    let qemu = QemuArgs::parse(&args);
    let _ = QemuArgs::port_chardev(&args, crate::sockets::AGENT_PORT);
    let uml = UmlArgs::parse(&args);
    // These come into the operator's terminal.
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

fn inventory(says: &[u8]) {
    let Ok(answer) = fuzzing::inventory(says) else {
        return;
    };
    let names = answer.name.iter().chain([&answer.status]);
    let devices = answer.disks.iter().map(|d| &d.device);
    for text in names.chain(devices) {
        assert!(!text.chars().any(char::is_control), "{text:?}");
    }
}

/// A greeting, and lines as answers to the first, second, third question; a line that begins with `!` is sent as it is.
fn numbered(lines: &[u8]) -> Vec<u8> {
    let mut says = b"{\"QMP\":{}}\n{\"return\":{},\"id\":1}\n".to_vec();
    let mut number = 1;
    for line in lines.split(|b| *b == b'\n') {
        if let Some(as_it_is) = line.strip_prefix(b"!") {
            says.extend_from_slice(as_it_is);
        } else {
            number += 1;
            says.extend_from_slice(b"{\"return\":");
            says.extend_from_slice(line);
            says.extend_from_slice(format!(",\"id\":{number}}}").as_bytes());
        }
        says.push(b'\n');
    }
    says
}

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    #[test]
    fn nothing_of_a_hypervisor_that_was_ever_found_breaks_a_promise() {
        super::replay::replay("hypervisor", super::hypervisor);
    }
}
