// SPDX-License-Identifier: Apache-2.0
//! The guests that are measured: a web server and its busy neighbours, all on one core.

use std::path::Path;

use viola_lab::wire::Workload;
use viola_lab::{Guest, Lab, Paths, Spec};

use super::side::lab_failure;
use crate::error::{Failure, Outcome};

/// Name of the latency-sensitive guest.
pub const WEB: &str = "web";
/// Name of the work that keeps a guest busy.
const HOG: &str = "hog";
/// Period of a neighbour that works less than all the time, ms.
const PERIOD: u32 = 20;

/// Names of `count` guests, the web server first.
pub fn names(count: usize) -> Vec<String> {
    std::iter::once(WEB.to_owned()).chain((2..=count).map(|i| format!("vm{i}"))).collect()
}

/// Their description. `lab/four.toml` is that of four on core 1, with the neighbours at work.
pub fn spec(lab: &str, count: usize, core: usize) -> Outcome<Spec> {
    let mut text = format!("[lab]\nname = \"{lab}\"\n");
    for name in names(count) {
        text.push_str(&format!("\n[[guest]]\nname = \"{name}\"\ncores = [{core}]\n"));
        if name == WEB {
            text.push_str("workloads = [{ kind = \"nginx\" }, { kind = \"echo\" }, { kind = \"sink\" }]\n");
        }
    }
    Spec::from_toml(&text, lab, Path::new(".")).map_err(lab_failure)
}

/// Boots them.
pub fn boot(lab: &str, count: usize, core: usize) -> Outcome<Guests> {
    let paths = Paths::find().map_err(lab_failure)?;
    let lab = Lab::up(&spec(lab, count, core)?, &paths).map_err(lab_failure)?;
    let allowed = rustix::thread::sched_getaffinity(None).map_err(Failure::run)?;
    let load_core = (0..rustix::thread::CpuSet::MAX_CPU).find(|c| *c != core && allowed.is_set(*c)).unwrap_or(0);
    Ok(Guests { lab, load_core, duties: vec![0; count] })
}

/// Running guests, and how busy each is kept.
pub struct Guests {
    /// Where they run.
    pub lab: Lab,
    /// Core that the load runs on.
    pub load_core: usize,
    /// Percent of the time that each works; 0 for not at all.
    duties: Vec<u32>,
}

impl Guests {
    /// The web server.
    pub fn web(&self) -> &Guest {
        &self.lab.guests()[0]
    }

    /// Their main processes.
    pub fn pids(&self) -> Vec<u32> {
        self.lab.guests().iter().map(Guest::pid).collect()
    }

    /// Version of their kernel.
    pub fn kernel(&self) -> Outcome<String> {
        let output = self.web().exec(&["uname", "-r"]).map_err(lab_failure)?;
        Ok(format!("User Mode Linux {}", output.stdout.trim()))
    }

    /// Keeps the web server busy with work of its own or not, and the others busy for `duty` percent of
    /// the time. The web server's own work is niced: it is the kind that a server does beside serving.
    pub fn keep_busy(&mut self, web: bool, duty: u32) -> Outcome {
        for (index, guest) in self.lab.guests().iter().enumerate() {
            let wanted = match index {
                0 => u32::from(web) * 100,
                _ => duty,
            };
            if self.duties[index] == wanted {
                continue;
            }
            if self.duties[index] > 0 {
                guest.stop(HOG).map_err(lab_failure)?;
                self.duties[index] = 0;
            }
            if wanted > 0 {
                let mut hog = Workload::hog_duty(wanted, PERIOD);
                if let (0, Workload::Hog { nice, .. }) = (index, &mut hog) {
                    *nice = 19;
                }
                guest.start(HOG, hog).map_err(lab_failure)?;
            }
            self.duties[index] = wanted;
        }
        Ok(())
    }

    /// What the busy guests have done so far: units of work, and the guest's own time in seconds.
    /// `None` for a guest that is not kept busy.
    pub fn work(&self) -> Outcome<Vec<Option<(u64, f64)>>> {
        let guests = self.lab.guests().iter().zip(&self.duties);
        guests
            .map(|(guest, duty)| match duty {
                0 => Ok(None),
                _ => guest.stat(HOG).map(|s| Some((s.units, s.up_ms as f64 / 1e3))).map_err(lab_failure),
            })
            .collect()
    }

    /// Takes them down.
    pub fn down(self) -> Outcome {
        self.lab.down().map_err(lab_failure)
    }
}

/// The core that guests share and those that the load and everything else of ours runs on.
pub fn split_cores(core: usize) -> Outcome {
    let mut others = rustix::thread::sched_getaffinity(None).map_err(Failure::run)?;
    if !others.is_set(core) {
        return Err(Failure::usage(format!("there is no core {core} here; choose one with --core")));
    }
    others.unset(core);
    if others.count() == 0 {
        return Err(Failure::usage("this needs two cores: one for the guests, one for the load"));
    }
    rustix::thread::sched_setaffinity(None, &others).map_err(Failure::run)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lab_to_play_with_is_the_one_that_is_measured() {
        let text = include_str!("../../../../lab/four.toml");
        let mut play = Spec::from_toml(text, "four.toml", Path::new(".")).unwrap();
        let measured = spec("four", 4, 1).unwrap();
        for guest in &mut play.guests[1..] {
            assert_eq!(guest.workloads, [("hog".to_owned(), Workload::hog())]);
            guest.workloads.clear();
        }
        assert_eq!(play, measured);
    }
}
