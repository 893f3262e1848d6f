// SPDX-License-Identifier: Apache-2.0
use proptest::prelude::*;

use super::*;

/// As `virsh dumpxml --inactive` of libvirt 11.3 writes it, shortened.
const DOMAIN: &str = "<domain type='kvm'>
  <name>dn1</name>
  <uuid>6b5a8a52-0a5b-4b52-9d5c-111111111111</uuid>
  <memory unit='KiB'>131072</memory>
  <vcpu placement='static' cpuset='1'>2</vcpu>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <controller type='pci' index='0' model='pcie-root'/>
    <channel type='unix'>
      <target type='virtio' name='org.qemu.guest_agent.0'/>
    </channel>
    <memballoon model='none'/>
  </devices>
</domain>
";

const ALL: [Use; 5] = Use::ALL;

fn names(name: &str) -> VmNames {
    VmNames {
        name: name.into(),
        mount: format!("/run/viola/mounts/{name}.sock").into(),
    }
}

fn refused(xml: &str, uses: &[Use]) -> DomainError {
    prepare(xml, uses, &names("dn1")).unwrap_err()
}

fn prepared(xml: &str, uses: &[Use]) -> Prepared {
    prepare(xml, uses, &names(&name(xml).unwrap())).unwrap()
}

#[test]
fn a_datanode_gets_its_channel_and_a_second_qmp_socket() {
    let done = prepared(DOMAIN, &[Use::Datanode]);
    assert_eq!(done.added, [Part::AgentChannel, Part::EventSocket]);
    assert_eq!(done.present, []);
    let expected = "<domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0' type='kvm'>
  <name>dn1</name>
  <uuid>6b5a8a52-0a5b-4b52-9d5c-111111111111</uuid>
  <memory unit='KiB'>131072</memory>
  <vcpu placement='static' cpuset='1'>2</vcpu>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <controller type='pci' index='0' model='pcie-root'/>
    <channel type='unix'>
      <target type='virtio' name='org.qemu.guest_agent.0'/>
    </channel>
    <memballoon model='none'/>
    <channel type='unix'>
      <target type='virtio' name='org.viola.agent.0'/>
    </channel>
  </devices>
  <qemu:commandline>
    <qemu:arg value='-qmp'/>
    <qemu:arg value='unix:/var/lib/libvirt/qemu/viola-dn1.events.qmp,server=on,wait=off'/>
  </qemu:commandline>
  <metadata>
    <viola:prepared xmlns:viola='urn:viola:prepared:1' for='datanode' parts='agent-channel event-socket'/>
  </metadata>
</domain>
";
    assert_eq!(done.xml, expected);
}

#[test]
fn a_reader_gets_shared_memory_and_the_mount() {
    let done = prepared(DOMAIN, &[Use::Reader]);
    assert_eq!(
        done.added,
        [Part::MemorySource, Part::SharedMemory, Part::BlocksMount]
    );
    assert!(
        done.xml
            .contains("    <source type='memfd'/>\n    <access mode='shared'/>\n"),
        "{}",
        done.xml
    );
    assert!(
        done.xml
            .contains("<source socket='/run/viola/mounts/dn1.sock'/>"),
        "{}",
        done.xml
    );
}

#[test]
fn huge_pages_stay_and_private_memory_is_refused() {
    let pages = "  <memoryBacking>\n    <hugepages/>\n  </memoryBacking>\n  <vcpu";
    let huge = DOMAIN.replace("  <vcpu", pages);
    let done = prepared(&huge, &[Use::Reader]);
    assert!(
        done.xml
            .contains("    <hugepages/>\n    <access mode='shared'/>\n  </memoryBacking>"),
        "{}",
        done.xml
    );
    assert_eq!(unprepare(&done.xml, None).unwrap().0, huge);

    let private = huge.replace("<hugepages/>", "<access mode='private'/>");
    assert_eq!(
        refused(&private, &[Use::Reader]),
        DomainError::PrivateMemory
    );
    let shared = huge.replace("<hugepages/>", "<access mode='shared'/>");
    assert_eq!(
        prepared(&shared, &[Use::Reader]).present,
        [Part::SharedMemory]
    );
}

#[test]
fn what_the_operator_has_made_is_found_and_stays() {
    let own = DOMAIN.replace("org.qemu.guest_agent.0", "org.viola.agent.0");
    let done = prepared(&own, &[Use::Vpipe]);
    assert_eq!(
        (done.added, done.present),
        (vec![Part::EventSocket], vec![Part::AgentChannel])
    );
    let (back, gone) = unprepare(&done.xml, None).unwrap();
    assert_eq!(gone, [Part::EventSocket]);
    assert!(back.contains("org.viola.agent.0"), "{back}");
}

#[test]
fn a_part_that_another_use_needs_stays() {
    let both = prepared(DOMAIN, &[Use::Datanode, Use::Vpipe]);
    let (xml, gone) = unprepare(&both.xml, Some(&[Use::Datanode])).unwrap();
    assert_eq!(gone, []);
    assert!(xml.contains("for='vpipe'"), "{xml}");
    let (xml, gone) = unprepare(&xml, Some(&[Use::Vpipe])).unwrap();
    assert_eq!(gone, [Part::AgentChannel, Part::EventSocket]);
    assert!(!xml.contains("viola"), "{xml}");
}

#[test]
fn the_socket_of_a_lane_comes_before_the_socket_for_events() {
    let done = prepared(&prepared(DOMAIN, &[Use::Vpipe]).xml, &[Use::Lane]);
    let at = |what: &str| done.xml.find(what).unwrap();
    assert!(
        at("viola-dn1.lane.qmp") < at("viola-dn1.events.qmp"),
        "{}",
        done.xml
    );
    // The same at once: the last of all is the one for events.
    let both = prepared(DOMAIN, &[Use::Lane, Use::Vpipe]);
    let at = |what: &str| both.xml.find(what).unwrap();
    assert!(
        at("viola-dn1.lane.qmp") < at("viola-dn1.events.qmp"),
        "{}",
        both.xml
    );
}

#[test]
fn arguments_of_the_operator_stay() {
    let own = DOMAIN.replace("<domain ", "<domain xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0' ").replace(
        "</domain>",
        "  <q:commandline>\n    <q:arg value='-d'/>\n    <q:arg value='int'/>\n  </q:commandline>\n</domain>",
    );
    let done = prepared(&own, &[Use::Vpipe]);
    assert!(
        done.xml
            .contains("    <q:arg value='int'/>\n    <q:arg value='-qmp'/>\n"),
        "{}",
        done.xml
    );
    assert_eq!(unprepare(&done.xml, None).unwrap().0, own);
}

#[test]
fn a_name_is_quoted_for_xml_and_for_qemu() {
    let odd = DOMAIN.replace("<name>dn1</name>", "<name>a&amp;b,c'd</name>");
    let done = prepared(&odd, &[Use::Datanode, Use::Reader]);
    assert!(
        done.xml
            .contains("viola-a&amp;b,,c&apos;d.events.qmp,server=on"),
        "{}",
        done.xml
    );
    assert!(
        done.xml.contains("mounts/a&amp;b,c&apos;d.sock"),
        "{}",
        done.xml
    );
    let again = prepared(&done.xml, &[Use::Datanode, Use::Reader]);
    assert_eq!(again.added, []);
    assert_eq!(unprepare(&again.xml, None).unwrap().1.len(), 5);
}

#[test]
fn a_turbo_vcpu_needs_a_second_one() {
    let one = DOMAIN.replace(">2</vcpu>", ">1</vcpu>");
    assert_eq!(refused(&one, &[Use::Turbo]), DomainError::OneVcpu);
    let few = DOMAIN.replace("<vcpu ", "<vcpu current='1' ");
    assert_eq!(refused(&few, &[Use::Turbo]), DomainError::OneVcpu);
    assert_eq!(prepared(DOMAIN, &[Use::Turbo]).added, []);
}

#[test]
fn a_lane_needs_pci_express() {
    let old = DOMAIN.replace(
        "<vcpu",
        "<os><type arch='x86_64' machine='pc-i440fx-9.2'>hvm</type></os>\n  <vcpu",
    );
    assert!(matches!(
        refused(&old, &[Use::Lane]),
        DomainError::NoPcie(_)
    ));
    let new = old.replace("pc-i440fx-9.2", "pc-q35-9.2");
    assert_eq!(prepared(&new, &[Use::Lane]).added.len(), 3);
}

#[test]
fn a_root_port_with_a_device_behind_it_stays() {
    let port =
        |index| format!("    <controller type='pci' index='{index}' model='pcie-root-port'/>\n");
    let nic = "    <interface type='bridge'><address type='pci' bus='0x03'/></interface>\n";
    let done = prepared(DOMAIN, &[Use::Lane]);
    // As libvirt writes it back: with numbers, the added one no longer the last.
    let added = "    <controller type='pci' model='pcie-root-port'/>\n";
    let numbered = done
        .xml
        .replace(added, &format!("{}{}{nic}", port(2), port(3)));
    let back = unprepare(&numbered, None).unwrap().0;
    assert!(
        back.contains(&port(3)) && !back.contains(&port(2)),
        "{back}"
    );
}

#[test]
fn what_is_no_domain_is_refused() {
    for text in ["", "<domain>", "<network/>", "<domain><name>a</domain>"] {
        let refused = refused(text, &[Use::Datanode]);
        assert!(
            matches!(refused, DomainError::Unreadable(_)),
            "{text}: {refused:?}"
        );
    }
}

#[test]
fn a_domain_on_one_line_is_changed_too() {
    let flat = "<domain type='kvm'><name>a</name><vcpu>2</vcpu><devices/></domain>";
    let done = prepared(flat, &ALL);
    assert_eq!(done.added.len(), Part::ALL.len());
    assert_eq!(prepared(&done.xml, &ALL).added, []);
    let (back, gone) = unprepare(&done.xml, None).unwrap();
    assert_eq!(gone.len(), Part::ALL.len());
    assert!(!back.contains("viola"), "{back}");
}

#[test]
fn memory_is_as_it_was() {
    let backing = |inner: &str| {
        let lines = format!("  <memoryBacking>\n    {inner}\n  </memoryBacking>\n  <vcpu");
        DOMAIN.replace("  <vcpu", &lines)
    };
    for own in ["<source type='memfd'/>", "<locked/>", "<hugepages/>"] {
        let own = backing(own);
        let done = prepared(&own, &[Use::Reader]);
        assert_eq!(unprepare(&done.xml, None).unwrap().0, own);
    }
    // A device of the operator's that needs the memory has come since: it stays shared.
    let disk = "    <filesystem type='mount'><driver type='virtiofs'/><source dir='/srv'/></filesystem>\n  </devices>";
    let done = prepared(DOMAIN, &[Use::Reader])
        .xml
        .replace("  </devices>", disk);
    let (text, gone) = unprepare(&done, None).unwrap();
    assert_eq!(gone, [Part::BlocksMount]);
    assert!(
        text.contains("<access mode='shared'/>") && !text.contains("viola"),
        "{text}"
    );
}

#[test]
fn a_renamed_vm_gets_a_socket_of_its_own() {
    let done = prepared(DOMAIN, &[Use::Datanode]);
    let renamed = done.xml.replace("<name>dn1<", "<name>dn2<");
    let done = prepared(&renamed, &[Use::Datanode]);
    assert_eq!(done.added, [Part::EventSocket]);
    assert!(
        done.xml.contains("viola-dn2.events.qmp") && !done.xml.contains("viola-dn1"),
        "{}",
        done.xml
    );
    let again = done.xml.replace("<name>dn2<", "<name>dn3<");
    let (text, gone) = unprepare(&again, None).unwrap();
    assert_eq!(gone, [Part::AgentChannel, Part::EventSocket]);
    assert!(!text.contains("viola"), "{text}");
}

#[test]
fn a_root_port_that_another_device_took_is_made_up_for() {
    let done = prepared(DOMAIN, &[Use::Lane]).xml;
    assert_eq!(with_free_port(&done).unwrap(), None);
    assert_eq!(with_free_port(DOMAIN).unwrap(), None, "no lane");
    let added = "<controller type='pci' model='pcie-root-port'/>";
    let taken = "<controller type='pci' index='3' model='pcie-root-port'/><sound><address type='pci' bus='0x03'/></sound>";
    let taken = done.replace(added, taken);
    let more = with_free_port(&taken).unwrap().unwrap();
    assert_eq!(with_free_port(&more).unwrap(), None);
    // The address of a device of the host is none of the VM.
    let host = "<controller type='pci' index='3' model='pcie-root-port'/><source><address type='pci' bus='0x03'/></source>";
    assert_eq!(with_free_port(&done.replace(added, host)).unwrap(), None);
}

#[test]
fn what_libvirt_writes_back_is_known() {
    let done = prepared(DOMAIN, &ALL).xml.replace('\'', "\"");
    let again = prepared(&done, &ALL);
    assert_eq!((again.added, &again.xml), (vec![], &done));
    let left = unprepare(&done, None).unwrap();
    assert_eq!(left.1, Part::ALL);
    assert!(!left.0.contains("viola"), "{}", left.0);
}

#[test]
fn a_name_that_is_too_long_for_a_socket_is_refused() {
    let long = names(&"x".repeat(80));
    let refused = prepare(DOMAIN, &[Use::Datanode], &long).unwrap_err();
    assert!(matches!(refused, DomainError::LongName(_)), "{refused}");
}

proptest! {
    #[test]
    fn what_was_added_goes_and_nothing_else(chosen in proptest::collection::vec(0..5usize, 1..6), order in any::<u64>()) {
        let mut text = prepared(DOMAIN, &[]).xml;
        prop_assert_eq!(&text, DOMAIN);
        for i in &chosen {
            text = prepared(&text, &[ALL[*i]]).xml;
            let again = prepared(&text, &[ALL[*i]]);
            prop_assert_eq!(&again.xml, &text, "a second time changes nothing");
        }
        let mut left = chosen.clone();
        while !left.is_empty() {
            let use_ = left.remove(order as usize % left.len());
            text = unprepare(&text, Some(&[ALL[use_]])).unwrap().0;
        }
        let plain = text.replace(" xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'", "");
        prop_assert_eq!(plain, DOMAIN);
    }
}
