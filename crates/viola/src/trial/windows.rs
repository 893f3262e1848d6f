// SPDX-License-Identifier: Apache-2.0
//! Windows of two classes.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher};
use std::time::{Duration, Instant};

use viola_proto::{Change, ClassSetting, VmList, VmReport};

use super::samples::{Samples, WindowSample};
use super::{class_name, has_class, sleep};
use crate::PROGRAM;
use viola_cli::client::{Client, ClientError, segment};
use viola_cli::error::Outcome;
use viola_cli::interrupt;
use viola_cli::table::note;

/// Length of a window: the daemon shows delays of the last 10 s, its view is up to a second old, and a new class is in force
/// within a second.
pub const WINDOW: Duration = Duration::from_secs(12);
/// The class of a window ends by itself this long after the window.
const GRACE_SECONDS: u32 = 8;
/// Interval at which CPU times are read: the daemon shows those of the last second.
const READ_INTERVAL: Duration = Duration::from_secs(1);

/// How the windows ended.
pub enum Ended {
    /// All pairs were measured.
    Whole,
    /// The trial ended early, for this reason.
    Early(String),
}

/// Result of one window.
enum Window {
    Measured(BTreeMap<String, WindowSample>),
    Ended(String),
}

/// Measures pairs of windows. Whatever happens, the daemon puts the classes back.
pub fn measure(
    client: &Client,
    tried: &[&VmReport],
    class: ClassSetting,
    pairs: u32,
    samples: &mut Samples,
) -> Outcome<Ended> {
    let ended = pairs_of_windows(client, tried, class, pairs, samples);
    // Ends the last window's class now. A daemon that does not answer ends it when its time is over.
    for vm in tried {
        let _ = set(client, vm, class, 0);
    }
    ended
}

fn pairs_of_windows(
    client: &Client,
    tried: &[&VmReport],
    class: ClassSetting,
    pairs: u32,
    samples: &mut Samples,
) -> Outcome<Ended> {
    for pair in 1..=pairs {
        let order = match drawn() {
            true => [ClassSetting::Batch, class],
            false => [class, ClassSetting::Batch],
        };
        let mut of = Vec::new();
        for side in order {
            match window(client, tried, side)? {
                Window::Measured(window) => of.push(window),
                Window::Ended(why) => return Ok(Ended::Early(why)),
            }
        }
        let (Some(second), Some(first)) = (of.pop(), of.pop()) else {
            continue;
        };
        match order[0] == ClassSetting::Batch {
            true => samples.add(&first, &second),
            false => samples.add(&second, &first),
        }
        note(
            PROGRAM,
            &format!("pair {pair} of {pairs}: {}", samples.so_far()),
        );
    }
    Ok(Ended::Whole)
}

/// Gives the VMs a class for a window, and measures all VMs meanwhile.
fn window(client: &Client, tried: &[&VmReport], class: ClassSetting) -> Outcome<Window> {
    let lease = WINDOW.as_secs() as u32 + GRACE_SECONDS;
    for vm in tried {
        match set(client, vm, class, lease) {
            Ok(_) => {}
            Err(ClientError::Refused { status: 404, .. }) => {
                return Ok(Window::Ended(format!("{} is gone", vm.name)));
            }
            Err(e) => return Err(e.into()),
        }
    }
    let end = Instant::now() + WINDOW;
    let mut used: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    loop {
        sleep(READ_INTERVAL.min(end.saturating_duration_since(Instant::now())));
        if interrupt::asked() {
            return Ok(Window::Ended("ended by a signal".into()));
        }
        let list: VmList = client.get("/vms")?;
        for vm in &list.vms {
            used.entry(vm.id.clone()).or_default().push(vm.used);
        }
        if Instant::now() >= end {
            let lacking = tried.iter().find(|vm| {
                let now = list.vms.iter().find(|now| now.id == vm.id);
                now.is_none_or(|now| !has_class(now, class))
            });
            if let Some(vm) = lacking {
                return Ok(Window::Ended(format!(
                    "{} was not in class {} at the end of a window; viola why {} may show the reason",
                    vm.name,
                    class_name(class),
                    vm.name
                )));
            }
            let sample = |vm: &VmReport| {
                // The first second belongs to the change of classes.
                let read = used
                    .get(&vm.id)
                    .map_or(&[][..], |read| &read[1.min(read.len())..]);
                (vm.id.clone(), WindowSample::of(vm, read))
            };
            return Ok(Window::Measured(list.vms.iter().map(sample).collect()));
        }
    }
}

fn set(
    client: &Client,
    vm: &VmReport,
    class: ClassSetting,
    seconds: u32,
) -> Result<VmReport, ClientError> {
    let change = Change {
        class: Some(class),
        for_s: Some(seconds),
        ..Change::default()
    };
    client.patch(&format!("/vms/{}", segment(&vm.id)), &change)
}

/// Tosses a coin.
fn drawn() -> bool {
    let state = std::collections::hash_map::RandomState::new();
    state.build_hasher().finish() & 1 == 0
}
