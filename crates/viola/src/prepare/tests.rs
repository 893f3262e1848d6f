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

fn names(name: &str) -> VmNames {
    VmNames {
        name: name.into(),
        mount: format!("/run/viola/mounts/{name}.sock").into(),
    }
}

fn web1() -> VmNames {
    names("web1")
}

/// A libvirt with one domain, in a folder: `domain.xml`, `live.xml`, `id`, and the devices that were plugged or unplugged.
struct Stand {
    folder: tempfile::TempDir,
}

impl Stand {
    fn new(id: &str, attach: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("domain.xml"), DOMAIN).unwrap();
        std::fs::write(path("live.xml"), DOMAIN).unwrap();
        std::fs::write(path("id"), id).unwrap();
        let script = format!(
            "#!/bin/sh\ncd {}\nshift 3\ncase \"$1 $3\" in\n'define /dev/stdin') cat >domain.xml; exit ;;\n*' web1') ;;\n\
             *) echo \"error: failed to get domain '$3'\" >&2; exit 1 ;;\nesac\n\
             case $1 in\ndomid) cat id ;;\ndominfo) echo 'Persistent:     yes' ;;\ndumpxml) case $* in *inactive*) cat domain.xml ;; *) cat live.xml ;; esac ;;\n\
             *-device) cat >$1; {attach} ;;\n*) exit 9 ;;\nesac\n",
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
    let stand = Stand::new("7", "true");
    let answer = prepare_by(&stand.virsh(), &web1(), vec![Use::Vpipe], false).unwrap();
    let states: Vec<_> = answer.parts.iter().map(|l| (l.part, l.state)).collect();
    assert_eq!(
        states,
        [
            (Part::AgentChannel, State::Now),
            (Part::EventSocket, State::NextStart)
        ]
    );
    assert!(stand.text("attach-device").contains("org.viola.agent.0"));
    assert!(stand.text("domain.xml").contains("viola-web1.events.qmp"));
    assert!(
        answer.next[0].starts_with("virsh shutdown web1"),
        "{:?}",
        answer.next
    );

    // The VM still runs without the socket, and has lost its channel.
    let again = prepare_by(&stand.virsh(), &web1(), vec![Use::Vpipe], false).unwrap();
    let states: Vec<_> = again.parts.iter().map(|l| l.state).collect();
    assert_eq!(states, [State::Now, State::NextStart]);
    std::fs::copy(stand.path("domain.xml"), stand.path("live.xml")).unwrap();
    let again = prepare_by(&stand.virsh(), &web1(), vec![Use::Vpipe], false).unwrap();
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
    let stand = Stand::new("7", "echo 'error: no bus' >&2; exit 1");
    let answer = prepare_by(&stand.virsh(), &web1(), vec![Use::Datanode], false).unwrap();
    assert!(
        answer.parts.iter().all(|l| l.state == State::NextStart),
        "{answer:?}"
    );
    assert!(
        show::text(&answer).contains("next start (no bus)"),
        "{}",
        show::text(&answer)
    );
}

#[test]
fn a_dry_run_changes_nothing_and_shows_the_elements() {
    let stand = Stand::new("7", "true");
    let answer = prepare_by(&stand.virsh(), &web1(), vec![Use::Reader], true).unwrap();
    assert_eq!(stand.text("domain.xml"), DOMAIN);
    assert!(!stand.path("attach-device").exists());
    let text = show::text(&answer);
    assert!(text.contains("nothing was changed"), "{text}");
    assert!(text.contains("<access mode='shared'/>"), "{text}");
}

#[test]
fn a_stopped_vm_has_everything_at_its_start() {
    let stand = Stand::new("-", "exit 1");
    let answer = prepare_by(&stand.virsh(), &web1(), vec![Use::Lane], false).unwrap();
    assert!(
        answer
            .parts
            .iter()
            .all(|l| l.state == State::NextStart && l.why.is_empty()),
        "{answer:?}"
    );
    assert!(
        !answer.next.iter().any(|n| n.contains("virsh start")),
        "{:?}",
        answer.next
    );
}

#[test]
fn a_name_with_a_blank_is_one_word_of_a_command() {
    let steps = show::by_hand(Use::Turbo, "my VM");
    assert_eq!(
        steps[0],
        "on the host: viola set 'my VM' --class turbo --keep"
    );
    assert!(steps[1].starts_with("in my VM: "), "{steps:?}");
    let line = Line::new(
        Part::EventSocket,
        &names("my VM"),
        State::NextStart,
        String::new(),
    );
    let step = restart("my VM", true, &[line]).unwrap();
    assert!(step.starts_with("virsh shutdown 'my VM'; "), "{step}");
}

#[test]
fn an_unknown_vm_and_a_missing_virsh_are_named() {
    let stand = Stand::new("7", "true");
    let refused = prepare_by(&stand.virsh(), &names("web9"), vec![Use::Vpipe], false).unwrap_err();
    assert!(
        matches!(&refused, Failure::Usage(e) if e.contains("libvirt has no VM \"web9\"")),
        "{refused}"
    );
    let none = Virsh::new(stand.path("missing"));
    let refused = prepare_by(&none, &web1(), vec![Use::Vpipe], false).unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("is missing; install libvirt's commands"),
        "{refused}"
    );
}

#[test]
fn a_number_of_libvirt_is_no_name() {
    let stand = Stand::new("7", "true");
    let other = DOMAIN.replace("web1", "web2");
    std::fs::write(stand.path("domain.xml"), other).unwrap();
    let refused = prepare_by(&stand.virsh(), &web1(), vec![Use::Vpipe], false).unwrap_err();
    assert!(
        matches!(&refused, Failure::Usage(e) if e.contains("give the VM's name")),
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
    let of = |vm: &str| granted(vm, &path);
    assert_eq!(of("dn7").unwrap().0, [Use::Datanode]);
    let (uses, mount) = of("client1").unwrap();
    assert_eq!(uses, [Use::Reader]);
    assert_eq!(mount, Path::new("/run/viola/mounts/client1.sock"));
    let refused = of("web1").unwrap_err();
    assert!(
        matches!(&refused, Failure::Usage(e) if e.contains("neither as reader nor as datanode")),
        "{refused}"
    );
}
