// SPDX-License-Identifier: Apache-2.0
//! Real guests: needs root and the image that `scripts/lab-image.sh` makes.
#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::io::{BufRead, Write};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use viola_lab::load::{
    Client, Http, Ping, TcpRr, UdpFlood, http, ping, tcp_rr, tcp_stream, udp_flood,
};
use viola_lab::wire::{Pattern, Workload};
use viola_lab::{Error, Lab, Paths, Spec, cli};

/// One lab at a time: they share a core.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn paths(run: &Path) -> Paths {
    let found = Paths::find_from([Path::new(env!("CARGO_MANIFEST_DIR"))]);
    Paths {
        run: run.into(),
        ..found.unwrap_or_else(|error| panic!("{error}"))
    }
}

/// Guests of tests stay off core 0 where there is another.
fn core() -> usize {
    usize::from(std::thread::available_parallelism().unwrap().get() > 1)
}

struct Bench {
    lab: Lab,
    run: PathBuf,
    _folder: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

/// Boots a lab of the given guests; `CORE` in the text becomes the core's number.
fn boot(name: &str, guests: &str) -> Bench {
    let turn = turn();
    let folder = tempfile::tempdir().unwrap();
    let text = format!("[lab]\nname='{name}'\n{guests}").replace("CORE", &core().to_string());
    let spec = Spec::from_toml(&text, name, folder.path()).unwrap();
    let run = folder.path().join("run");
    let lab = Lab::up(&spec, &paths(&run)).unwrap_or_else(|error| panic!("{}", error.full()));
    Bench {
        lab,
        run,
        _folder: folder,
        _turn: turn,
    }
}

const TWO: &str = "[[guest]]\nname='a'\ncores=[CORE]\n[[guest]]\nname='b'\ncores=[CORE]\n";
const ONE: &str = "[[guest]]\nname='a'\ncores=[CORE]\n";

fn interfaces() -> HashSet<String> {
    let text = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    text.lines()
        .skip(2)
        .filter_map(|l| Some(l.split_once(':')?.0.trim().to_owned()))
        .collect()
}

/// Whether the process has ended; who reaps orphans here may take its time.
fn gone(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ")
        .is_none_or(|(_, rest)| rest.starts_with('Z'))
}

/// Living processes whose session is the guest's.
fn session(pid: u32) -> Vec<u32> {
    let member = |p: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{p}/stat")).ok()?;
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
        (fields[0] != "Z" && fields[3] == pid.to_string()).then_some(p)
    };
    let all = std::fs::read_dir("/proc").unwrap();
    all.filter_map(|e| member(e.unwrap().file_name().to_str()?.parse().ok()?))
        .collect()
}

fn wait_for(what: &str, limit: Duration, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + limit;
    while !done() {
        assert!(Instant::now() < end, "{what}: not within {limit:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn guests_run_commands_and_answer_pings_in_a_network_of_their_own() {
    let before = interfaces();
    let bench = boot("t-net", TWO);
    let lab = &bench.lab;

    let output = lab
        .guest("a")
        .unwrap()
        .exec(&["sh", "-c", "hostname; echo oops >&2; exit 3"])
        .unwrap();
    assert_eq!(
        (
            output.status,
            output.stdout.as_str(),
            output.stderr.as_str()
        ),
        (3, "a\n", "oops\n")
    );
    let output = lab
        .guest("b")
        .unwrap()
        .exec_for(&["cat"], "from the host", Duration::from_secs(20))
        .unwrap();
    assert_eq!(output.stdout, "from the host");
    let output = lab
        .guest("b")
        .unwrap()
        .exec_for(&["sleep", "60"], "", Duration::from_millis(50))
        .unwrap();
    assert!(output.timed_out);
    assert_eq!(output.status, 128 + 9);

    let options = Ping {
        count: 20,
        ..Ping::default()
    };
    for guest in lab.guests() {
        let times = ping(lab, guest.address().unwrap(), &options).unwrap();
        assert_eq!((times.sent, times.lost, times.us.len()), (20, 0, 20));
        assert!(times.us.iter().all(|us| *us > 0.0), "{:?}", times.us);
    }
    let other = lab.guest("b").unwrap().address().unwrap().to_string();
    assert_eq!(
        lab.guest("a")
            .unwrap()
            .exec(&["ping", "-c", "1", &other])
            .unwrap()
            .status,
        0
    );

    let new: Vec<String> = interfaces().difference(&before).cloned().collect();
    assert!(
        !new.iter().any(|n| n == "br0" || n.starts_with("tap")),
        "the host's own network has {new:?}"
    );
    let inside = lab.in_netns(interfaces).unwrap();
    assert!(
        ["br0", "tap0.0", "tap1.0"]
            .iter()
            .all(|n| inside.contains(*n)),
        "{inside:?}"
    );

    let pids: Vec<u32> = lab.guests().iter().map(|g| g.pid()).collect();
    let Bench {
        lab,
        run,
        _folder,
        _turn,
    } = bench;
    lab.down().unwrap();
    assert!(
        pids.iter()
            .all(|pid| gone(*pid) && session(*pid).is_empty())
    );
    assert!(
        std::fs::read_dir(run).unwrap().next().is_none(),
        "the run folder is not empty"
    );
}

#[test]
fn a_load_never_leaves_the_lab() {
    let bench = boot("t-foreign", ONE);
    for foreign in [
        Ipv4Addr::LOCALHOST,
        Ipv4Addr::new(10, 76, 0, 11),
        Ipv4Addr::new(192, 0, 2, 1),
    ] {
        let error = udp_flood(&bench.lab, foreign, &UdpFlood::default()).unwrap_err();
        assert!(matches!(error, Error::Foreign { .. }), "{error}");
        assert!(ping(&bench.lab, foreign, &Ping::default()).is_err());
        assert!(http(&bench.lab, foreign, &Http::default()).is_err());
        assert!(tcp_rr(&bench.lab, foreign, &TcpRr::default()).is_err());
    }
    let guest = bench.lab.guest("a").unwrap().address().unwrap();
    let endless = UdpFlood {
        time: Duration::from_secs(100_000),
        rate: 1,
        ..UdpFlood::default()
    };
    assert!(udp_flood(&bench.lab, guest, &endless).is_err());
}

#[test]
fn nginx_and_echo_and_sink_serve_the_host() {
    let bench = boot(
        "t-serve",
        &format!("{ONE}workloads=[{{kind='nginx'}},{{kind='echo'}},{{kind='sink'}}]\n"),
    );
    let guest = bench.lab.guest("a").unwrap();
    let address = guest.address().unwrap();

    let options = Http {
        requests: 30,
        concurrency: 3,
        ..Http::default()
    };
    let result = http(&bench.lab, address, &options).unwrap();
    assert_eq!(
        (result.times.sent, result.times.lost, result.first_failure),
        (30, 0, None)
    );
    assert!(
        result
            .connect_us
            .iter()
            .zip(&result.times.us)
            .all(|(connect, all)| connect < all)
    );
    assert!(guest.stat("nginx").unwrap().units >= 30);
    let wrong = http(
        &bench.lab,
        address,
        &Http {
            bytes: 5121,
            requests: 1,
            ..Http::default()
        },
    )
    .unwrap();
    assert_eq!(
        wrong.first_failure.unwrap(),
        "a body of 5120 bytes where 5121 were expected"
    );
    let missing = Http {
        path: "/none".into(),
        requests: 1,
        ..Http::default()
    };
    assert_eq!(
        http(&bench.lab, address, &missing)
            .unwrap()
            .first_failure
            .unwrap(),
        "status 404"
    );

    let times = tcp_rr(
        &bench.lab,
        address,
        &TcpRr {
            count: 50,
            ..TcpRr::default()
        },
    )
    .unwrap();
    assert_eq!((times.us.len(), times.lost), (50, 0));
    assert_eq!(guest.stat("echo").unwrap().units, 50);

    let flood = UdpFlood {
        rate: 200,
        time: Duration::from_millis(500),
        ..UdpFlood::default()
    };
    let sent = udp_flood(&bench.lab, address, &flood).unwrap();
    assert_eq!(sent.sent + sent.refused, 100);
    wait_for("the packets", Duration::from_secs(20), || {
        guest.stat("sink").unwrap().units == sent.sent
    });
    assert_eq!(guest.stop("sink").unwrap().bytes, sent.sent * 64);

    guest.start("sink", Workload::sink()).unwrap();
    let bulk = tcp_stream(
        &bench.lab,
        address,
        9,
        Duration::from_millis(300),
        Client::default(),
    )
    .unwrap();
    assert!(bulk.bytes > 0);
    wait_for("the stream", Duration::from_secs(20), || {
        guest.stat("sink").unwrap().bytes == bulk.bytes
    });
}

#[test]
fn workloads_count_their_units_and_stop() {
    let bench = boot("t-work", ONE);
    let guest = bench.lab.guest("a").unwrap();
    let copy = Workload::Hog {
        pattern: Pattern::Copy,
        footprint_kib: 64,
        procs: 2,
        duty: 50,
        period_ms: 10,
        nice: 5,
    };
    for (name, workload) in [
        ("burn", Workload::hog()),
        ("copy", copy),
        ("fork", Workload::forker(0)),
    ] {
        guest.start(name, workload).unwrap();
        let first = guest.stat(name).unwrap();
        wait_for(name, Duration::from_secs(20), || {
            guest.stat(name).unwrap().units > first.units
        });
    }
    assert_eq!(guest.workloads().unwrap(), ["burn", "copy", "fork"]);
    let copied = guest.stop("copy").unwrap();
    assert_eq!((copied.alive, copied.bytes), (2, copied.units * 64 * 1024));
    let error = guest
        .start("burn", Workload::hog())
        .unwrap_err()
        .to_string();
    assert!(error.contains("runs already"), "{error}");
    guest.stop("burn").unwrap();
    guest.stop("fork").unwrap();
    let error = guest.stat("burn").unwrap_err().to_string();
    assert_eq!(error, "guest a: no workload `burn` runs here");
    let left = guest
        .exec(&["sh", "-c", "ps | grep -c '[i]nit work'"])
        .unwrap();
    assert_eq!(
        left.stdout, "0\n",
        "processes of stopped workloads are left"
    );
}

#[test]
fn data_on_a_disk_survives_a_reboot() {
    let bench = boot(
        "t-disk",
        &format!("{ONE}disks=[{{image='d.img',size='16M'}}]\nworkloads=[{{kind='echo'}}]\n"),
    );
    let guest = bench.lab.guest("a").unwrap();
    let pid = guest.pid();
    let sh = |script: &str| {
        let output = guest.exec(&["sh", "-ec", script]).unwrap();
        assert_eq!(output.status, 0, "{script}: {}", output.stderr);
        output.stdout
    };
    assert_eq!(
        sh("blockdev --getsize64 /dev/ubda"),
        format!("{}\n", 16 << 20)
    );
    sh(
        "mke2fs -q /dev/ubda && mount -t ext4 /dev/ubda /mnt && echo kept > /mnt/file && touch /tmp/lost",
    );
    guest.reboot().unwrap();
    assert_eq!(
        sh("mount -t ext4 /dev/ubda /mnt && cat /mnt/file && ls /tmp"),
        "kept\n"
    );
    assert_eq!(guest.pid(), pid);
    assert_eq!(
        guest.workloads().unwrap(),
        ["echo"],
        "the workloads of its description start again"
    );
    guest.shutdown().unwrap();
    assert!(!guest.alive());
    assert!(guest.ping().is_err());
}

#[test]
fn a_guest_that_is_killed_leaves_nothing_and_the_others_go_on() {
    let bench = boot("t-kill", TWO);
    let victim = bench.lab.guest("a").unwrap();
    let pid = victim.pid();
    assert!(
        session(pid).len() > 1,
        "a guest has processes beside its kernel"
    );
    victim.kill();
    assert!(gone(pid) && session(pid).is_empty(), "{:?}", session(pid));
    bench.lab.guest("b").unwrap().ping().unwrap();
}

#[test]
fn guests_are_ordinary_processes_on_their_core_in_their_own_session() {
    let weighted = format!("{ONE}weight=200\n[[guest]]\nname='b'\ncores=[CORE]\n");
    let bench = boot("t-place", &weighted);
    let group = bench
        .lab
        .guest("a")
        .unwrap()
        .cgroup()
        .unwrap()
        .to_path_buf();
    for guest in bench.lab.guests() {
        let pid = guest.pid();
        assert!(session(pid).contains(&pid));
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        assert!(
            status.contains(&format!("Cpus_allowed_list:\t{}\n", core())),
            "{status}"
        );
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        assert_eq!(
            (fields[16], fields[38]),
            ("0", "0"),
            "nice and policy (does a daemon manage these guests?)"
        );
    }
    let members = std::fs::read_to_string(group.join("cgroup.procs")).unwrap();
    assert!(
        members
            .lines()
            .any(|l| l == bench.lab.guest("a").unwrap().pid().to_string())
    );
    let other = std::fs::read_to_string(format!(
        "/proc/{}/cgroup",
        bench.lab.guest("b").unwrap().pid()
    ))
    .unwrap();
    assert!(
        !other.contains("viola-lab"),
        "a guest without a weight is in no group of ours: {other}"
    );
    let Bench { lab, .. } = bench;
    drop(lab);
    assert!(!group.exists() && !group.parent().unwrap().exists());
}

#[test]
fn one_lab_of_a_name_at_a_time() {
    let bench = boot("t-busy", ONE);
    let spec = Spec::of_guests("t-busy", 1, &[]).unwrap();
    let error = Lab::up(&spec, &paths(&bench.run)).err().unwrap();
    assert!(matches!(error, Error::Busy { .. }), "{error}");
    assert_eq!(error.exit_code(), 2);
    bench.lab.guest("a").unwrap().ping().unwrap();
}

/// The other process of the test below: holds a lab until it is killed.
#[test]
#[ignore = "started by killed_lab_is_swept"]
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
fn guests_end_with_a_killed_lab_and_the_next_one_sweeps_what_is_left() {
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
    wait_for("the guests' end", Duration::from_secs(10), || {
        pids.iter()
            .all(|pid| gone(*pid) && session(*pid).is_empty())
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
    lab.guest("vm1").unwrap().ping().unwrap();
    lab.down().unwrap();
}

#[test]
fn a_guest_that_cannot_boot_is_reported_with_its_last_words_and_nothing_is_left() {
    let _turn = turn();
    let folder = tempfile::tempdir().unwrap();
    let mut spec = Spec::of_guests("t-noboot", 1, &[core()]).unwrap();
    spec.guests[0].kernel_args = vec!["init=/none".into(), "panic=1".into()];
    let error = Lab::up(&spec, &paths(folder.path()))
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.starts_with("guest vm1: its kernel ended while booting"),
        "{error}"
    );
    assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none());
}

/// The other process of the test below: what a person types, one after the other.
#[test]
#[ignore = "started by the_command_line_starts_asks_and_ends_a_lab"]
fn type_commands() {
    let Some(folder) = std::env::var_os("VIOLA_TEST_FOLDER") else {
        return;
    };
    let file = Path::new(&folder).join("t.toml");
    let supervise = ["--exact", "be_the_supervisor", "--ignored", "--nocapture"]
        .map(Into::into)
        .to_vec();
    let up = cli::Up {
        spec: file,
        foreground: false,
        supervise,
    };
    cli::up(&up).unwrap();
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

/// The process that holds the lab of the test below.
#[test]
#[ignore = "started by type_commands"]
fn be_the_supervisor() {
    let file = std::env::args().next_back().unwrap();
    // tells its error to whoever started it
    let _ = cli::supervise(Path::new(&file));
}

#[test]
fn the_command_line_starts_asks_and_ends_a_lab() {
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
