// SPDX-License-Identifier: Apache-2.0

use super::*;

/// Runs `script` instead of the client process and looks for pid files in `folder`.
fn launch(folder: &Path, script: &str) -> Launch {
    let sleeper = folder.join("libvirtd");
    let _ = std::os::unix::fs::symlink("/bin/sleep", &sleeper);
    Launch {
        command: ["/bin/sh", "-c", script].map(str::to_owned).into(),
        run: folder.to_owned(),
    }
}

/// A process with the name of the libvirt daemon.
struct Daemon(Child);

impl Daemon {
    fn start(folder: &Path) -> Self {
        let daemon = Self(
            Command::new(folder.join("libvirtd"))
                .arg("60")
                .spawn()
                .unwrap(),
        );
        std::fs::write(folder.join("libvirtd.pid"), format!("{}\n", daemon.0.id())).unwrap();
        daemon
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < end, "not {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

const HERE: &str =
    r#"echo '{"word":"connected","domains":[{"name":"db01","uuid":"u1","state":"running"}]}'; "#;

#[test]
fn events_are_received_and_a_closed_connection_is_reopened() {
    let folder = tempfile::tempdir().unwrap();
    let go = folder.path().join("go");
    let wait = format!("while [ ! -e {} ]; do sleep 0.05; done; ", go.display());
    let script = format!(
        "{HERE}{wait}rm {0}; \
         echo '{{\"word\":\"event\",\"domain\":{{\"name\":\"web\",\"uuid\":\"u2\",\"state\":\"paused\"}},\"what\":\"suspended\"}}'; \
         echo '{{\"word\":\"of tomorrow\"}}'; \
         echo '{{\"word\":\"event\",\"domain\":{{\"name\":\"db01\",\"uuid\":\"u1\",\"state\":\"off\"}},\"what\":\"stopped\"}}'; \
         {wait}echo '{{\"word\":\"disconnected\",\"why\":\"it has ended\",\"no_library\":false}}'; rm {0}",
        go.display()
    );
    let launch = launch(folder.path(), &script);
    let libvirt = Libvirt::start(launch).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    assert!(!libvirt.shown().connected, "connected while no daemon runs");
    assert_eq!(libvirt.shown().why, "libvirt's daemon does not run");
    let daemon = Daemon::start(folder.path());
    until("connected", || libvirt.shown().connected);
    assert!(libvirt.take_changed());
    assert!(!libvirt.take_changed());
    assert_eq!(libvirt.domains().unwrap()["u1"].name, "db01");

    std::fs::write(&go, "").unwrap();
    until("both events", || libvirt.shown().events == 2);
    assert!(libvirt.take_changed());
    let domains = libvirt.domains().unwrap();
    assert_eq!(
        domains.keys().collect::<Vec<_>>(),
        ["u2"],
        "the other one is off"
    );
    assert_eq!(domains["u2"].state, DomainState::Paused);

    until("the script has gone on", || !go.exists());
    std::fs::write(&go, "").unwrap();
    until("gone", || libvirt.shown().why == "it has ended");
    assert!(libvirt.take_changed());
    assert!(libvirt.domains().is_none());
    // A daemon that closed the connection is about to exit. A new connection would make systemd start another daemon.
    std::thread::sleep(3 * MIN_RETRY_DELAY);
    assert!(
        !libvirt.shown().connected,
        "connected while the daemon ends"
    );
    assert_eq!(libvirt.shown().why, "it has ended");
    drop(daemon);
    let _daemon = Daemon::start(folder.path());
    until("connected again", || libvirt.shown().connected);
    assert_eq!(libvirt.domains().unwrap().len(), 1);
}

#[test]
fn a_killed_process_is_restarted_and_the_last_one_ends_with_the_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let pid = folder.path().join("pid");
    let script = format!("echo $$ >{}; {HERE}exec sleep 60", pid.display());
    let launch = launch(folder.path(), &script);
    let _daemon = Daemon::start(folder.path());
    let libvirt = Libvirt::start(launch).unwrap();
    let number = || -> Option<i32> { std::fs::read_to_string(&pid).ok()?.trim().parse().ok() };
    until("connected", || libvirt.shown().connected);
    let first = number().unwrap();
    // SAFETY: a plain system call on a child process of this test.
    unsafe { libc::kill(first, libc::SIGKILL) };
    until("another process", || {
        number().is_some_and(|n| n != first) && libvirt.shown().connected
    });
    let last = number().unwrap();
    drop(libvirt);
    assert!(
        !Path::new(&format!("/proc/{last}")).exists(),
        "the last process did not end"
    );
}

#[test]
fn an_endless_line_ends_the_process() {
    let folder = tempfile::tempdir().unwrap();
    let launch = launch(
        folder.path(),
        "head -c 3000000 /dev/zero | tr '\\0' a; sleep 60",
    );
    let _daemon = Daemon::start(folder.path());
    let libvirt = Libvirt::start(launch).unwrap();
    until("the process is given up", || {
        libvirt.shown().why == "the process that reads libvirt's events has ended"
    });
}
