// SPDX-License-Identifier: Apache-2.0
//! Descriptions that are read, and those that are refused with file, line and key.

use super::*;

fn error(text: &str) -> String {
    Spec::from_toml(text, "x.toml", Path::new("/d"))
        .unwrap_err()
        .to_string()
}

fn good(text: &str) -> Spec {
    Spec::from_toml(text, "x.toml", Path::new("/d")).unwrap()
}

#[test]
fn guests_get_the_next_free_addresses() {
    let spec = good(
        "[lab]\nname='t'\n[[guest]]\nname='a'\n[[guest]]\nname='b'\ntaps=[{address='10.77.0.12/24'}]\n[[guest]]\nname='c'\n",
    );
    let addresses: Vec<String> = spec
        .guests
        .iter()
        .map(|g| g.taps[0].address.to_string())
        .collect();
    assert_eq!(addresses, ["10.77.0.11", "10.77.0.12", "10.77.0.13"]);
    assert_eq!(spec.guests[2].taps[0].mac, [2, 0, 10, 77, 0, 13]);
}

#[test]
fn nics_are_spread_over_the_bridges() {
    let spec = good(
        "[lab]\nname='t'\n[[bridge]]\nname='br0'\naddress='10.77.0.1/24'\n[[bridge]]\nname='br1'\naddress='10.78.0.1/24'\n[[guest]]\nname='a'\ntaps=3\n",
    );
    let bridges: Vec<&str> = spec.guests[0]
        .taps
        .iter()
        .map(|t| t.bridge.as_str())
        .collect();
    assert_eq!(bridges, ["br0", "br1", "br0"]);
}

#[test]
fn a_relative_image_is_relative_to_the_file() {
    let spec = good("[lab]\nname='t'\n[[guest]]\nname='a'\ndisks=[{image='x.img',size='1M'}]\n");
    assert_eq!(spec.guests[0].disks[0].image, Path::new("/d/x.img"));
    assert_eq!(spec.guests[0].disks[0].size, Some(1 << 20));
}

#[test]
fn an_unknown_key_is_reported_with_its_line() {
    let text = error("[lab]\nname='t'\n[[guest]]\nname='a'\nmemroy='96M'\n");
    assert!(
        text.starts_with("x.toml: line 5: unknown field `memroy`"),
        "{text}"
    );
}

#[test]
fn a_bad_unit_is_reported_with_its_line() {
    let text = error("[lab]\nname='t'\n[[guest]]\nname='a'\nmemory='96MB'\n");
    assert_eq!(
        text,
        "x.toml: line 5: size `96MB` has the unit `MB`; use K, M or G"
    );
}

#[test]
fn a_duplicate_name_is_reported_with_its_line() {
    let text = error("[lab]\nname='t'\n[[guest]]\nname='a'\n[[guest]]\nmemory='64M'\nname='a'\n");
    assert_eq!(text, "x.toml: line 7: `name`: two guests are called `a`");
}

#[test]
fn an_address_outside_the_bridge_is_reported_with_its_line() {
    let text = error("[lab]\nname='t'\n[[guest]]\nname='a'\ntaps=[{address='10.9.0.2/24'}]\n");
    assert_eq!(
        text,
        "x.toml: line 5: `taps`: address 10.9.0.2/24 is not in the subnet of bridge `br0` (10.77.0.1/24)"
    );
}

#[test]
fn an_unknown_vmm_is_refused() {
    let text = error("[lab]\nname='t'\nvmm='kvm'\n");
    assert!(
        text.starts_with("x.toml: line 3: vmm `kvm` is not supported"),
        "{text}"
    );
    assert!(text.contains("\"uml\""), "{text}");
}

#[test]
fn keys_of_qemu_are_for_guests_of_qemu() {
    let text = error("[lab]\nname='t'\naccel='kvm'\n");
    assert_eq!(
        text,
        "x.toml: line 3: `accel` is for guests with vmm = \"qemu\""
    );
    let text =
        "[lab]\nname='t'\nvmm='qemu'\naccel='tcg'\nkernel='k/bzImage'\n[[guest]]\nname='a'\n";
    let spec = read(text, "x.toml", Path::new("/f")).unwrap();
    let qemu = QemuSpec {
        accel: Some(Accel::Tcg),
        kernel: Some("/f/k/bzImage".into()),
    };
    assert_eq!(spec.vmm, Vmm::Qemu(qemu));
    assert_eq!(spec.guests[0].memory, DEFAULT_QEMU_MEMORY);
}

#[test]
fn a_wrong_workload_is_reported_with_its_line() {
    let text =
        error("[lab]\nname='t'\n[[guest]]\nname='a'\n[[guest.workloads]]\nkind='hog'\ndutty=3\n");
    assert!(
        text.contains("dutty") && text.starts_with("x.toml: line 5: workload"),
        "{text}"
    );
    let text =
        error("[lab]\nname='t'\n[[guest]]\nname='a'\n[[guest.workloads]]\nkind='hog'\nduty=300\n");
    assert!(
        text.contains("`duty` is 300; it must be 1 to 100"),
        "{text}"
    );
}

#[test]
fn a_workload_is_named_after_its_kind_by_default() {
    let spec = good(
        "[lab]\nname='t'\n[[guest]]\nname='a'\nworkloads=[{kind='echo'},{kind='hog',name='h2',duty=40}]\n",
    );
    let names: Vec<&str> = spec.guests[0]
        .workloads
        .iter()
        .map(|w| w.0.as_str())
        .collect();
    assert_eq!(names, ["echo", "h2"]);
}

#[test]
fn default_guests_are_alike() {
    let spec = Spec::of_guests("four", 4, &[1]).unwrap();
    assert_eq!(spec.guests.len(), 4);
    assert!(
        spec.guests
            .iter()
            .all(|g| g.cores == [1] && g.memory == DEFAULT_MEMORY)
    );
}
