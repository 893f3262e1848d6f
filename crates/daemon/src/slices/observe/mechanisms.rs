// SPDX-License-Identifier: Apache-2.0
//! Which of the mechanisms this kernel and configuration support: slots, sched_ext, eevdf.

use viola_host::facts::HostFacts;
use viola_sched::scx::VerifiedScheduler;

use crate::host::check::Obstacle;
use viola_cli::error::chain;
use viola_config::{MechanismChoice, Mode, Slices};

/// Whether the kernel takes viola's BPF programs; each can be known only by loading it.
#[derive(Debug, Clone)]
pub struct Support {
    /// Whether the accounting program runs, or why not.
    pub accounting: Result<(), String>,
    /// Whether the kernel takes the sched_ext scheduler, or why it is not used.
    pub scheduler: Result<(), String>,
}

impl Support {
    /// The first mechanism of the configuration that this host supports.
    ///
    /// # Errors
    /// Why there is none, and what to change.
    pub fn choose(&self, facts: &HostFacts, slices: &Slices) -> Result<MechanismChoice, Obstacle> {
        if !slices.enabled {
            return Err(Obstacle::fixed(
                "switched off in the configuration ([slices] enabled = false)",
            ));
        }
        if let [only] = slices.mechanisms[..] {
            return self.supports(only, facts, slices).map(|_| only);
        }
        let mut reasons = Vec::new();
        for &choice in &slices.mechanisms {
            match self.supports(choice, facts, slices) {
                Ok(_) => return Ok(choice),
                Err(o) => reasons.push(format!("{}: {}", choice.name(), o.sentence())),
            }
        }
        Err(Obstacle::fixed(reasons.join("; ")))
    }

    /// Whether this host supports a mechanism, with a sentence about its terms.
    ///
    /// # Errors
    /// Why not, and what to change.
    pub fn supports(
        &self,
        choice: MechanismChoice,
        facts: &HostFacts,
        slices: &Slices,
    ) -> Result<String, Obstacle> {
        match choice {
            MechanismChoice::SchedExt => self.sched_ext(facts, slices),
            MechanismChoice::Eevdf => eevdf(facts),
            MechanismChoice::Slots => self.slots(facts, slices),
        }
    }

    /// Whether the slot controllers can run, and on which cores.
    fn slots(&self, facts: &HostFacts, slices: &Slices) -> Result<String, Obstacle> {
        let online = facts.online();
        if slices.cores.is_empty() {
            return Err(no_cores());
        }
        if !facts.kernel.has_fair_server() && !slices.force {
            return Err(Obstacle::new(
                format!(
                    "kernel {}.{} gives a core's own kernel threads no time beside real-time VMs",
                    facts.kernel.major, facts.kernel.minor
                ),
                "run Linux 6.12 or later, or set force = true in [slices]",
            ));
        }
        if online.iter().all(|cpu| slices.cores.contains(cpu)) && !slices.force {
            return Err(Obstacle::new(
                format!(
                    "cores = \"{}\" leaves no CPU to the host itself",
                    slices.cores
                ),
                "leave at least one out, or set force = true in [slices]",
            ));
        }
        if !facts.privilege.sys_nice {
            return Err(Obstacle::new(
                "real-time priorities need root",
                "run as root, or with CAP_SYS_NICE",
            ));
        }
        throttling(facts)?;
        if let Err(why) = &self.accounting {
            return Err(Obstacle::fixed(format!(
                "it needs the accounting program: {why}"
            )));
        }
        let forced =
            !facts.kernel.has_fair_server() || online.iter().all(|cpu| slices.cores.contains(cpu));
        let forced = if forced { "; forced" } else { "" };
        Ok(format!("{}{forced}", kept(slices)))
    }

    /// Whether the sched_ext scheduler can run, and on which cores.
    fn sched_ext(&self, facts: &HostFacts, slices: &Slices) -> Result<String, Obstacle> {
        if !facts.sched_ext {
            return Err(Obstacle::fixed(
                "kernel built without CONFIG_SCHED_CLASS_EXT",
            ));
        }
        if let Err(why) = &self.scheduler {
            return Err(Obstacle::fixed(why.clone()));
        }
        if slices.cores.is_empty() {
            return Err(no_cores());
        }
        if slices.mode != Mode::Interleaved {
            return Err(Obstacle::new(
                "it supports only mode interleaved",
                "leave mode out of [slices], or name slots as the mechanism",
            ));
        }
        if !facts.privilege.sys_nice {
            return Err(Obstacle::new(
                "other users' threads need root",
                "run as root, or with CAP_SYS_NICE",
            ));
        }
        Ok(kept(slices))
    }
}

/// Real-time throttling stops real-time threads for a part of each period. Since Linux 6.12 only kernels do that which give
/// control groups a real-time budget (CONFIG_RT_GROUP_SCHED).
fn throttling(facts: &HostFacts) -> Result<(), Obstacle> {
    let (Some(runtime), Some(period)) = (facts.rt_runtime_us, facts.rt_period_us) else {
        return Ok(());
    };
    if facts.rt_group_sched != Some(true) || runtime < 0 || runtime >= period {
        return Ok(());
    }
    Err(Obstacle::new(
        format!(
            "real-time throttling stops VMs for {} us of every {period} us",
            period - runtime
        ),
        "sysctl kernel.sched_rt_runtime_us=-1, or boot with rt_group_sched=0",
    ))
}

/// Whether the kernel takes a slice for a thread (EEVDF, Linux 6.12).
fn eevdf(facts: &HostFacts) -> Result<String, Obstacle> {
    if !facts.kernel.has_fair_slice() {
        return Err(Obstacle::new(
            format!(
                "kernel {}.{} has no slice per thread",
                facts.kernel.major, facts.kernel.minor
            ),
            "run Linux 6.12 or later",
        ));
    }
    if !facts.privilege.sys_nice {
        return Err(Obstacle::new(
            "other users' threads need root",
            "run as root, or with CAP_SYS_NICE",
        ));
    }
    Ok("shorter slices for VMs that wake; little for busy ones".into())
}

/// Loads the sched_ext scheduler, which the kernel verifies: that can take a second.
///
/// # Errors
/// Why the kernel does not take it.
pub fn try_scheduler(facts: &HostFacts) -> Result<VerifiedScheduler, String> {
    if !facts.sched_ext {
        return Err("kernel built without CONFIG_SCHED_CLASS_EXT".into());
    }
    viola_sched::scx::load().map_err(|e| chain(&e))
}

fn no_cores() -> Obstacle {
    Obstacle::new(
        "no cores are set aside for VMs",
        "keep other work off some cores and name them in [slices] cores",
    )
}

fn kept(slices: &Slices) -> String {
    let (cores, verb) = match slices.cores.len() {
        1 => ("core", "is"),
        _ => ("cores", "are"),
    };
    format!("{cores} {} {verb} kept for VMs", slices.cores)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use viola_config::Config;
    use viola_host::CpuSet;
    use viola_host::facts::{Kernel, Privilege};

    fn facts(release: &str) -> HostFacts {
        let all = Privilege {
            root: true,
            sys_nice: true,
            bpf: true,
            sys_admin: true,
            sys_ptrace: true,
        };
        HostFacts {
            kernel: Kernel::parse(release).unwrap(),
            cpus: crate::testing::cpus(4),
            isolated: CpuSet::new(),
            rt_runtime_us: Some(950_000),
            rt_period_us: Some(1_000_000),
            rt_group_sched: Some(false),
            autogroup: Some(false),
            fair_slice_ns: None,
            btf: true,
            lockdown: None,
            sched_ext: false,
            cgroup: None,
            kvm: false,
            privilege: all,
        }
    }

    fn slices(text: &str) -> Slices {
        Config::parse(Path::new("v.toml"), &format!("[slices]\n{text}"))
            .unwrap()
            .slices
    }

    fn why(r: Result<String, Obstacle>) -> String {
        r.unwrap_err().sentence()
    }

    /// A kernel that takes both programs.
    fn able() -> Support {
        Support {
            accounting: Ok(()),
            scheduler: Ok(()),
        }
    }

    fn without_scheduler(why: &str) -> Support {
        Support {
            scheduler: Err(why.into()),
            ..able()
        }
    }

    #[test]
    fn slots_need_cores_set_aside_and_one_left_for_the_host() {
        let f = facts("6.18.1");
        assert_eq!(
            able().slots(&f, &slices("cores = \"1-2\"")),
            Ok("cores 1-2 are kept for VMs".into())
        );
        assert!(why(able().slots(&f, &slices(""))).contains("[slices] cores"));
        assert!(
            why(able().slots(&f, &slices("cores = \"0-3\""))).contains("leaves no CPU to the host")
        );
        assert_eq!(
            able().slots(&f, &slices("cores = \"0-3\"\nforce = true")),
            Ok("cores 0-3 are kept for VMs; forced".into())
        );
    }

    #[test]
    fn an_old_kernel_has_no_slots_unless_forced() {
        let f = facts("6.1.0-18-amd64");
        assert!(
            why(able().slots(&f, &slices("cores = \"1\"")))
                .contains("Linux 6.12 or later, or set force")
        );
        assert!(
            able()
                .slots(&f, &slices("cores = \"1\"\nforce = true"))
                .is_ok()
        );
        assert!(why(eevdf(&f)).contains("6.12"));
        assert_eq!(
            crate::host::check::kernel(&f).state,
            viola_proto::RowState::No
        );
    }

    #[test]
    fn throttling_of_real_time_groups_is_refused_with_what_to_change_even_when_forced() {
        let mut f = facts("6.18.1");
        f.rt_group_sched = Some(true);
        let s = slices("cores = \"1\"\nforce = true");
        assert_eq!(
            why(able().slots(&f, &s)),
            "real-time throttling stops VMs for 50000 us of every 1000000 us: \
             sysctl kernel.sched_rt_runtime_us=-1, or boot with rt_group_sched=0"
        );
        for runtime in [-1, 1_000_000] {
            f.rt_runtime_us = Some(runtime);
            assert!(able().slots(&f, &s).is_ok());
        }
    }

    #[test]
    fn without_the_accounting_program_or_privilege_there_are_no_slots() {
        let mut f = facts("6.18.1");
        let s = slices("cores = \"1\"");
        let without_accounting = Support {
            accounting: Err("kernel without BTF".into()),
            ..able()
        };
        assert!(why(without_accounting.slots(&f, &s)).contains("kernel without BTF"));
        f.privilege = Privilege::default();
        assert!(why(able().slots(&f, &s)).contains("root"));
        assert!(why(eevdf(&f)).contains("root"));
    }

    #[test]
    fn sched_ext_is_used_only_where_it_is_named_and_the_kernel_takes_it() {
        let mut f = facts("7.3.4");
        f.sched_ext = true;
        let one = slices("cores = \"1\"");
        let choice = |f: &HostFacts, s: &Slices, support: &Support| support.choose(f, s);
        assert_eq!(choice(&f, &one, &able()), Ok(MechanismChoice::Slots));
        let refused =
            without_scheduler("the kernel refused viola's sched_ext scheduler at loading");
        assert_eq!(choice(&f, &one, &refused), Ok(MechanismChoice::Slots));
        assert_eq!(choice(&f, &slices(""), &able()), Ok(MechanismChoice::Eevdf));
        let paper = slices("cores = \"1\"\nmode = \"paper\"");
        assert_eq!(choice(&f, &paper, &able()), Ok(MechanismChoice::Slots));
        let only = slices("cores = \"1\"\nmechanism = \"sched_ext\"");
        assert_eq!(choice(&f, &only, &able()), Ok(MechanismChoice::SchedExt));
        let said = choice(&f, &only, &refused).unwrap_err().sentence();
        assert!(said.contains("refused"), "{said}");
        let first = slices("cores = \"1\"\nmechanism = [\"sched_ext\", \"eevdf\"]");
        assert_eq!(choice(&f, &first, &able()), Ok(MechanismChoice::SchedExt));
        assert_eq!(choice(&f, &first, &refused), Ok(MechanismChoice::Eevdf));
        assert!(why(able().sched_ext(&f, &paper)).contains("mode interleaved"));
        let said = try_scheduler(&facts("6.18.1")).err().unwrap();
        assert!(said.contains("CONFIG_SCHED_CLASS_EXT"), "{said}");
    }

    #[test]
    fn auto_takes_slots_then_eevdf_then_says_why_neither() {
        let none = without_scheduler("kernel built without CONFIG_SCHED_CLASS_EXT");
        let f = facts("6.18.1");
        assert_eq!(
            none.choose(&f, &slices("cores = \"1\"")),
            Ok(MechanismChoice::Slots)
        );
        assert_eq!(none.choose(&f, &slices("")), Ok(MechanismChoice::Eevdf));
        assert!(none.choose(&f, &slices("mechanism = \"slots\"")).is_err());
        let old = none
            .choose(&facts("5.10.0"), &slices("cores = \"1\""))
            .unwrap_err();
        assert!(
            old.why.contains("slots: ") && old.why.contains("eevdf: "),
            "{}",
            old.why
        );
        assert!(
            none.choose(&f, &slices("enabled = false"))
                .unwrap_err()
                .why
                .contains("switched off")
        );
    }
}
