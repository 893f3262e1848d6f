// SPDX-License-Identifier: Apache-2.0
//! The meter shows what requests to real VMs meet: a neighbour of the real-time class holds the VMs' core for 20 ms of each 40 ms,
//! and the delays of packets show it. The test needs root, the lab's image, BPF and two cores.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::guests::{CORE, Rig};
use viola_host::attrs::{self, SchedAttr};
use viola_host::{CpuSet, Tid};
use viola_lab::load::{Ping, ping};
use viola_proto::{VmList, VmReport};

const HOLD: Duration = Duration::from_millis(20);
const MS: u64 = 1_000_000;

/// A real-time thread that holds [`CORE`] for [`HOLD`], leaves it for as long, and so on until it is dropped.
struct Neighbour {
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Neighbour {
    fn start() -> Self {
        let ended = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&ended);
        let thread = std::thread::spawn(move || {
            let tid = rustix::thread::gettid().as_raw_nonzero().get() as Tid;
            let core: CpuSet = [CORE].into_iter().collect();
            let _ = attrs::set_affinity(tid, &core).unwrap();
            let _ = attrs::set(tid, &SchedAttr::fifo(50)).unwrap();
            while !is_over.load(Ordering::Relaxed) {
                let begin = Instant::now();
                while begin.elapsed() < HOLD {
                    std::hint::spin_loop();
                }
                std::thread::sleep(HOLD);
            }
        });
        Self {
            ended,
            thread: Some(thread),
        }
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Pings a guest for longer than the meter remembers, and returns what the daemon then shows of it.
fn shown_after_pings(rig: &Rig, name: &str) -> VmReport {
    let to = rig.guest(name).address().unwrap();
    let options = Ping {
        count: 1500,
        interval: (Duration::from_millis(5), Duration::from_millis(11)),
        grace: Duration::from_millis(700),
        ..Ping::default()
    };
    let times = ping(&rig.lab, to, &options).unwrap();
    assert!(times.lost < 15, "{} lost", times.lost);
    let list: VmList = rig.daemon.json(&["vms"]);
    list.vms.into_iter().find(|vm| vm.name == name).unwrap()
}

#[test]
fn packets_to_a_guest_whose_core_is_held_for_20_ms_show_it_and_others_do_not() {
    let rig = Rig::boot(&[("va", "")], "");
    let free = shown_after_pings(&rig, "va");
    let delay = free.packet_delay.as_ref().expect("its packets are seen");
    assert!(delay.count > 900, "{free:?}");
    assert!(delay.p50_ns.unwrap() < MS, "{free:?}");
    assert!(delay.p99_ns.unwrap() < 4 * MS, "{free:?}");

    let neighbour = Neighbour::start();
    let held = shown_after_pings(&rig, "va");
    drop(neighbour);
    let delay = held.packet_delay.as_ref().unwrap();
    assert!(
        (15 * MS..45 * MS).contains(&delay.p99_ns.unwrap()),
        "{held:?}"
    );
    // Half of the packets come while the core is held, and wait for a uniform rest of 20 ms: 3/8 wait for 5 ms and more.
    let is_long = |(low, _, _): &&(u64, u64, u64)| *low >= 5 * MS;
    let long: u64 = delay.buckets.iter().filter(is_long).map(|b| b.2).sum();
    let part = long as f64 / delay.count as f64;
    assert!((0.2..0.55).contains(&part), "{part}: {held:?}");
}
