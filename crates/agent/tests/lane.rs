// SPDX-License-Identifier: Apache-2.0
//! A UML guest whose agent keeps a real bond, and a VF that comes and goes. One end of a veth stands for the VF; the
//! other end is a port of the bridge. The guest's console plugs it in and out, as the daemon does. Needs root, the
//! lab's image and its package of the guest's kernel.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use viola_agent::lane::report::Report as LaneReport;
use viola_agent::status::Report;
use viola_lab::load::{Ping, ping};
use viola_lab::testing::{self, wait_for};
use viola_lab::{Guest, Lab};
use viola_lanes::transfer::Transfer;
use viola_lanes::uml::UmlGuest;
use viola_lanes::{
    Attachment, Eswitch, GuestAccess as How, Journal, LaneError, Mac, Pf, Presence, StepTimes,
    VfDevice, VfSettings,
};
use viola_netdev::{add_veth, device, link};

/// Address of the VF on a bus made of files.
const VF: &str = "0000:01:10.0";

/// Makes the bridge learn where the guest is.
struct NoCard;

impl Eswitch for NoCard {
    fn assign(&self, _: u32, _: Mac, _: VfSettings) -> Result<(), LaneError> {
        Ok(())
    }
    fn forget_port(&self, _: Mac) {}
    fn withdraw(&self, _: u32, _: Mac) -> Result<(), LaneError> {
        Ok(())
    }
    fn clear(&self, _: u32) -> Result<(), LaneError> {
        Ok(())
    }
    fn set_link(&self, _: u32, _: bool) -> bool {
        false
    }
}

struct Bench {
    lab: Lab,
    folder: tempfile::TempDir,
    how: UmlGuest,
    vf: VfDevice,
    _turn: testing::GuestPermit,
}

/// The bonding modules of the package that the lab's image is made from.
fn modules(to: &Path) -> PathBuf {
    let image = testing::paths(env!("CARGO_MANIFEST_DIR"), to).image;
    let starts = [image.clone(), fs::canonicalize(&image).unwrap()];
    let debs = starts
        .iter()
        .flat_map(|start| start.ancestors())
        .map(|folder| folder.join("debs"))
        .find(|debs| debs.exists())
        .unwrap();
    let package = fs::read_dir(debs).unwrap().flatten();
    let package = package
        .map(|e| e.path())
        .find(|p| {
            p.file_name()
                .unwrap()
                .to_string_lossy()
                .starts_with("user-mode-linux_")
        })
        .unwrap();
    testing::host(&format!(
        "dpkg-deb -x {} {}",
        package.display(),
        to.display()
    ));
    let found = Command::new("find")
        .args([to.to_str().unwrap(), "-name", "bonding.ko"])
        .output()
        .unwrap();
    PathBuf::from(String::from_utf8(found.stdout).unwrap().trim())
}

/// The VF's device in sysfs, with its driver.
fn device(top: &Path) -> Pf {
    let driver = top.join("bus/pci/drivers/igbvf");
    let device = top.join("bus/pci/devices").join(VF);
    fs::create_dir_all(&driver).unwrap();
    fs::create_dir_all(&device).unwrap();
    symlink(&driver, device.join("driver")).unwrap();
    Pf::at(top, "p0")
}

impl Bench {
    fn boot(name: &str) -> Self {
        let turn = testing::guest_permit();
        let folder = tempfile::tempdir().unwrap();
        let core = testing::core();
        let text = format!(
            "[lab]\nname='{name}'\n[[guest]]\nname='a'\ncores=[{core}]\nkernel_args=['ssl3=pts']\n"
        );
        let run = folder.path().join("run");
        let paths = testing::paths(env!("CARGO_MANIFEST_DIR"), &run);
        let lab = testing::up(&text, name, folder.path(), &paths);
        let guest = lab.guest("a").unwrap();
        let mac = guest.spec().taps[0].mac;
        let start_time = viola_host::proc::stat(guest.pid())
            .unwrap()
            .unwrap()
            .start_time;
        let how = UmlGuest {
            folder: guest.agent_socket().parent().unwrap().to_owned(),
            pid: guest.pid(),
            start_time,
            mac,
            unit: 1,
            release_timeout: Duration::from_secs(3),
        };
        let vf = VfDevice {
            pf: device(&folder.path().join("sys")),
            index: 0,
            address: VF.into(),
        };
        lab.in_netns(|| {
            add_veth("vf01100", "wire", None).unwrap();
            device::set_mac("vf01100", mac).unwrap();
            device::add_port("br0", "wire").unwrap();
            device::up("wire").unwrap();
        })
        .unwrap();
        let bench = Self {
            lab,
            folder,
            how,
            vf,
            _turn: turn,
        };
        let module = modules(&bench.folder.path().join("kernel"));
        bench.sh(&format!("insmod /tmp/h{} max_bonds=0", module.display()));
        bench
    }

    fn guest(&self) -> &Guest {
        self.lab.guest("a").unwrap()
    }

    fn run(&self, script: &str) -> (i32, String) {
        let script = format!(
            "mkdir -p /tmp/h; grep -q ' /tmp/h ' /proc/mounts || mount -t hostfs none /tmp/h\n{script}"
        );
        let output = self
            .guest()
            .exec_for(&["sh", "-ec", &script], "", Duration::from_secs(60))
            .unwrap();
        (output.status, output.stdout + &output.stderr)
    }

    fn sh(&self, script: &str) -> String {
        let (status, text) = self.run(script);
        assert_eq!(status, 0, "{script}: {text}");
        text
    }

    fn program(&self) -> String {
        let path = env!("CARGO_BIN_EXE_viola-agent");
        testing::host_program("/tmp/h", path) + " --config /tmp/agent.toml"
    }

    fn start(&self) {
        let program = self.program();
        self.sh(&format!(
            "printf '[lane]\\nnic = \"vec0\"\\nport = \"/dev/ttyS3\"\\n' >/tmp/agent.toml\n\
             setsid {program} >>/tmp/agent.log 2>&1 </dev/null &\necho $! >/tmp/agent.pid"
        ));
        wait_for("the bond is made", || self.lane().is_some_and(|l| l.made));
    }

    fn end(&self, signal: &str) {
        self.sh(&format!(
            "p=$(cat /tmp/agent.pid); kill -{signal} $p; while [ -e /proc/$p/exe ]; do sleep 0.05; done"
        ));
    }

    fn lane(&self) -> Option<LaneReport> {
        let (_, text) = self.run(&format!("{} status --json || true", self.program()));
        let report: Report = serde_json::from_str(text.lines().next()?).ok()?;
        report.lane
    }

    fn sends_by(&self, port: &str) {
        wait_for(&format!("it sends by {port}"), || {
            let lane = self.lane().unwrap();
            assert_eq!(lane.why, None, "{lane:?}");
            lane.active == port
        });
    }

    /// Runs something in the lab's network namespace, where the guest's daemon would be.
    fn with<T: Send>(&self, work: impl FnOnce(&mut Transfer<'_>, &mut Journal) -> T + Send) -> T {
        let (mut journal, _) = Journal::read(&self.folder.path().join("lanes.json"));
        let (how, mut guest) = (How::Uml(self.how.clone()), self.how.clone());
        let vf = &self.vf;
        self.lab
            .in_netns(move || {
                let mut switch = Transfer {
                    eswitch: &NoCard,
                    vf,
                    id: "uml:a",
                    access: &how,
                    attachment: &mut guest,
                    steps: StepTimes::default(),
                };
                let done = work(&mut switch, &mut journal);
                println!("{}", switch.steps);
                done
            })
            .unwrap()
    }

    fn grant(&self) {
        self.with(|s, journal| s.grant(journal, VfSettings::default()))
            .unwrap();
    }

    fn revoke(&self) -> Result<(), LaneError> {
        let mac = self.how.mac;
        self.with(|s, journal| s.revoke(journal, mac, VfSettings::default()))
    }

    fn presence(&self) -> Presence {
        let (mut how, vf) = (self.how.clone(), &self.vf);
        self.lab
            .in_netns(move || how.presence(vf).unwrap())
            .unwrap()
    }

    /// Packets that the VF has carried.
    fn carried(&self) -> u64 {
        let link = self.lab.in_netns(|| link("vf01100").unwrap()).unwrap();
        link.counters.packets()
    }

    fn is_as_before(&self) {
        let seen = self.sh("ip -o addr show vec0; ip route; ls /sys/class/net");
        let address = self.guest().address().unwrap();
        assert!(seen.contains(&format!("inet {address}/24")), "{seen}");
        assert!(
            seen.contains("192.0.2.0/24 via 10.77.0.1 dev vec0"),
            "{seen}"
        );
        assert!(!seen.contains("viola0"), "{seen}");
        self.guest().ping().unwrap();
        self.answers(20);
    }

    /// Pings; returns how many were lost, and the longest round trip in milliseconds.
    fn answers(&self, count: usize) -> (usize, f64) {
        let options = Ping {
            count,
            interval: (Duration::from_millis(5), Duration::from_millis(5)),
            ..Ping::default()
        };
        let times = ping(&self.lab, self.guest().address().unwrap(), &options).unwrap();
        let worst = times.us.iter().copied().fold(0.0, f64::max) / 1000.0;
        (times.lost, worst)
    }
}

/// Signals the end when dropped, also by a panic, so that no thread waits forever.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_vf_joins_and_leaves_the_bond_and_the_end_restores_all() {
    let bench = Bench::boot("lane-vf");
    bench.sh("ip route add 192.0.2.0/24 via 10.77.0.1");
    bench.start();
    let seen = bench.sh("ip -o addr show; ip route");
    let address = bench.guest().address().unwrap();
    let has = |nic: &str| {
        let line = seen
            .lines()
            .find(|l| l.contains(&format!("inet {address}/")));
        line.is_some_and(|l| l.contains(nic))
    };
    assert!(has("viola0") && !has("vec0"), "{seen}");
    assert!(
        seen.contains("192.0.2.0/24 via 10.77.0.1 dev viola0"),
        "{seen}"
    );
    assert_eq!(bench.presence(), Presence::Absent);
    const TURNS: usize = 5;
    let over = AtomicBool::new(false);
    let (sent, lost, worst) = std::thread::scope(|scope| {
        let pings = scope.spawn(|| {
            let (mut sent, mut lost, mut worst) = (0, 0, 0.0_f64);
            while !over.load(Ordering::Relaxed) {
                let (more, latest) = bench.answers(200);
                (sent, lost, worst) = (sent + 200, lost + more, worst.max(latest));
            }
            (sent, lost, worst)
        });
        let pinged = Over(&over);
        for _ in 0..TURNS {
            let before = bench.carried();
            bench.grant();
            bench.sends_by("vec1");
            assert_eq!(bench.presence(), Presence::InUse);
            wait_for("pings go by the VF", || bench.carried() > before + 20);
            bench.revoke().unwrap();
            assert_eq!(bench.presence(), Presence::Absent);
            bench.sends_by("vec0");
        }
        drop(pinged);
        pings.join().unwrap()
    });
    println!(
        "{TURNS} times to and fro: {lost} of {sent} pings of 5 ms lost, the latest after {worst:.1} ms"
    );
    assert!(lost <= 2 * TURNS, "{lost} pings lost");
    let lane = bench.lane().unwrap();
    assert_eq!(
        (lane.activations, lane.releases),
        (TURNS as u64, TURNS as u64)
    );
    bench.end("TERM");
    bench.is_as_before();
    assert_eq!(bench.sh("cat /tmp/agent.log"), "");
}

#[test]
fn a_kill_with_the_vf_active_is_restored_or_continued() {
    let bench = Bench::boot("lane-kill");
    bench.sh("ip route add 192.0.2.0/24 via 10.77.0.1");
    bench.start();
    bench.grant();
    bench.sends_by("vec1");
    bench.end("KILL");
    assert_eq!(bench.answers(20).0, 0, "the bond goes on by itself");
    // the device is up, so the guest's kernel refuses
    let begin = Instant::now();
    let said = bench.revoke().unwrap_err();
    assert!(
        matches!(said, LaneError::ReleaseTimeout { seconds: 3 }),
        "{said}"
    );
    assert!(begin.elapsed() > Duration::from_secs(3));
    assert_eq!(bench.presence(), Presence::InUse);
    // the next agent finds the bond of the killed one, and the VF in it
    bench.start();
    bench.sends_by("vec1");
    assert!(
        bench
            .run(&format!("{} restore", bench.program()))
            .1
            .contains("an agent is running")
    );
    bench.end("KILL");
    let said = bench.sh(&format!("{} restore", bench.program()));
    assert!(
        said.contains("removed bond viola0; vec0 is as before"),
        "{said}"
    );
    bench.is_as_before();
    let said = bench.sh(&format!("{} restore", bench.program()));
    assert!(said.contains("nothing to restore"), "{said}");
    bench.revoke().unwrap();
    assert_eq!(bench.presence(), Presence::Absent);
    // the agent dies while the VF is being reclaimed
    bench.grant();
    assert_eq!(bench.presence(), Presence::InUse);
    std::thread::scope(|scope| {
        let taken = scope.spawn(|| bench.revoke());
        std::thread::sleep(Duration::from_millis(100));
        bench.guest().kill();
        taken.join().unwrap().unwrap();
    });
    assert_eq!(bench.presence(), Presence::Absent);
    let vf = bench.lab.in_netns(|| link("vf01100").unwrap()).unwrap();
    assert!(!vf.up && vf.alias.is_none(), "{vf:?}");
}
