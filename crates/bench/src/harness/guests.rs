// SPDX-License-Identifier: Apache-2.0
//! The measured guests: a web server and its busy neighbours, all on one core.

use std::path::Path;

use viola_lab::wire::{Output, Workload};
use viola_lab::{Guest, Lab, Paths, Spec};

use super::side::lab_failure;
use viola_cli::error::{Failure, Outcome};

/// Name of the latency-sensitive guest.
pub const WEB: &str = "web";
/// Name of the workload that keeps a guest busy.
pub const HOG: &str = "hog";
/// Period of a neighbour that works only part of the time, ms.
pub const PERIOD: u32 = 20;
/// The web server's own work. It runs at idle priority, so it yields to the servers as background work does. It runs
/// inside the guest's kernel: when a packet arrives while a guest *program* runs, User Mode Linux lets the program
/// continue until its next system call or tick, up to 10 ms, where hardware would interrupt it. That delay would hide
/// what the host's scheduler does. Reading random numbers, 1 MiB per call, keeps one host thread busy as a busy KVM
/// vCPU does, and a packet interrupts it at once.
pub const OWN_WORK: &str = "set -e; c=/run/groups; \
    [ -d $c ] || { mkdir $c; mount -t cgroup2 none $c; echo +cpu >$c/cgroup.subtree_control; mkdir $c/own; }; \
    echo 1 >$c/own/cpu.idle; echo $$ >$c/own/cgroup.procs; \
    dd if=/dev/urandom of=/dev/null bs=1M 2>/dev/null >&2 & echo $!";

/// Runs a script in a guest, for at most one minute.
///
/// # Errors
/// The script fails; the error quotes its output.
pub fn shell(guest: &Guest, script: &str) -> Outcome<Output> {
    let output = guest.exec(&["sh", "-c", script]).map_err(lab_failure)?;
    match output.status {
        0 => Ok(output),
        _ => Err(Failure::run(format!(
            "in guest {}: {}",
            guest.name(),
            output.stderr.trim()
        ))),
    }
}

/// Names of `count` guests, the web server first.
pub fn names(count: usize) -> Vec<String> {
    std::iter::once(WEB.to_owned())
        .chain((2..=count).map(|i| format!("vm{i}")))
        .collect()
}

/// Their lab description. `lab/four.toml` is the description of four guests on core 1 with busy neighbours.
pub fn spec(lab: &str, count: usize, core: usize) -> Outcome<Spec> {
    let mut text = format!("[lab]\nname = \"{lab}\"\n");
    for name in names(count) {
        text.push_str(&format!(
            "\n[[guest]]\nname = \"{name}\"\ncores = [{core}]\n"
        ));
        if name == WEB {
            text.push_str(
                "workloads = [{ kind = \"nginx\" }, { kind = \"echo\" }, { kind = \"sink\" }]\n",
            );
        }
    }
    Spec::from_toml(&text, lab, Path::new(".")).map_err(lab_failure)
}

/// Boots them.
pub fn boot(lab: &str, count: usize, core: usize) -> Outcome<Guests> {
    boot_spec(&spec(lab, count, core)?, core)
}

/// Boots guests that may differ from those of [`spec`], for example in memory.
pub fn boot_spec(spec: &Spec, core: usize) -> Outcome<Guests> {
    let paths = Paths::find().map_err(lab_failure)?;
    let lab = Lab::up(spec, &paths).map_err(lab_failure)?;
    let allowed = rustix::thread::sched_getaffinity(None).map_err(Failure::run)?;
    let load_core = (0..rustix::thread::CpuSet::MAX_CPU)
        .find(|c| *c != core && allowed.is_set(*c))
        .unwrap_or(0);
    Ok(Guests {
        lab,
        core,
        load_core,
        duties: vec![0; spec.guests.len().saturating_sub(1)],
        own_work: None,
    })
}

/// Running guests and their load.
pub struct Guests {
    /// Their lab.
    pub lab: Lab,
    /// Core that they share.
    pub core: usize,
    /// Core of the load generator.
    pub load_core: usize,
    /// Duty cycle of each neighbour in percent; 0 if idle.
    duties: Vec<u32>,
    /// Process in the web server that does its own work.
    own_work: Option<String>,
}

impl Guests {
    /// The web server.
    pub fn web(&self) -> &Guest {
        &self.lab.guests()[0]
    }

    /// Main processes of the guests.
    pub fn pids(&self) -> Vec<u32> {
        self.lab.guests().iter().map(Guest::pid).collect()
    }

    /// Version of the guest kernel.
    pub fn kernel(&self) -> Outcome<String> {
        let output = self.web().exec(&["uname", "-r"]).map_err(lab_failure)?;
        Ok(format!("User Mode Linux {}", output.stdout.trim()))
    }

    /// Makes the web server busy with its own work or not, and all others busy for `duty` percent of the time.
    pub fn keep_busy(&mut self, web: bool, duty: u32) -> Outcome {
        self.keep_last_busy(web, self.duties.len(), duty)
    }

    /// As [`Guests::keep_busy`], but only the last `count` guests are busy.
    pub fn keep_last_busy(&mut self, web: bool, last: usize, duty: u32) -> Outcome {
        let idle = self.duties.len().saturating_sub(last);
        match (web, self.own_work.take()) {
            (true, None) => self.own_work = Some(self.shell(OWN_WORK)?),
            (false, Some(pid)) => drop(self.shell(&format!("kill {pid}"))?),
            (_, unchanged) => self.own_work = unchanged,
        }
        let others = self.lab.guests()[1..].iter().zip(&mut self.duties);
        for (index, (guest, now)) in others.enumerate() {
            let duty = if index < idle { 0 } else { duty };
            if *now == duty {
                continue;
            }
            if *now > 0 {
                guest.stop(HOG).map_err(lab_failure)?;
                *now = 0;
            }
            if duty > 0 {
                guest
                    .start(HOG, Workload::hog_duty(duty, PERIOD))
                    .map_err(lab_failure)?;
                *now = duty;
            }
        }
        Ok(())
    }

    /// Whether at least one guest always wants the core.
    pub fn is_saturated(&self) -> bool {
        self.duties.contains(&100)
    }

    /// Runs a line in the web server's shell and returns its output.
    fn shell(&self, line: &str) -> Outcome<String> {
        Ok(shell(self.web(), line)?.stdout.trim().to_owned())
    }

    /// Work of the others so far: units of work, and the guest's own time in seconds. `None` for an idle guest.
    pub fn work(&self) -> Outcome<Vec<Option<(u64, f64)>>> {
        let guests = self.lab.guests()[1..].iter().zip(&self.duties);
        guests
            .map(|(guest, duty)| match duty {
                0 => Ok(None),
                _ => guest
                    .stat(HOG)
                    .map(|s| Some((s.units, s.up_ms as f64 / 1e3)))
                    .map_err(lab_failure),
            })
            .collect()
    }

    /// Shuts the guests down.
    pub fn down(self) -> Outcome {
        self.lab.down().map_err(lab_failure)
    }
}

/// The core that the guests share, and the core for the load and all other processes of the benchmark.
pub fn split_cores(core: usize) -> Outcome {
    let mut others = rustix::thread::sched_getaffinity(None).map_err(Failure::run)?;
    if !others.is_set(core) {
        return Err(Failure::usage(format!(
            "there is no core {core} here; choose one with --core"
        )));
    }
    others.unset(core);
    if others.count() == 0 {
        return Err(Failure::usage(
            "this needs two cores: one for the guests, one for the load",
        ));
    }
    rustix::thread::sched_setaffinity(None, &others).map_err(Failure::run)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_toml_describes_the_measured_guests() {
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
