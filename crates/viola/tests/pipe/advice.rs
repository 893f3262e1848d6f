// SPDX-License-Identifier: Apache-2.0
//! A web server whose files the host could send, on a host where nobody has asked for that.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::{Advice, fadvise};
use rustix::process::Signal;

use crate::common::guests::within;
use crate::common::{Daemon, stdout};
use crate::rig::{MIB, NGINX, Web, WebSpec, guest_permit};

/// Two windows of five seconds, and time for a machine that is busy.
const ADVICE_TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn a_server_that_sends_files_from_its_disk_is_advised_to_let_the_host_send_them() {
    let _permit = guest_permit();
    let daemon = Daemon::start("[slices]\nenabled = false\n");
    // More than the guest's memory, so that its page cache does not have the file.
    let web = Web::boot(&WebSpec {
        name: "pa",
        sizes: &[MIB, 300 * MIB],
        ..WebSpec::default()
    });
    web.start(&NGINX, "");
    assert_eq!(stdout(&daemon.ask(&["advise", "--json"])).trim(), "[]");

    let image = File::open(web.folder.path().join("d.img")).unwrap();
    image.sync_all().unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Nor does that of the host.
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                fadvise(&image, 0, None, Advice::DontNeed).unwrap();
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        scope.spawn(|| {
            let mut client = web.client();
            while !is_over.load(Ordering::Relaxed) {
                client.fetch("/f1", &web.files[1]);
            }
        });
        let advised = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            within(ADVICE_TIMEOUT, "advice", || {
                stdout(&daemon.ask(&["advise"])).contains("vpipe")
            });
        }));
        is_over.store(true, Ordering::Relaxed);
        if let Err(panic) = advised {
            println!("{}", stdout(&daemon.ask(&["vms", "--json"])));
            std::panic::resume_unwind(panic);
        }
    });
    let why = stdout(&daemon.ask(&["why", "pa-web"]));
    println!("{why}{}", daemon.log());
    assert!(
        why.contains("vpipe   would help") && why.contains("from its disks and sends"),
        "{why}"
    );
    assert_eq!(daemon.log().matches("vpipe could help").count(), 1);

    // Where the operator does not want to hear of it, viola does not say it.
    let text = std::fs::read_to_string(daemon.config()).unwrap();
    let allow = "auto = { allow = [\"slices\"] }";
    std::fs::write(daemon.config(), format!("{allow}\n{text}")).unwrap();
    daemon.signal(Signal::HUP);
    within(ADVICE_TIMEOUT, "no advice", || {
        stdout(&daemon.ask(&["advise"])).starts_with("no VM would gain")
    });
}
