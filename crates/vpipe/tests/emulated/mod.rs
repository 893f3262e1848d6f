// SPDX-License-Identifier: Apache-2.0
//! Tests of a host's kernel that this host's kernel may not have: they run in a QEMU VM.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use viola_extents::Extent;
use viola_extents::host::{Image, Layer};
use viola_handover::{disconnect_silently, extract, restore};
use viola_lab::qemu::{Image as Guest, Program, QemuVm, VmSpec};
use viola_vpipe::transfer::{FileToSocket, StepOutcome};
use viola_vpipe::{HostConnection, Steering};

use crate::tenant::{CLIENT, Tenant, noise};

/// Size of the file that the host sends, bytes.
pub const SIZE: u64 = 4 << 20;
/// Timeout of the test in the emulated host.
const TEST_TIMEOUT: Duration = Duration::from_secs(300);

/// Boots a host with these kernel modules and tools, and runs the ignored test of this name there.
pub fn run(test: &str, tools: &[&str], modules: &str) {
    let folder = tempfile::tempdir().unwrap();
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let image = Guest::find_from([here], "new").unwrap_or_else(|e| panic!("{e}"));
    let this = std::env::current_exe().unwrap();
    let tools: Vec<_> = tools.iter().map(Into::into).collect();
    let program = Program::pack_with(&this, &tools, folder.path()).unwrap();
    let spec = program.disk(VmSpec::new("host").memory(512));
    let machine = QemuVm::start(&spec, &image, folder.path()).unwrap();
    program.unpack(&machine).unwrap();
    let script = format!(
        "modprobe -a {modules} && {} --ignored --exact {test} --nocapture 2>&1",
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

/// The host sends a file for the VM, and then the VM sends more itself.
pub fn serve(tenant: &Tenant, steering: &Steering, seed: u32, ipv4: bool) {
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
