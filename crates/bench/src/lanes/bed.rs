// SPDX-License-Identifier: Apache-2.0
//! The emulated host: a QEMU guest whose igb has seven VFs, with ten network namespaces as guests, each with a bond,
//! and `viola run`. Its clock counts instructions, so other load on this machine does not matter. Scripts that run
//! inside wait by that clock.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};
use viola_lab::qemu::{Image, Program, QemuVm, VmSpec};
use viola_proto::lanes::Lanes;

use super::{ORACLE, POLICY, TURNS};
use crate::harness::folder::Folder;
use viola_cli::error::{Failure, Outcome};

/// Number of guests.
const GUESTS: u32 = 10;
/// Number of VFs of the NIC.
const VFS: u32 = 7;
/// Prefix of the guests' MAC addresses; the guest's number follows.
const MACS: &str = "52:54:00:00:20";
/// Nanoseconds per instruction, as a power of two.
pub const SHIFT: u32 = 2;
/// Timeout for a script, including a busy machine.
const SCRIPT_TIMEOUT: Duration = Duration::from_secs(1200);
/// Guests with a high rate, by phase. As in fig. 14, some keep it and some change.
const HIGH_RATE_GUESTS: [[u32; 7]; 3] = [
    [1, 2, 3, 4, 5, 6, 7],
    [2, 3, 5, 6, 7, 8, 9],
    [1, 3, 4, 6, 8, 9, 10],
];
/// Packets per second of a guest with a high rate and of any other guest. Its stream sends half as many pieces per
/// second.
const RATES: (u32, u32) = (20, 1);
/// KiB per piece.
const KIB: u32 = 8;
/// Rate of the bridge's uplink, kbit/s: one eighth of the offered load, so that even one misplaced VF shows.
const UPLINK_KBIT: u32 = 600;
/// Lead of the oracle before a change of the load, s.
const ORACLE_LEAD_S: u32 = 1;

/// Diagnostics after a failed script: the end of viola's log, the wait channels of its threads, and the end of the
/// kernel log with all blocked tasks.
const DIAGNOSTICS: &str = "tail -n 20 /tmp/viola.log; for t in /proc/$(pidof viola)/task/*; do cat $t/comm $t/wchan; echo; done
    echo w >/proc/sysrq-trigger; dmesg | tail -n 60";

/// The PF and two ordinary NICs on one hub: one for the outside network, one as the bridge's uplink.
const NICS: &str = "-netdev hubport,id=h0,hubid=0 -netdev hubport,id=h1,hubid=0 -netdev hubport,id=h2,hubid=0 \
    -device pcie-root-port,id=rp9,chassis=9,slot=9 -device igb,bus=rp9,netdev=h0,mac=52:54:00:00:00:01 \
    -device virtio-net-pci,netdev=h1,mac=52:54:00:00:00:02 -device virtio-net-pci,netdev=h2,mac=52:54:00:00:00:03";

/// Result of one run of a load.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    /// Bytes received by the peer, and bytes offered.
    pub served: f64,
    pub offered: f64,
    /// Reply times, ms: mean of the guests' medians, and the worst 99th percentile of a guest.
    pub p50_ms: f64,
    pub p99_ms: f64,
    /// UDP packets without a reply.
    pub lost: f64,
    /// Longest time without a reply, ms.
    pub gap_ms: f64,
    /// Longest time to send one piece of a stream, ms.
    pub stall_ms: f64,
    /// VFs moved, and the total time of these switches, ms.
    pub switches: f64,
    pub switching_ms: f64,
}

/// The emulated host.
pub struct TestBed {
    machine: QemuVm,
    _folder: Folder,
}

fn failed(e: viola_lab::Error) -> Failure {
    Failure::run(e.to_string())
}

impl TestBed {
    /// Boots the host and starts viola in it.
    ///
    /// # Errors
    /// The image or `viola` is missing, or the host or viola does not start.
    pub fn boot(core: usize) -> Outcome<Self> {
        let at = std::env::temp_dir().join(format!("viola-lanes-{}", std::process::id()));
        let folder = Folder::new(at)?;
        let here = std::env::current_dir().ok();
        let me = crate::harness::program::lab()?;
        let starts = here.iter().map(|f| f.as_path()).chain([me.as_path()]);
        let image = Image::find_from(starts, "lanes").map_err(failed)?;
        let program = Program::pack_beside(&me, &[crate::harness::program::viola()?], &folder.0)
            .map_err(failed)?;
        let mut spec = program.disk(VmSpec::new("lanes").cpus(2).memory(1024).icount(SHIFT));
        spec.cores = vec![core];
        spec.kernel_args.push("net.ifnames=0".into());
        let machine = QemuVm::start(&spec.arg(NICS), &image, &folder.0).map_err(failed)?;
        let bed = Self {
            machine,
            _folder: folder,
        };
        // Use the image's libraries, as for its `ip`; those of this machine may be older.
        bed.sh("tar -x -f /dev/vda -C /")?;
        let guests = include_str!("guests.sh");
        bed.sh(&format!("G={GUESTS}\n{guests}"))?;
        let config = config();
        bed.sh(&format!(
            "cat >/tmp/v.toml <<'X'\n{config}X\nmkdir -p /run/viola
             setsid /viola/bin/viola run -c /tmp/v.toml </dev/null >>/tmp/viola.log 2>&1 &
             for i in $(seq 60); do viola lanes --json 2>/dev/null | tr -d ' ' | grep -q '\"usable\":{VFS}' && break; sleep 1; done
             viola lanes | grep -q eth0
             modprobe sch_netem"
        ))?;
        Ok(bed)
    }

    /// Runs a script that must succeed. `viola` is the program and `ip` is not the shell's builtin.
    fn sh(&self, script: &str) -> Outcome<String> {
        let script = format!(
            "set -e; export PATH=/usr/sbin:/usr/bin; viola() {{ /viola/bin/viola \"$@\"; }}; ip() {{ /usr/bin/ip \"$@\"; }}
             tc() {{ /usr/sbin/tc \"$@\"; }}\n{script}"
        );
        let output = self.machine.exec(&script, SCRIPT_TIMEOUT).map_err(failed)?;
        if output.status == 0 && !output.timed_out {
            return Ok(output.stdout);
        }
        let log = self.machine.exec(DIAGNOSTICS, SCRIPT_TIMEOUT);
        let log = log.map(|o| o.stdout).unwrap_or_default();
        let event = match output.timed_out {
            true => "a script timed out",
            false => "a script failed",
        };
        Err(Failure::run(format!(
            "the emulated host: {event}: {}{}\n{log}",
            output.stdout, output.stderr
        )))
    }

    /// Version of its kernel.
    pub fn kernel(&self) -> Outcome<String> {
        Ok(self.sh("uname -r")?.trim().to_owned())
    }

    fn lanes(&self) -> Outcome<Lanes> {
        let text = self.sh("viola lanes --json")?;
        serde_json::from_str(&text).map_err(|e| Failure::run(format!("viola lanes: {e}: {text}")))
    }

    /// Runs the shifting load on one side, in three phases of `phase` seconds each.
    ///
    /// # Errors
    /// A stream loses bytes, or a VF is not moved; the error quotes the traffic or viola.
    pub fn shift(&self, side: &str, phase: u32) -> Outcome<Reading> {
        let guest = |i: u32| {
            let rate = |heavy: &[u32; 7]| match heavy.contains(&i) {
                true => RATES.0,
                false => RATES.1,
            };
            json!({"netns": format!("n{i}"), "rates": HIGH_RATE_GUESTS.each_ref().map(rate), "kib": KIB})
        };
        let guests: Vec<Value> = (1..=GUESTS).map(guest).collect();
        // Every policy starts with the VFs where the first phase needs them.
        let begin = assign_vfs(&set(&HIGH_RATE_GUESTS[0]));
        let steer = match side {
            TURNS => rotation(3 * phase),
            ORACLE => {
                let mut script = format!("sleep {}\n", phase - ORACLE_LEAD_S);
                for pair in HIGH_RATE_GUESTS.windows(2) {
                    script.push_str(&move_vfs(&set(&pair[0]), &set(&pair[1])));
                    script.push_str(&format!("sleep {phase}\n"));
                }
                script
            }
            _ => String::new(),
        };
        let auto = match side {
            POLICY => set_lanes(&all(), "auto"),
            _ => String::new(),
        };
        self.sh(&format!(
            "tc qdisc replace dev eth2 root netem rate {UPLINK_KBIT}kbit limit 60\n{begin}"
        ))?;
        let mut reading = self.load(&guests, phase, &format!("{auto}{steer}"))?;
        let rates: u32 = guests
            .iter()
            .filter_map(|g| g["rates"].as_array())
            .flatten()
            .filter_map(|r| r.as_u64())
            .map(|r| r as u32)
            .sum();
        reading.offered = f64::from(rates * phase / 2 * KIB) * 1024.0;
        Ok(reading)
    }

    /// Moves one VF between two guests `turns` times. Each guest sends a packet every millisecond.
    /// The bridge's uplink carries all their packets, so only the switches lose any.
    ///
    /// # Errors
    /// As [`Self::shift`].
    pub fn swap(&self, turns: u32) -> Outcome<Reading> {
        let guests = ["n1", "n2"]
            .map(|netns| json!({"netns": netns, "rates": [1000], "kib": 1, "pieces": 50}));
        let (one, two) = (set(&[1]), set(&[2]));
        self.sh(&format!(
            "tc qdisc del dev eth2 root 2>/dev/null || true\n{}",
            assign_vfs(&one)
        ))?;
        let mut steer = "sleep 2\n".to_owned();
        for turn in 0..turns {
            let (from, to) = match turn % 2 {
                0 => (&one, &two),
                _ => (&two, &one),
            };
            steer.push_str(&move_vfs(from, to));
            steer.push_str("sleep 2\n");
        }
        // The commands themselves take a part of a second each.
        self.load(&guests, 2 + 3 * turns.max(2), &steer)
    }

    /// Runs traffic and, in parallel, a script.
    fn load(&self, guests: &[Value], phase: u32, steer: &str) -> Outcome<Reading> {
        let spec = json!({
            "server": "peer", "address": "10.9.0.1", "phase_ms": u64::from(phase) * 1000, "guests": guests,
        });
        let before = self.lanes()?.counts;
        let output = self.sh(&format!(
            "(/viola/bin/viola-lab internal traffic '{spec}' >/tmp/seen 2>&1; echo done >>/tmp/seen) &\n{{\n:\n{steer}}} >/dev/null
             for i in $(seq 600); do grep -q done /tmp/seen && break; sleep 1; done\nhead -n 1 /tmp/seen"
        ))?;
        let after = self.lanes()?.counts;
        let reports: Vec<Value> = serde_json::from_str(output.trim())
            .map_err(|e| Failure::run(format!("the emulated host's traffic: {e}: {output}")))?;
        if let Some(broken) = reports.iter().find(|s| s["stream_whole"] != true) {
            return Err(Failure::run(format!("a stream failed: {broken}")));
        }
        if (after.failed, after.kept) != (before.failed, before.kept) {
            let log = self.sh("tail -n 30 /tmp/viola.log")?;
            return Err(Failure::run(format!("a VF was not moved: {log}")));
        }
        let all =
            |key: &str| -> Vec<f64> { reports.iter().filter_map(|s| s[key].as_f64()).collect() };
        let sum = |key: &str| all(key).iter().sum::<f64>();
        let worst = |key: &str| all(key).into_iter().fold(0.0, f64::max);
        Ok(Reading {
            served: sum("stream_bytes"),
            offered: 0.0,
            p50_ms: sum("p50_ms") / reports.len().max(1) as f64,
            p99_ms: worst("p99_ms"),
            lost: sum("lost"),
            gap_ms: worst("longest_gap_ms"),
            stall_ms: worst("worst_stall_ms"),
            switches: (after.granted + after.revoked - before.granted - before.revoked) as f64,
            switching_ms: (after.switching_ns - before.switching_ns) as f64 / 1e6,
        })
    }
}

fn set(guests: &[u32]) -> BTreeSet<u32> {
    guests.iter().copied().collect()
}

fn all() -> BTreeSet<u32> {
    (1..=GUESTS).collect()
}

/// Commands that set the lane policy of guests.
fn set_lanes(guests: &BTreeSet<u32>, lane: &str) -> String {
    let line = |n: &u32| format!("viola set n{n} --lane {lane} >/dev/null\n");
    guests.iter().map(line).collect()
}

/// Commands that move VFs from some guests to others; a guest in both lists keeps its VF.
fn move_vfs(from: &BTreeSet<u32>, to: &BTreeSet<u32>) -> String {
    let (out, new) = (
        from - to,
        if from.len() > to.len() {
            to.clone()
        } else {
            to - from
        },
    );
    format!("{}{}", set_lanes(&out, "never"), set_lanes(&new, "pin"))
}

/// Commands that give the VFs to these guests and wait until exactly these guests have them, by the MAC addresses on
/// the NIC. Their number alone is not enough: it can be right while other guests still return theirs.
fn assign_vfs(guests: &BTreeSet<u32>) -> String {
    let moves = move_vfs(&all(), guests);
    let expected: String = guests.iter().map(|n| format!("{n:02x} ")).collect();
    format!(
        "{moves}held() {{ ip link show eth0 | sed -n 's/.*link.ether {MACS}:\\(..\\).*/\\1/p' | sort | tr '\\n' ' '; }}
         for i in $(seq 240); do has=$(held); [ \"$has\" = '{expected}' ] && break; sleep 0.5; done
         [ \"$has\" = '{expected}' ] || {{ echo \"VFs are with $has, not {expected}\" >&2; exit 1; }}\nsleep 3\n"
    )
}

/// Commands that rotate the VFs every five seconds, for `seconds`.
fn rotation(seconds: u32) -> String {
    let mut script = String::new();
    let mut now = set(&HIGH_RATE_GUESTS[0]);
    for turn in 1..=(seconds / 5).saturating_sub(1) {
        let first = turn * VFS;
        let next = (0..VFS).map(|k| (first + k) % GUESTS + 1).collect();
        script.push_str("sleep 5\n");
        script.push_str(&move_vfs(&now, &next));
        now = next;
    }
    script
}

fn config() -> String {
    let mut text = format!(
        "[daemon]\ninterval = \"1s\"\n[slices]\nenabled = false\n[lanes]\nsample = \"250ms\"\nsamples = 4\nhold = \"2s\"\n\
         hold_per_attach = 1\nretry = \"5s\"\nmoves = 7\n[[lanes.pool]]\npf = \"eth0\"\nvfs = {VFS}\nbridge = \"br0\"\n"
    );
    for i in 1..=GUESTS {
        text.push_str(&format!(
            "[[lanes.guest]]\nname = \"n{i}\"\nnetns = \"n{i}\"\nhost = \"v{i}\"\nlane = \"never\"\n"
        ));
    }
    text
}
