// SPDX-License-Identifier: Apache-2.0
//! The host of lanes: a QEMU VM with an SR-IOV NIC that runs `viola`.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use viola_lab::qemu::{Image, Program, QemuVm, VmSpec};
use viola_lab::testing::lab_program;
use viola_proto::lanes::{Lanes, Nic};

/// Timeout of a script on a busy machine.
pub const SCRIPT_TIMEOUT: Duration = Duration::from_secs(900);
/// Timeout of an expected change in an emulated host.
pub const CHANGE_TIMEOUT: Duration = Duration::from_secs(300);
/// Number of guests.
pub const GUESTS: u32 = 10;
/// Number of the NIC's VFs.
pub const VFS: u32 = 7;

/// The PF and two ordinary NICs at one hub: one is the outside world, one the bridge's uplink.
const NICS: &str = "-netdev hubport,id=h0,hubid=0 -netdev hubport,id=h1,hubid=0 -netdev hubport,id=h2,hubid=0 \
    -device pcie-root-port,id=rp9,chassis=9,slot=9 -device igb,bus=rp9,netdev=h0,mac=52:54:00:00:00:01 \
    -device virtio-net-pci,netdev=h1,mac=52:54:00:00:00:02 -device virtio-net-pci,netdev=h2,mac=52:54:00:00:00:03";

/// Creates the bridge, the outside world and the guests, as the benchmark does.
const SET_UP: &str = include_str!("../../../bench/src/lanes/guests.sh");

/// Its kernel and initramfs.
pub fn image() -> Image {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    Image::find_from([here], "lanes").unwrap_or_else(|e| panic!("{e}"))
}

pub struct Host {
    pub machine: QemuVm,
    guests: u32,
    _folder: tempfile::TempDir,
}

impl Host {
    /// Boots the host; creates the bridge, the outside world and `guests` namespaces.
    pub fn boot(name: &str, guests: u32) -> Self {
        Self::boot_with(name, guests, |spec, _| spec.memory(1024))
    }

    /// The same with a modified VM. The folder holds additional files.
    pub fn boot_with(name: &str, guests: u32, more: impl FnOnce(VmSpec, &Path) -> VmSpec) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let viola = Path::new(env!("CARGO_BIN_EXE_viola"));
        let program = Program::pack_beside(viola, &[lab_program(viola)], folder.path())
            .unwrap_or_else(|e| panic!("{e}"));
        let mut spec = program.disk(VmSpec::new(name).cpus(2));
        spec.cores.clear();
        spec.kernel_args.push("net.ifnames=0".into());
        let spec = more(spec, folder.path()).arg(NICS);
        let begin = Instant::now();
        let machine =
            QemuVm::start(&spec, &image(), folder.path()).unwrap_or_else(|e| panic!("{e}"));
        // Uses the image's libraries, as its `ip` does: this machine's may be older.
        machine.sh("tar -x -f /dev/vda -C /").unwrap();
        let host = Self {
            machine,
            guests,
            _folder: folder,
        };
        let said = host.sh(&format!("G={guests}\n{SET_UP}"));
        assert!(said.contains("set up"), "{said}");
        println!("set up in {:.0} s", begin.elapsed().as_secs_f32());
        host
    }

    /// Runs a script in which `viola` is the program and `ip` is not the shell's builtin.
    pub fn sh(&self, script: &str) -> String {
        let script = format!(
            "export PATH=/usr/sbin:/usr/bin; viola() {{ /viola/bin/viola \"$@\"; }}; ip() {{ /usr/bin/ip \"$@\"; }}; {script}"
        );
        let output = self.machine.exec(&script, SCRIPT_TIMEOUT).unwrap();
        assert!(!output.timed_out, "{script}: {output:?}");
        format!("{}{}", output.stdout, output.stderr)
    }

    pub fn configure(&self, more: &str) {
        let mut text = format!(
            "[daemon]\ninterval = \"1s\"\n[slices]\nenabled = false\n[lanes]\nsample = \"500ms\"\nsamples = 8\nhold = \"3s\"\nhold_per_attach = 1\n\
             retry = \"5s\"\nmoves = 7\n{more}\n[[lanes.pool]]\npf = \"eth0\"\nvfs = {VFS}\nbridge = \"br0\"\n"
        );
        for i in 1..=self.guests {
            text.push_str(&format!(
                "[[lanes.guest]]\nname = \"n{i}\"\nnetns = \"n{i}\"\nhost = \"v{i}\"\n"
            ));
        }
        self.sh(&format!("cat >/tmp/v.toml <<'X'\n{text}X"));
    }

    pub fn start(&self) {
        self.sh(
            "mkdir -p /run/viola; setsid /viola/bin/viola run -c /tmp/v.toml </dev/null >>/tmp/viola.log 2>&1 & \
             echo $! >/tmp/pid",
        );
        self.wait("VFs", |l| l.pools.iter().any(|p| p.usable == VFS));
    }

    pub fn log(&self) -> String {
        self.sh("tail -n 60 /tmp/viola.log; dmesg | tail -n 15")
    }

    pub fn lanes(&self) -> Option<Lanes> {
        serde_json::from_str(&self.sh("viola lanes --json 2>/dev/null")).ok()
    }

    pub fn wait(&self, what: &str, is_so: impl Fn(&Lanes) -> bool) -> Lanes {
        let end = Instant::now() + CHANGE_TIMEOUT;
        loop {
            if let Some(lanes) = self.lanes().filter(&is_so) {
                return lanes;
            }
            if Instant::now() > end {
                panic!("not {what}: {}\n{}", self.sh("viola lanes"), self.log());
            }
            std::thread::sleep(Duration::from_millis(300));
        }
    }

    /// Starts traffic, which runs until [`Host::enough`]. `rates` are the packets per second of each guest in each phase.
    pub fn traffic(&self, phase: Duration, rates: &[Vec<u32>]) {
        let guests: Vec<Value> = (1..)
            .zip(rates)
            .map(|(i, rates)| json!({"netns": format!("n{i}"), "rates": rates}))
            .collect();
        let spec = json!({
            "server": "peer", "address": "10.9.0.1", "phase_ms": phase.as_millis() as u64, "guests": guests,
            "until": "/tmp/enough",
        });
        self.sh(&format!(
            "rm -f /tmp/seen /tmp/enough; (/viola/bin/viola-lab internal traffic '{spec}' >/tmp/traffic 2>&1; mv /tmp/traffic /tmp/seen) </dev/null >/dev/null 2>&1 &"
        ));
    }

    /// Ends the traffic in whatever phase it is.
    pub fn enough(&self) {
        self.sh("touch /tmp/enough");
    }

    /// The reports of all guests. Asserts that every stream is whole.
    pub fn seen(&self) -> Vec<Value> {
        let text = self.sh(
            "for i in $(seq 400); do [ -e /tmp/seen ] && break; sleep 0.5; done; cat /tmp/seen",
        );
        let seen: Vec<Value> = serde_json::from_str(text.trim())
            .unwrap_or_else(|e| panic!("{e}: {text}\n{}", self.log()));
        for guest in &seen {
            println!("  {guest}");
            assert_eq!(guest["stream_whole"], true, "{guest}\n{}", self.log());
        }
        seen
    }
}

/// The guests that have a VF.
pub fn holders(lanes: &Lanes) -> BTreeSet<String> {
    let held = |nic: &Nic| nic.vf.as_ref().map(|_| nic.name.clone());
    lanes.nics.iter().filter_map(held).collect()
}

pub fn names(numbers: &[u32]) -> BTreeSet<String> {
    numbers.iter().map(|n| format!("n{n}")).collect()
}
