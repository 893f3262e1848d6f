// SPDX-License-Identifier: Apache-2.0
//! With a stand-in for `virsh`; the test bed of the operator's host has libvirt itself.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use super::*;

const DOMAIN: &str = "<domain type='kvm'>
  <name>web1</name>
  <vcpu>2</vcpu>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
  </devices>
</domain>
";

/// A libvirt with one domain, in a folder: `domain.xml`, `state`, and the devices that were plugged or unplugged.
struct Stand {
    folder: tempfile::TempDir,
}

impl Stand {
    fn new(state: &str, attach: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("domain.xml"), DOMAIN).unwrap();
        std::fs::write(path("state"), state).unwrap();
        let script = format!(
            "#!/bin/sh\ncd {}\nshift 3\ncase \"$1 $3\" in\n'define /dev/stdin') cat >domain.xml; exit ;;\n*' web1') ;;\n\
             *) echo \"error: failed to get domain '$3'\" >&2; exit 1 ;;\nesac\n\
             case $1 in\ndomuuid) ;;\ndominfo) echo 'Persistent:     yes' ;;\ndumpxml) cat domain.xml ;;\n\
             domstate) cat state ;;\n*-device) cat >$1; {attach} ;;\n*) exit 9 ;;\nesac\n",
            folder.path().display()
        );
        std::fs::write(path("virsh"), script).unwrap();
        std::fs::set_permissions(path("virsh"), PermissionsExt::from_mode(0o755)).unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn virsh(&self) -> Virsh {
        Virsh::new(self.path("virsh"))
    }

    fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }
}

#[test]
fn a_running_vm_gets_what_can_be_plugged_at_once() {
    let stand = Stand::new("running", "true");
    let answer = prepare_by(&stand.virsh(), "web1", vec![Use::Vpipe], false).unwrap();
    let states: Vec<_> = answer.parts.iter().map(|l| (l.part, l.state)).collect();
    assert_eq!(
        states,
        [
            (Part::AgentChannel, State::Now),
            (Part::EventSocket, State::NextStart)
        ]
    );
    assert!(stand.text("attach-device").contains("org.viola.agent.0"));
    assert!(stand.text("domain.xml").contains("viola-web1.qmp"));
    assert!(
        answer.next[0].starts_with("start web1 anew"),
        "{:?}",
        answer.next
    );

    let again = prepare_by(&stand.virsh(), "web1", vec![Use::Vpipe], false).unwrap();
    assert!(
        again.parts.iter().all(|l| l.state == State::Present),
        "{again:?}"
    );

    let back = unprepare_by(&stand.virsh(), "web1", None, false).unwrap();
    let states: Vec<_> = back.parts.iter().map(|l| (l.part, l.state)).collect();
    assert_eq!(
        states,
        [
            (Part::AgentChannel, State::Removed),
            (Part::EventSocket, State::NextStart)
        ]
    );
    assert!(
        !stand.text("domain.xml").contains("viola"),
        "{}",
        stand.text("domain.xml")
    );
}

#[test]
fn what_libvirt_does_not_plug_comes_with_the_next_start() {
    let stand = Stand::new("running", "echo 'error: no bus' >&2; exit 1");
    let answer = prepare_by(&stand.virsh(), "web1", vec![Use::Datanode], false).unwrap();
    assert!(
        answer.parts.iter().all(|l| l.state == State::NextStart),
        "{answer:?}"
    );
    assert!(
        text(&answer).contains("next start (no bus)"),
        "{}",
        text(&answer)
    );
}

#[test]
fn a_dry_run_changes_nothing_and_shows_the_elements() {
    let stand = Stand::new("running", "true");
    let answer = prepare_by(&stand.virsh(), "web1", vec![Use::Reader], true).unwrap();
    assert_eq!(stand.text("domain.xml"), DOMAIN);
    assert!(!stand.path("attach-device").exists());
    let text = text(&answer);
    assert!(text.contains("nothing was changed"), "{text}");
    assert!(text.contains("<access mode='shared'/>"), "{text}");
}

#[test]
fn a_stopped_vm_has_everything_at_its_start() {
    let stand = Stand::new("shut off", "exit 1");
    let answer = prepare_by(&stand.virsh(), "web1", vec![Use::Lane], false).unwrap();
    assert!(
        answer
            .parts
            .iter()
            .all(|l| l.state == State::NextStart && l.why.is_empty()),
        "{answer:?}"
    );
    assert!(
        !answer.next.iter().any(|n| n.contains("anew")),
        "{:?}",
        answer.next
    );
}

#[test]
fn an_unknown_vm_and_a_missing_virsh_are_named() {
    let stand = Stand::new("running", "true");
    let refused = prepare_by(&stand.virsh(), "web9", vec![Use::Vpipe], false).unwrap_err();
    assert!(
        matches!(&refused, Failure::Usage(e) if e.contains("libvirt has no VM \"web9\"")),
        "{refused}"
    );
    let none = Virsh::new(stand.path("missing"));
    let refused = prepare_by(&none, "web1", vec![Use::Vpipe], false).unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("is missing; install libvirt's commands"),
        "{refused}"
    );
}

#[test]
fn grants_say_whether_a_vm_reads_or_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("viola.toml");
    std::fs::write(
        &path,
        "[vread]\nallow = [{ reader = 'client1', datanode = 'dn*' }]\n",
    )
    .unwrap();
    let of = |vm: &str| granted(vm, Some(&path));
    assert_eq!(of("dn7").unwrap(), [Use::Datanode]);
    assert_eq!(of("client1").unwrap(), [Use::Reader]);
    let refused = of("web1").unwrap_err();
    assert!(
        matches!(&refused, Failure::Usage(e) if e.contains("neither as reader nor as datanode")),
        "{refused}"
    );
}
