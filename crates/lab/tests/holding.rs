// SPDX-License-Identifier: Apache-2.0
//! Labs are held, ended, killed and swept. Needs root and the image that `scripts/lab-image.sh`
//! makes.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use support::{ONE, TWO, boot, core, gone, paths, session, turn, wait_for};
use viola_lab::{Error, Lab, Spec, cli};

#[test]
fn a_second_lab_of_the_same_name_is_refused() {
    let bench = boot("t-busy", ONE);
    let spec = Spec::of_guests("t-busy", 1, &[]).unwrap();
    let error = Lab::up(&spec, &paths(&bench.run)).err().unwrap();
    assert!(matches!(error, Error::AlreadyRunning { .. }), "{error}");
    assert_eq!(error.exit_code(), 2);
    bench.lab.guest("a").unwrap().ping().unwrap();
}

/// The second process of the next test: holds a lab until it is killed.
#[test]
#[ignore = "started by a_killed_lab_ends_its_guests_and_the_next_one_sweeps"]
fn hold_a_lab() {
    let Some(run) = std::env::var_os("VIOLA_TEST_RUN") else {
        return;
    };
    let text = format!(
        "[lab]\nname='t-swept'\n{}",
        TWO.replacen("cores", "weight=50\ncores", 1)
    );
    let spec = Spec::from_toml(
        &text.replace("CORE", &core().to_string()),
        "t",
        Path::new("."),
    )
    .unwrap();
    let lab = Lab::up(&spec, &paths(Path::new(&run))).unwrap();
    let pids: Vec<String> = lab.guests().iter().map(|g| g.pid().to_string()).collect();
    println!("\nheld {}", pids.join(" "));
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn a_killed_lab_ends_its_guests_and_the_next_one_sweeps() {
    let _turn = turn();
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let mut holder = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "hold_a_lab", "--ignored", "--nocapture"])
        .env("VIOLA_TEST_RUN", &run)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufReader::new(holder.stdout.take().unwrap()).lines();
    let pids: Vec<u32> = loop {
        let line = lines
            .next()
            .expect("the holder ended before its lab was up")
            .unwrap();
        if let Some(pids) = line.strip_prefix("held ") {
            break pids.split(' ').map(|p| p.parse().unwrap()).collect();
        }
    };
    assert_eq!(pids.len(), 2);
    let state = std::fs::read_to_string(run.join("t-swept/state.json")).unwrap();
    let state: serde_json::Value = serde_json::from_str(&state).unwrap();
    let group = PathBuf::from(state["cgroups"][0].as_str().unwrap());
    assert!(group.exists());

    holder.kill().unwrap();
    holder.wait().unwrap();
    wait_for("the guests' end", Duration::from_secs(30), || {
        pids.iter().all(|pid| gone(*pid))
    });
    assert!(
        run.join("t-swept").exists() && group.exists(),
        "a killed lab cannot clean up itself"
    );

    let spec = Spec::of_guests("t-swept", 1, &[core()]).unwrap();
    let lab = Lab::up(&spec, &paths(&run)).unwrap();
    assert!(
        !group.exists(),
        "the next lab removes the killed one's cgroup"
    );
    assert!(
        !run.join("t-swept/b.log").exists(),
        "the next lab begins with an empty folder"
    );
    // a guest's process that had not yet asked to end with its kernel
    let left: Vec<u32> = pids.iter().flat_map(|pid| session(*pid)).collect();
    assert!(left.is_empty(), "left of the killed guests: {left:?}");
    lab.guest("vm1").unwrap().ping().unwrap();
    lab.down().unwrap();
}

/// The second process of the last test: runs the commands that a user types, one after the other.
#[test]
#[ignore = "started by the_commands_start_use_and_end_a_lab"]
fn type_commands() {
    let Some(folder) = std::env::var_os("VIOLA_TEST_FOLDER") else {
        return;
    };
    let file = Path::new(&folder).join("t.toml");
    // with one test thread the test's name would precede the first line
    let supervise = [
        "--exact",
        "be_the_supervisor",
        "--ignored",
        "--nocapture",
        "--test-threads=2",
    ]
    .map(Into::into)
    .to_vec();
    let up = cli::Up {
        spec: file,
        foreground: false,
        supervise,
    };
    cli::up(&up).unwrap();
    let _lab = DownOnPanic;
    let list = cli::list();
    assert!(
        list.contains("t-cli") && list.contains("10.77.0.12") && list.contains("echo"),
        "{list}"
    );
    let error = cli::up(&up).unwrap_err();
    assert_eq!(error.exit_code(), 2, "{error}");
    assert!(
        error.to_string().contains("`t-cli` is running already"),
        "{error}"
    );

    let words = |words: &[&str]| words.iter().map(|w| String::from(*w)).collect::<Vec<_>>();
    assert_eq!(
        cli::sh("t-cli/b", &words(&["sh", "-c", "exit 3"])).unwrap(),
        3
    );
    let error = cli::sh("c", &words(&["true"])).unwrap_err();
    assert!(
        error.to_string().contains("has no guest `c`; it has a, b"),
        "{error}"
    );
    println!();
    assert_eq!(cli::sh("a", &[]).unwrap(), 0);
    cli::reboot("a").unwrap();
    assert_eq!(cli::down(None).unwrap(), "t-cli");
    assert!(cli::labs().is_empty());
    assert_eq!(cli::down(Some("t-cli")).unwrap_err().exit_code(), 2);
}

/// Ends the lab of a failed [`type_commands`]: its supervisor is no child of the test.
struct DownOnPanic;

impl Drop for DownOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = cli::down(Some("t-cli"));
        }
    }
}

/// The process that holds the lab of the last test.
#[test]
#[ignore = "started by type_commands"]
fn be_the_supervisor() {
    let file = std::env::args().next_back().unwrap();
    // it reports its error to the process that started it
    let _ = cli::supervise(Path::new(&file));
}

#[test]
fn the_commands_start_use_and_end_a_lab() {
    let _turn = turn();
    let folder = tempfile::tempdir().unwrap();
    let text = format!("[lab]\nname='t-cli'\n{TWO}workloads=[{{kind='echo'}}]\n");
    std::fs::write(
        folder.path().join("t.toml"),
        text.replace("CORE", &core().to_string()),
    )
    .unwrap();
    let mut typist = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "type_commands", "--ignored", "--nocapture"])
        .env("VIOLA_TEST_FOLDER", folder.path())
        .env("VIOLA_LAB_RUN", folder.path().join("run"))
        .env("VIOLA_LAB_IMAGE", &paths(folder.path()).image)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    typist
        .stdin
        .take()
        .unwrap()
        .write_all(b"echo answer $((6*7))\n")
        .unwrap();
    let output = typist.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(
        text.contains("answer 42"),
        "the shell did not answer: {text}"
    );
}
