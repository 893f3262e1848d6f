// SPDX-License-Identifier: Apache-2.0
//! The first page's step in a VM: Debian with systemd and nginx as its packages configure them, and the package `viola-agent`.

use std::path::Path;
use std::time::{Duration, Instant};

use viola_lab::qemu::{Image, QemuVm, VmSpec};
use viola_proto::pipe::status::PipeStats;

use crate::client::Client;
use crate::common::Daemon;
use crate::common::guests::within;
use crate::first_page;
use crate::rig::{GUEST, MIB, guest_permit, noise, senders, wait_until_served};
use crate::vm::{CHANGE_TIMEOUT, connect, ext4, network};

/// Timeout of a start of systemd in an emulated PC.
const BOOT_TIMEOUT: Duration = Duration::from_secs(180);

/// The step in the VM.
fn step_in_the_vm() -> &'static str {
    let steps = first_page::steps("A web server's files, in three steps");
    match steps[2][..] {
        [command] => command,
        _ => panic!("{steps:?}"),
    }
}

fn served(daemon: &Daemon) -> PipeStats {
    senders(daemon)[0].work.clone()
}

#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn nginx_of_a_debian_is_served_after_one_command() {
    let begin = Instant::now();
    let folder = tempfile::tempdir().unwrap();
    let _permit = guest_permit();
    // The two lines of the page, with the name of a VM that no libvirt confirms.
    let mut daemon =
        Daemon::start("[slices]\nenabled = false\n[[vm]]\nname = \"qemu:qp-debian\"\n[vm.pipe]\n");
    network();
    let file = noise(7, 40 * MIB);
    let tree = folder.path().join("tree");
    std::fs::create_dir(&tree).unwrap();
    std::fs::write(tree.join("f"), &file).unwrap();
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let package = here.join(format!(
        "../../build/deb/debug/viola-agent_{}-1_amd64.deb",
        env!("CARGO_PKG_VERSION")
    ));
    assert!(
        package.exists(),
        "there is no {}; run scripts/deb.sh --debug",
        package.display()
    );
    let image = Image::find_from([here], "debian").unwrap_or_else(|e| panic!("{e}"));
    let root = image.kernel().with_file_name("root.img");
    let mut spec = VmSpec::new("qp-debian")
        .memory(1024)
        .disk("root", &root, "raw,snapshot=on")
        .disk(
            "files",
            &ext4(folder.path(), "f.img", &tree, 256 * MIB),
            "raw",
        )
        .disk("package", &package, "raw,readonly=on")
        .tap("tap0", "52:54:00:77:00:11")
        .agent();
    spec.boot_timeout = BOOT_TIMEOUT;
    let machine = QemuVm::start(&spec, &image, folder.path()).unwrap_or_else(|e| panic!("{e}"));
    println!("{:.0} s: Debian is up", begin.elapsed().as_secs_f32());
    let sh = |script: &str| {
        machine
            .sh(script)
            .unwrap_or_else(|e| panic!("{script}: {e}"))
    };
    sh(&format!(
        "mkdir -p /srv/www; mount /dev/vdb /srv/www; \
         sed -i 's|^\\troot /var/www/html;|\\troot /srv/www;|' /etc/nginx/sites-available/default; \
         grep -q 'root /srv/www;' /etc/nginx/sites-available/default; systemctl restart nginx; \
         ip address add {GUEST}/24 dev eth0; ip link set eth0 up; \
         head -c {} /dev/vdc >/root/agent.deb; dpkg -i /root/agent.deb",
        package.metadata().unwrap().len()
    ));
    let fetch = || Client::of(connect(80).unwrap()).fetch("/f", &file);
    within(CHANGE_TIMEOUT, "nginx listens", || connect(80).is_ok());
    fetch();

    let said = sh(step_in_the_vm());
    println!("{:.0} s: {said}", begin.elapsed().as_secs_f32());
    assert!(
        said.contains("done: systemctl restart nginx.service"),
        "{said}"
    );
    assert!(!said.contains("left to do"), "{said}");
    wait_until_served(&mut daemon, 1);
    let before = served(&daemon).begun;
    within(CHANGE_TIMEOUT, "the host sends for nginx", || {
        fetch();
        served(&daemon).begun > before
    });
    within(CHANGE_TIMEOUT, "the connections are back", || {
        let work = served(&daemon);
        work.transfers.is_empty() && work.returned == work.begun && work.bytes > 30 * MIB as u64
    });
    println!(
        "{:.0} s: {:?}",
        begin.elapsed().as_secs_f32(),
        served(&daemon)
    );

    let said = sh("viola-agent setup --remove --now");
    assert!(
        said.contains("removed /etc/systemd/system/nginx.service.d/viola.conf"),
        "{said}"
    );
    let begun = served(&daemon).begun;
    within(CHANGE_TIMEOUT, "nginx listens again", || {
        connect(80).is_ok()
    });
    fetch();
    assert_eq!(served(&daemon).begun, begun, "nginx has the library still");
    sh(
        "! grep -q vpipe /proc/$(systemctl show -p MainPID --value nginx)/maps; test ! -e /etc/systemd/system/nginx.service.d",
    );
    println!("{:.0} s: as before", begin.elapsed().as_secs_f32());
}
