// SPDX-License-Identifier: Apache-2.0
//! The measured guests: a web server and its busy neighbours, all on one core.

use std::net::Ipv4Addr;
use std::path::Path;

use viola_lab::wire::{Output, Workload};
use viola_lab::{Guest, Lab, Paths, Spec};

use super::side::lab_failure;
use super::vmm::{self, GuestKind};
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

/// Name of the LSVM's own work in user space.
const OWN: &str = "own";
/// Name of the web server's workload.
const NGINX: &str = "nginx";

/// Work of a latency-sensitive guest beside serving.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum OwnWork {
    /// It sleeps between requests.
    Nothing,
    /// Work inside its kernel ([`OWN_WORK`]), which a packet interrupts at once.
    Kernel,
    /// A program of the lowest weight, which a packet interrupts only at the guest's next tick (User Mode Linux).
    Program,
}

/// What a guest does beside serving.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Busy {
    Nothing,
    /// The process in the guest.
    Kernel(String),
    Program,
    /// Duty cycle in percent.
    Neighbour(u32),
}

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

/// The address of a guest.
///
/// # Errors
/// It has no network.
pub fn address(guest: &Guest) -> Outcome<Ipv4Addr> {
    let none = || Failure::run(format!("guest {} has no network", guest.name()));
    guest.address().ok_or_else(none)
}

/// What runs a lab's guests, and the version of their kernel.
///
/// # Errors
/// The first guest does not answer.
pub fn kernel(lab: &Lab) -> Outcome<String> {
    let version = shell(&lab.guests()[0], "uname -r")?.stdout;
    Ok(vmm::describe(&lab.spec().vmm, version.trim()))
}

/// Names of `count` guests, the web server first.
pub fn names(count: usize) -> Vec<String> {
    std::iter::once(WEB.to_owned())
        .chain((2..=count).map(|i| format!("vm{i}")))
        .collect()
}

/// Lab description of `count` guests on these cores. `lab/four.toml` has the same four guests on
/// core 1, with busy neighbours.
///
/// # Errors
/// The description is not valid.
pub fn spec(lab: &str, count: usize, cores: &[usize], kind: GuestKind) -> Outcome<Spec> {
    let mut text = format!("[lab]\nname = \"{lab}\"\n{}", kind.lab_keys());
    for name in names(count) {
        text.push_str(&format!(
            "\n[[guest]]\nname = \"{name}\"\ncores = {cores:?}\n"
        ));
        if name == WEB {
            text.push_str(
                "workloads = [{ kind = \"nginx\" }, { kind = \"echo\" }, { kind = \"sink\" }]\n",
            );
        }
    }
    Spec::from_toml(&text, lab, Path::new(".")).map_err(lab_failure)
}

/// Boots the guests of [`spec`] on one core.
///
/// # Errors
/// The guest image is missing, or a guest does not boot.
pub fn boot(lab: &str, count: usize, core: usize, kind: GuestKind) -> Outcome<Guests> {
    boot_spec(&spec(lab, count, &[core], kind)?, core)
}

/// The first core beside that of the guests, for the load; core 0 if there is none.
///
/// # Errors
/// The kernel does not report the cores of this process.
pub fn other_core(core: usize) -> Outcome<usize> {
    let allowed = rustix::thread::sched_getaffinity(None).map_err(Failure::run)?;
    let other = (0..rustix::thread::CpuSet::MAX_CPU).find(|c| *c != core && allowed.is_set(*c));
    Ok(other.unwrap_or(0))
}

/// Boots guests that may differ from those of [`spec`], for example in memory.
///
/// # Errors
/// As [`boot`].
pub fn boot_spec(spec: &Spec, core: usize) -> Outcome<Guests> {
    let paths = Paths::find().map_err(lab_failure)?;
    let lab = Lab::up(spec, &paths).map_err(lab_failure)?;
    Ok(Guests {
        lab,
        core,
        load_core: other_core(core)?,
        busy: vec![Busy::Nothing; spec.guests.len()],
        servers: 1,
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
    /// What each guest does beside serving.
    busy: Vec<Busy>,
    /// Guests with a web server, from the first on.
    servers: usize,
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

    /// As [`kernel`].
    pub fn kernel(&self) -> Outcome<String> {
        kernel(&self.lab)
    }

    /// Makes the web server busy with its own work or not, and all others busy for `duty` percent
    /// of the time.
    ///
    /// # Errors
    /// A guest does not answer or cannot start its work.
    pub fn keep_busy(&mut self, web: bool, duty: u32) -> Outcome {
        self.keep_last_busy(web, self.busy.len() - 1, duty)
    }

    /// As [`Guests::keep_busy`], but only the last `last` guests are busy.
    pub fn keep_last_busy(&mut self, web: bool, last: usize, duty: u32) -> Outcome {
        let first = self.busy.len().saturating_sub(last);
        let own = match web {
            true => OwnWork::Kernel,
            false => OwnWork::Nothing,
        };
        self.set_busy(0, own, 0)?;
        for index in 1..self.busy.len() {
            let duty = if index < first { 0 } else { duty };
            self.set_busy(index, OwnWork::Nothing, duty)?;
        }
        Ok(())
    }

    /// Makes the first `ls` guests serve, with `own` work, and all others busy for `duty` percent
    /// of the time.
    ///
    /// # Errors
    /// As [`Guests::keep_busy`].
    pub fn serve(&mut self, ls: usize, own: OwnWork, duty: u32) -> Outcome {
        for guest in self.lab.guests().iter().take(ls).skip(self.servers) {
            guest.start(NGINX, Workload::nginx()).map_err(lab_failure)?;
        }
        self.servers = self.servers.max(ls);
        for index in 0..self.busy.len() {
            match index < ls {
                true => self.set_busy(index, own, 0)?,
                false => self.set_busy(index, OwnWork::Nothing, duty)?,
            }
        }
        Ok(())
    }

    /// Changes what a guest does beside serving: own work, or that of a neighbour with this duty cycle.
    fn set_busy(&mut self, index: usize, own: OwnWork, duty: u32) -> Outcome {
        let guest = &self.lab.guests()[index];
        let as_it_is = match (&self.busy[index], own) {
            (Busy::Nothing, OwnWork::Nothing) => duty == 0,
            (Busy::Kernel(_), OwnWork::Kernel) | (Busy::Program, OwnWork::Program) => true,
            (Busy::Neighbour(now), OwnWork::Nothing) => *now == duty,
            _ => false,
        };
        if as_it_is {
            return Ok(());
        }
        match std::mem::replace(&mut self.busy[index], Busy::Nothing) {
            Busy::Nothing => {}
            Busy::Kernel(pid) => drop(shell(guest, &format!("kill {pid}"))?),
            Busy::Program => drop(guest.stop(OWN).map_err(lab_failure)?),
            Busy::Neighbour(_) => drop(guest.stop(HOG).map_err(lab_failure)?),
        }
        self.busy[index] = match own {
            OwnWork::Kernel => Busy::Kernel(shell(guest, OWN_WORK)?.stdout.trim().to_owned()),
            OwnWork::Program => {
                guest.start(OWN, nice_hog()).map_err(lab_failure)?;
                Busy::Program
            }
            OwnWork::Nothing if duty > 0 => {
                guest
                    .start(HOG, Workload::hog_duty(duty, PERIOD))
                    .map_err(lab_failure)?;
                Busy::Neighbour(duty)
            }
            OwnWork::Nothing => Busy::Nothing,
        };
        Ok(())
    }

    /// Whether at least one guest always wants the core.
    pub fn is_saturated(&self) -> bool {
        self.busy.contains(&Busy::Neighbour(100))
    }

    /// Work so far of all guests but the first: units of work, and the guest's own time in seconds;
    /// `None` for a guest that is no busy neighbour. Asks all at once, because each waits for the
    /// core before it answers.
    ///
    /// # Errors
    /// A guest does not answer.
    pub fn work(&self) -> Outcome<Vec<Option<(u64, f64)>>> {
        let ask = |guest: &Guest| {
            let stat = guest.stat(HOG).map_err(lab_failure)?;
            Ok((stat.units, stat.up_ms as f64 / 1e3))
        };
        std::thread::scope(|scope| {
            let guests = self.lab.guests()[1..].iter().zip(&self.busy[1..]);
            let asked: Vec<_> = guests
                .map(|(guest, busy)| {
                    matches!(busy, Busy::Neighbour(_)).then(|| scope.spawn(|| ask(guest)))
                })
                .collect();
            let answers = asked.into_iter().map(|asked| {
                let joined = asked.map(|thread| thread.join()).transpose();
                joined
                    .map_err(|_| Failure::run("the thread that asks a guest failed"))?
                    .transpose()
            });
            answers.collect()
        })
    }

    /// Shuts the guests down.
    ///
    /// # Errors
    /// A guest did not power off and was killed.
    pub fn down(self) -> Outcome {
        self.lab.down().map_err(lab_failure)
    }
}

/// A program of the lowest weight that never sleeps.
fn nice_hog() -> Workload {
    let mut hog = Workload::hog();
    if let Workload::Hog { nice, .. } = &mut hog {
        *nice = 19;
    }
    hog
}

/// Moves this process, and all that it starts later, off the guests' core `core`.
///
/// # Errors
/// The host has no such core or no other one, or the kernel refuses.
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
        let measured = spec("four", 4, &[1], GuestKind::Uml).unwrap();
        for guest in &mut play.guests[1..] {
            assert_eq!(guest.workloads, [("hog".to_owned(), Workload::hog())]);
            guest.workloads.clear();
        }
        assert_eq!(play, measured);
    }
}
