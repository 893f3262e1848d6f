// SPDX-License-Identifier: Apache-2.0
//! Fuzz target: what a hypervisor that a VM has taken over can send. `scripts/fuzz.sh` runs it, and a test replays the
//! corpus.

use crate::qemu::{QemuArgs, fuzzing};
use crate::uml::UmlArgs;

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
}
