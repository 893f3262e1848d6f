// SPDX-License-Identifier: Apache-2.0
//! Two VMs with equal addresses in two VLANs of one bridge, whose clients see tagged frames. This needs a bridge that filters
//! VLANs, so the host is a QEMU VM in which this program runs its other test.
#![allow(clippy::unwrap_used)]

mod tenant;

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tenant::{BRIDGE, CLIENT, IP, Tenant, noise, tool};
use viola_extents::Extent;
use viola_extents::host::{Image, Layer};
use viola_handover::{disconnect_silently, extract, restore};
use viola_lab::qemu::{Image as Guest, Program, QemuVm, VmSpec};
use viola_netdev::Netns;
use viola_vpipe::transfer::{FileToSocket, StepOutcome};
use viola_vpipe::{HostConnection, Steering};

const SIZE: u64 = 4 << 20;
/// Timeout of the test in the emulated host.
const TEST_TIMEOUT: Duration = Duration::from_secs(300);
const TEST: &str = "the_host_stays_in_the_vlan_of_the_vm";

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn vms_of_equal_addresses_in_two_vlans_of_a_bridge_get_their_own_files() {
    let folder = tempfile::tempdir().unwrap();
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let image = Guest::find_from([here], "new").unwrap_or_else(|e| panic!("{e}"));
    let this = std::env::current_exe().unwrap();
    let tools = [BRIDGE.into(), IP.into()];
    let program = Program::pack_with(&this, &tools, folder.path()).unwrap();
    let spec = program.disk(VmSpec::new("vlan").memory(512));
    let machine = QemuVm::start(&spec, &image, folder.path()).unwrap();
    program.unpack(&machine).unwrap();
    let script = format!(
        "modprobe -a bridge veth 8021q && {} --ignored --exact {TEST} --nocapture 2>&1",
        program.command()
    );
    let output = machine.exec(&script, TEST_TIMEOUT).unwrap();
    let said = output.stdout;
    assert!(
        output.status == 0 && said.contains("1 passed"),
        "{said}{}",
        output.stderr
    );
    print!("{said}");
}

/// Runs in the emulated host.
#[test]
#[ignore = "needs a bridge that filters VLANs: the other test runs it where there is one"]
fn the_host_stays_in_the_vlan_of_the_vm() {
    let (host, steering) = (Netns::new().unwrap(), Steering::load().unwrap());
    host.run(|| {
        tool(IP, "link add br0 type bridge vlan_filtering 1");
        tool(IP, "link set br0 up");
    })
    .unwrap();
    let tenants = [(10, "a"), (20, "b")]
        .map(|(vlan, name)| Tenant::on("br0", Some(vlan), &host, &steering, name));
    // The VMs alternate, so that each is tested after the bridge has learnt both.
    for (seed, ipv4) in [(1, true), (2, false)] {
        for (number, tenant) in tenants.iter().enumerate() {
            serve(tenant, &steering, seed + 2 * number as u32, ipv4);
        }
    }
}

/// The host sends a file for the VM, and then the VM sends more itself.
fn serve(tenant: &Tenant, steering: &Steering, seed: u32, ipv4: bool) {
    let file = noise(SIZE as usize, seed);
    let mut image = tempfile::tempfile().unwrap();
    image.write_all(&file).unwrap();
    let image = Arc::new(Image::open(vec![Layer::raw(image)]).unwrap());
    let extent = Extent {
        logical: 0,
        physical: 0,
        length: SIZE,
        zero: false,
    };
    let map = image.check(&[extent], SIZE).unwrap();
    let mut sending = FileToSocket::new(image, map, 0, SIZE);
    let (mut client, mut guest, flow) = tenant.connect(ipv4);
    let reader = std::thread::spawn(move || {
        let mut got = vec![0; SIZE as usize + 4];
        client.read_exact(&mut got).unwrap();
        got
    });
    let flows = steering.flows();
    flows.hold(&flow, Some(CLIENT), None).unwrap();
    let state = extract(guest.as_fd()).unwrap().detach();
    let socket = tenant.vm_netns.socket(flow.guest).unwrap();
    let veth = tenant.vm_netns.veth();
    let end = HostConnection::restore(flows, veth, socket, flow, &state, None).unwrap();
    let begun = Instant::now();
    loop {
        let (_, turn) = sending.step(end.socket(), 1 << 20).unwrap();
        if turn == StepOutcome::Done && end.unacknowledged_bytes().unwrap() == 0 {
            break;
        }
        if turn != StepOutcome::BudgetUsed {
            std::thread::sleep(Duration::from_millis(1));
        }
        let took = begun.elapsed();
        assert!(took < Duration::from_secs(60), "{} left", sending.left());
    }
    let state = end.extract(flows, None).unwrap().unwrap();
    disconnect_silently(guest.as_fd()).unwrap();
    let ready = restore(guest.as_fd(), &state).unwrap();
    flows.release(&flow).unwrap();
    ready.activate().unwrap();
    guest.write_all(b"tail").unwrap();
    let got = reader.join().unwrap();
    assert!(got[..SIZE as usize] == file && got[SIZE as usize..] == *b"tail");
}
