// SPDX-License-Identifier: Apache-2.0
//! The compared sides. A side is set up as an operator would do it: by starting `viola run` with a configuration and
//! ending it with SIGTERM.

mod daemon;

use std::fs;
use std::path::Path;

use viola_host::proc;
use viola_lab::Lab;
use viola_proto::Events;

use self::daemon::Daemon;
use super::cpu::{self, CpuSample};
use super::groups::{DEFAULT_WEIGHT, Groups};
use viola_cli::error::{Failure, Outcome};

/// Nice value with weight 3906 in the kernel's table (`sched_prio_to_weight`), about four times the default of 1024.
const NICE_OF_WEIGHT_X4: i32 = -6;

/// Scheduler of the guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// Stock kernel.
    Stock,
    /// Stock kernel; the latency-sensitive guest has four times the weight.
    StockTimes4,
    /// The papers' baseline: 30 ms slices and BOOST, as in Xen's credit scheduler.
    Credit,
    /// viola with this microslice, in microseconds.
    Viola(u32),
    /// viola with `auto = "on"` and no class set.
    Auto,
    /// viola with this turbo core, which runs the first vCPU of the guests that do I/O, within a budget.
    Turbo(usize),
}

impl Side {
    /// Name in tables.
    pub fn name(self) -> String {
        match self {
            Self::Stock => "stock".into(),
            Self::StockTimes4 => "stock, 4x weight".into(),
            Self::Credit => "30 ms slices".into(),
            Self::Viola(us) => format!("viola {}", slice(us)),
            Self::Auto => "auto".into(),
            Self::Turbo(_) => "turbo".into(),
        }
    }
}

/// Formats a slice for tables.
pub fn slice(us: u32) -> String {
    format!("{} ms", f64::from(us) / 1000.0)
}

/// Settings of the guests, the same on every side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guests {
    /// Cores that the guests share.
    pub cores: Vec<usize>,
    /// Names of the latency-sensitive guests.
    pub ls: Vec<String>,
    /// Weights that differ from the default of 256.
    pub weights: Vec<(String, u32)>,
    /// Caps, in percent of the core.
    pub caps: Vec<(String, u32)>,
}

impl Guests {
    /// Equal weights on one core; the first guest is latency-sensitive.
    pub fn equal(core: usize, first: &str) -> Self {
        Self {
            cores: vec![core],
            ls: vec![first.into()],
            weights: Vec::new(),
            caps: Vec::new(),
        }
    }

    /// Configuration of the daemon.
    fn config(&self, side: Side, folder: &Path) -> String {
        let (mode, microslice) = match side {
            Side::Viola(us) => ("interleaved", format!("microslice = \"{us}us\"\n")),
            Side::Turbo(_) | Side::Auto => ("interleaved", String::new()),
            _ => ("credit", String::new()),
        };
        let at = |name: &str| format!("{:?}", folder.join(name).display().to_string());
        let cores: Vec<String> = self.cores.iter().map(ToString::to_string).collect();
        let auto = if side == Side::Auto {
            "auto = \"on\"\n"
        } else {
            ""
        };
        let mut text = format!(
            "{auto}[daemon]\nsocket = {}\nrun_dir = {}\nstate_dir = {}\n\n\
             [slices]\ncores = \"{}\"\nmechanism = \"slots\"\nmode = \"{mode}\"\n",
            at("viola.sock"),
            at("run"),
            at("state"),
            cores.join(",")
        );
        if self.cores.len() > 1 {
            // These may be all cores of the host.
            text.push_str("force = true\n");
        }
        if let Side::Turbo(core) = side {
            text.push_str(&format!(
                "\n[turbo]\ncores = \"{core}\"\nbudget = \"50%\"\n"
            ));
        }
        let mut names: Vec<&String> = self.ls.iter().collect();
        names.extend(self.weights.iter().chain(&self.caps).map(|(name, _)| name));
        names.sort();
        names.dedup();
        for name in names {
            text.push_str(&format!("\n[[vm]]\nname = \"{name}\"\n"));
            if self.ls.contains(name) {
                let class = match side {
                    Side::Turbo(_) => "turbo",
                    _ => "ls",
                };
                text.push_str(&format!("class = \"{class}\"\n{microslice}"));
            }
            if let Some((_, weight)) = self.weights.iter().find(|(n, _)| n == name) {
                text.push_str(&format!("weight = {weight}\n"));
            }
            if let Some((_, cap)) = self.caps.iter().find(|(n, _)| n == name) {
                text.push_str(&format!("cap = \"{cap}%\"\n"));
            }
        }
        text
    }
}

/// An active side. It ends when it is stopped or dropped.
pub struct Active {
    hold: ActiveSide,
    guests: Vec<u32>,
}

enum ActiveSide {
    Nothing,
    Weight(u32),
    Groups(Groups),
    Daemon(Daemon),
}

impl Active {
    /// Sets up a side and waits until it applies to all guests of the lab.
    ///
    /// # Errors
    /// The daemon ends or does not schedule the guests in time, or the kernel refuses a weight or
    /// cap.
    pub fn start(side: Side, guests: &Guests, lab: &Lab) -> Outcome<Self> {
        let pids: Vec<u32> = lab.guests().iter().map(viola_lab::Guest::pid).collect();
        let hold = match side {
            Side::Stock => match guests.weights.is_empty() && guests.caps.is_empty() {
                true => ActiveSide::Nothing,
                false => ActiveSide::Groups(Groups::limited(
                    lab.guests(),
                    &guests.weights,
                    &guests.caps,
                )?),
            },
            Side::StockTimes4 => {
                let first = guests
                    .ls
                    .first()
                    .map(|name| lab.guest(name))
                    .transpose()
                    .map_err(lab_failure)?;
                match first.filter(|guest| guest.cgroup().is_some()) {
                    // An autogroup's nice value has no effect in a cgroup.
                    Some(guest) => {
                        let weights = [(guest.name().to_owned(), 4 * DEFAULT_WEIGHT)];
                        ActiveSide::Groups(Groups::limited(lab.guests(), &weights, &[])?)
                    }
                    None => {
                        let pid = first.map_or(0, viola_lab::Guest::pid);
                        set_weight(pid, NICE_OF_WEIGHT_X4)?;
                        ActiveSide::Weight(pid)
                    }
                }
            }
            Side::Credit | Side::Viola(_) | Side::Auto | Side::Turbo(_) => {
                let names: Vec<&str> = lab.guests().iter().map(viola_lab::Guest::name).collect();
                ActiveSide::Daemon(Daemon::start(side, guests, &names)?)
            }
        };
        Ok(Self { hold, guests: pids })
    }

    /// CPU time of the slot controller so far, ns; 0 without a daemon.
    ///
    /// # Errors
    /// The daemon does not answer, or a controller has failed, which invalidates the measurement.
    pub fn controller_ns(&self) -> Outcome<u64> {
        match &self.hold {
            ActiveSide::Daemon(daemon) => daemon.controller_ns(),
            _ => Ok(0),
        }
    }

    /// The daemon's last events; none without a daemon.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub fn events(&self) -> Outcome<Events> {
        match &self.hold {
            ActiveSide::Daemon(daemon) => Ok(daemon.client.get("/events")?),
            _ => Ok(Events::default()),
        }
    }

    /// Samples daemon, watchdog and controller as one group.
    pub fn sample(&self) -> Option<CpuSample> {
        match &self.hold {
            ActiveSide::Daemon(daemon) => Some(cpu::tree(daemon.child.id())),
            _ => None,
        }
    }

    /// Ends the side, and checks that no guest thread is left at real-time priority.
    ///
    /// # Errors
    /// The daemon fails or does not end, or left such a thread.
    pub fn stop(mut self) -> Outcome {
        match std::mem::replace(&mut self.hold, ActiveSide::Nothing) {
            ActiveSide::Nothing => {}
            ActiveSide::Groups(groups) => drop(groups),
            ActiveSide::Weight(pid) => set_weight(pid, 0)?,
            ActiveSide::Daemon(mut daemon) => daemon.stop()?,
        }
        match self.guests.iter().find_map(|pid| real_time_thread(*pid)) {
            Some(thread) => Err(Failure::run(format!(
                "viola left guest thread {thread} at real-time priority; later figures are not valid"
            ))),
            None => Ok(()),
        }
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        if let ActiveSide::Weight(pid) = self.hold {
            let _ = set_weight(pid, 0);
        }
    }
}

/// Finds a guest thread outside the kernel's fair class.
fn real_time_thread(pid: u32) -> Option<String> {
    let mut pids = vec![pid];
    pids.extend(proc::children(pid).unwrap_or_default());
    for pid in pids {
        for tid in proc::thread_ids(pid).unwrap_or_default() {
            let stat = fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat"));
            let stat = stat.unwrap_or_default();
            let Some((name, rest)) = stat.rsplit_once(") ") else {
                continue; // the thread has ended
            };
            // Field 3 is the state, field 41 the policy; 0 is SCHED_OTHER.
            let mut fields = rest.split(' ');
            let state = fields.next().unwrap_or_default();
            let policy = fields.nth(37).unwrap_or_default();
            if policy != "0" && !matches!(state, "Z" | "X") {
                return Some(format!("thread {name}), state {state}, policy {policy},"));
            }
        }
    }
    None
}

/// Sets a guest's weight in the fair class: on its autogroup, or on its threads without autogroups.
fn set_weight(pid: u32, nice: i32) -> Outcome {
    let failed = |e: &dyn std::fmt::Display| {
        Failure::run(format!("cannot set the weight of process {pid}: {e}"))
    };
    let autogroup =
        fs::read_to_string("/proc/sys/kernel/sched_autogroup_enabled").unwrap_or_default();
    if autogroup.trim() == "1" {
        return fs::write(format!("/proc/{pid}/autogroup"), nice.to_string())
            .map_err(|e| failed(&e));
    }
    let mut pids = vec![pid];
    pids.extend(proc::children(pid).map_err(|e| failed(&e))?);
    for pid in pids {
        for tid in proc::thread_ids(pid).map_err(|e| failed(&e))? {
            let tid = rustix::process::Pid::from_raw(tid.cast_signed());
            rustix::process::setpriority_process(tid, nice).map_err(|e| failed(&e))?;
        }
    }
    Ok(())
}

/// Converts an error of the lab, with the system's reason.
pub fn lab_failure(e: viola_lab::Error) -> Failure {
    Failure::run(viola_cli::error::chain(&e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_config::{Config, Mode};

    fn config(guests: &Guests, side: Side) -> Config {
        Config::parse(
            Path::new("side.toml"),
            &guests.config(side, Path::new("/run/x \"y\"")),
        )
        .unwrap()
    }

    #[test]
    fn a_side_is_a_configuration_that_the_daemon_takes() {
        let guests = Guests {
            cores: vec![1],
            ls: vec!["web".into(), "vm2".into()],
            weights: vec![("web".into(), 512)],
            caps: vec![("vm3".into(), 20)],
        };
        let config = config(&guests, Side::Viola(300));
        assert_eq!(config.slices.mode, Mode::Interleaved);
        assert_eq!(config.slices.cores.to_string(), "1");
        assert_eq!(config.daemon.run_dir, Path::new("/run/x \"y\"/run"));
        let vm = |name: &str| config.vm("", name).unwrap();
        assert_eq!(
            (vm("web").microslice, vm("web").weight, vm("web").cap),
            (Some(300_000), Some(512), None)
        );
        assert_eq!(
            (vm("vm2").microslice, vm("vm2").weight),
            (Some(300_000), None)
        );
        assert_eq!((vm("vm3").class, vm("vm3").cap), (None, Some(Some(200))));
    }

    #[test]
    fn guests_may_share_two_cores() {
        let guests = Guests {
            cores: vec![0, 1],
            ..Guests::equal(1, "web")
        };
        let slices = config(&guests, Side::Viola(300)).slices;
        assert_eq!(slices.cores.iter().collect::<Vec<_>>(), [0, 1]);
        assert!(slices.force);
        assert!(
            !config(&Guests::equal(1, "web"), Side::Viola(300))
                .slices
                .force
        );
    }

    #[test]
    fn the_papers_side_has_their_slices() {
        let config = config(&Guests::equal(1, "web"), Side::Credit);
        assert_eq!(config.slices.mode, Mode::Credit);
        assert_eq!(config.slices.batch_slice(), 30_000_000);
    }

    #[test]
    fn an_ordinary_process_has_no_real_time_thread() {
        assert_eq!(real_time_thread(std::process::id()), None);
    }

    #[test]
    fn side_names_contain_the_slice() {
        let names = [Side::Viola(1000), Side::Viola(300), Side::Viola(100)].map(Side::name);
        assert_eq!(names, ["viola 1 ms", "viola 0.3 ms", "viola 0.1 ms"]);
    }
}
