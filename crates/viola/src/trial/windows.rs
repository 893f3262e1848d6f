// SPDX-License-Identifier: Apache-2.0
//! Windows of two classes.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher};
use std::time::{Duration, Instant};

use viola_proto::{Change, ClassSetting, VmList, VmReport};

use super::has_class;
use super::samples::{Samples, WindowSample};
use crate::PROGRAM;
use viola_cli::client::{Client, ClientError, segment};
use viola_cli::error::Outcome;
use viola_cli::interrupt;
use viola_cli::table::note;
use viola_daemon::vms::report::class_text;

/// Length of a window, from when its class is in force: the daemon shows delays of the last 10 s, and its view is up to a second
/// old.
pub const WINDOW: Duration = Duration::from_secs(12);
/// How long a window waits for its class to be in force: a daemon that schedules nothing yet starts its mechanism first.
const CHANGE_LIMIT: Duration = Duration::from_secs(5);
/// Interval at which it looks.
const CHANGE_INTERVAL: Duration = Duration::from_millis(100);
/// The class of a window ends by itself this long after the window.
const GRACE_SECONDS: u32 = 8;
/// Interval at which CPU times are read: the daemon shows those of the last second.
const READ_INTERVAL: Duration = Duration::from_secs(1);

/// Figures of all VMs in one window by their identities, or why the trial ends in it.
type Window = Result<BTreeMap<String, WindowSample>, String>;

/// The windows of a trial.
pub struct Windows<'a> {
    /// The daemon.
    pub client: &'a Client,
    /// The VMs whose class changes.
    pub tried: &'a [&'a VmReport],
    /// The class that is compared with batch.
    pub class: ClassSetting,
}

impl Windows<'_> {
    /// Measures pairs of windows. Returns why the trial ended early, if it did. Whatever happens, the daemon puts the classes back.
    pub fn measure(&self, pairs: u32, samples: &mut Samples) -> Outcome<Option<String>> {
        let ended = self.pairs(pairs, samples);
        // Ends the last window's class now. A daemon that does not answer ends it when its time is over.
        for vm in self.tried {
            let _ = self.set(vm, self.class, 0);
        }
        ended
    }

    fn pairs(&self, pairs: u32, samples: &mut Samples) -> Outcome<Option<String>> {
        for pair in 1..=pairs {
            let mut order = [ClassSetting::Batch, self.class];
            if drawn() {
                order.reverse();
            }
            let (mut without, mut with) = (BTreeMap::new(), BTreeMap::new());
            for side in order {
                let measured = match self.window(side)? {
                    Ok(measured) => measured,
                    Err(why) => return Ok(Some(why)),
                };
                match side {
                    ClassSetting::Batch => without = measured,
                    _ => with = measured,
                }
            }
            samples.add(&without, &with);
            note(
                PROGRAM,
                &format!("pair {pair} of {pairs}: {}", samples.so_far()),
            );
        }
        Ok(None)
    }

    /// Gives the VMs a class for a window, and measures all VMs meanwhile.
    fn window(&self, class: ClassSetting) -> Outcome<Window> {
        let lease = (CHANGE_LIMIT + WINDOW).as_secs() as u32 + GRACE_SECONDS;
        for vm in self.tried {
            match self.set(vm, class, lease) {
                Ok(_) => {}
                Err(ClientError::Refused { status: 404, .. }) => {
                    return Ok(Err(format!("{} is gone", vm.name)));
                }
                Err(e) => return Err(e.into()),
            }
        }
        self.wait_for(class)?;
        let end = Instant::now() + WINDOW;
        let mut used: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        loop {
            interrupt::sleep(READ_INTERVAL.min(end.saturating_duration_since(Instant::now())));
            if interrupt::asked() {
                return Ok(Err("ended by a signal".into()));
            }
            let list: VmList = self.client.get("/vms")?;
            for vm in &list.vms {
                used.entry(vm.id.clone()).or_default().push(vm.used);
            }
            if Instant::now() >= end {
                if let Some(vm) = self.lacking(&list, class) {
                    return Ok(Err(format!(
                        "{} was not in class {} at the end of a window; viola why {} may show the reason",
                        vm.name,
                        class_text(class),
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
                return Ok(Ok(list.vms.iter().map(sample).collect()));
            }
        }
    }

    /// Waits until the class is in force, at most for [`CHANGE_LIMIT`].
    fn wait_for(&self, class: ClassSetting) -> Outcome {
        let begin = Instant::now();
        while begin.elapsed() < CHANGE_LIMIT && !interrupt::asked() {
            if self.lacking(&self.client.get("/vms")?, class).is_none() {
                break;
            }
            interrupt::sleep(CHANGE_INTERVAL);
        }
        Ok(())
    }

    /// A tried VM that has not the class of the window.
    fn lacking(&self, list: &VmList, class: ClassSetting) -> Option<&VmReport> {
        let lacks = |vm: &&&VmReport| {
            let now = list.vms.iter().find(|now| now.id == vm.id);
            now.is_none_or(|now| !has_class(now, class))
        };
        self.tried.iter().find(lacks).copied()
    }

    fn set(
        &self,
        vm: &VmReport,
        class: ClassSetting,
        seconds: u32,
    ) -> Result<VmReport, ClientError> {
        let change = Change {
            class: Some(class),
            for_s: Some(seconds),
            ..Change::default()
        };
        let path = format!("/vms/{}", segment(&vm.id));
        self.client.patch(&path, &change)
    }
}

/// Tosses a coin.
fn drawn() -> bool {
    let state = std::collections::hash_map::RandomState::new();
    state.build_hasher().finish() & 1 == 0
}
