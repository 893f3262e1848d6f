// SPDX-License-Identifier: Apache-2.0
//! What this host can do, and what to change where it cannot.

use viola_host::facts::HostFacts;
use viola_host::{CpuSet, Vm};
use viola_proto::{Row, RowState};
use viola_sched::scx::VerifiedScheduler;

use viola_cli::error::chain;
use viola_config::{MechanismChoice, Mode, Slices, Vread};

/// Something that stands in the way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle {
    /// What it is.
    pub why: String,
    /// What to do about it, if anything can be done.
    pub change: Option<String>,
}

impl Obstacle {
    fn new(why: impl Into<String>, change: impl Into<String>) -> Self {
        Self {
            why: why.into(),
            change: Some(change.into()),
        }
    }

    /// Both in one sentence.
    pub fn sentence(&self) -> String {
        match &self.change {
            Some(change) => format!("{}: {change}", self.why),
            None => self.why.clone(),
        }
    }
}

/// Whether real-time slots can be had; the answer says on what terms.
///
/// `accounting` is whether the accounting program runs, or why not.
pub fn slots(
    facts: &HostFacts,
    slices: &Slices,
    accounting: &Result<(), String>,
) -> Result<String, Obstacle> {
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
    if let Err(why) = accounting {
        return Err(Obstacle {
            why: format!("it needs the accounting program: {why}"),
            change: None,
        });
    }
    let forced =
        !facts.kernel.has_fair_server() || online.iter().all(|cpu| slices.cores.contains(cpu));
    let forced = if forced { "; forced" } else { "" };
    Ok(format!("{}{forced}", kept(slices)))
}

/// Real-time throttling stops real-time threads for a part of each period. From Linux 6.12 on it is left only where
/// control groups divide real-time run time.
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

/// Whether EEVDF slices can be had.
pub fn eevdf(facts: &HostFacts) -> Result<String, Obstacle> {
    if !facts.kernel.has_fair_slice() {
        return Err(Obstacle::new(
            format!(
                "kernel {}.{} takes no slice for a thread",
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

/// Whether the kernel takes the scheduler: it is loaded, which takes a moment; or why it is not to be used.
pub fn try_scheduler(facts: &HostFacts) -> Result<VerifiedScheduler, String> {
    if !facts.sched_ext {
        return Err("kernel built without CONFIG_SCHED_CLASS_EXT".into());
    }
    viola_sched::scx::load().map_err(|e| chain(&e))
}

/// Whether the sched_ext scheduler can be had. `scheduler` is what [`try_scheduler`] said.
pub fn sched_ext(
    facts: &HostFacts,
    slices: &Slices,
    scheduler: &Result<(), String>,
) -> Result<String, Obstacle> {
    if !facts.sched_ext {
        return Err(Obstacle {
            why: "kernel built without CONFIG_SCHED_CLASS_EXT".into(),
            change: None,
        });
    }
    if let Err(why) = scheduler {
        return Err(Obstacle {
            why: why.clone(),
            change: None,
        });
    }
    if slices.cores.is_empty() {
        return Err(no_cores());
    }
    if slices.mode != Mode::Interleaved {
        return Err(Obstacle::new(
            "it knows mode interleaved only",
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

/// On what terms a mechanism can be had.
pub fn terms(
    choice: MechanismChoice,
    facts: &HostFacts,
    slices: &Slices,
    accounting: &Result<(), String>,
    scheduler: &Result<(), String>,
) -> Result<String, Obstacle> {
    match choice {
        MechanismChoice::SchedExt => sched_ext(facts, slices, scheduler),
        MechanismChoice::Eevdf => eevdf(facts),
        MechanismChoice::Slots => slots(facts, slices, accounting),
    }
}

/// The mechanism that `mechanism` in the configuration comes down to on this host.
pub fn choose(
    facts: &HostFacts,
    slices: &Slices,
    accounting: &Result<(), String>,
    scheduler: &Result<(), String>,
) -> Result<MechanismChoice, Obstacle> {
    if !slices.enabled {
        return Err(Obstacle {
            why: "switched off in the configuration ([slices] enabled = false)".into(),
            change: None,
        });
    }
    if let [only] = slices.mechanisms[..] {
        return terms(only, facts, slices, accounting, scheduler).map(|_| only);
    }
    let mut reasons = Vec::new();
    for &choice in &slices.mechanisms {
        match terms(choice, facts, slices, accounting, scheduler) {
            Ok(_) => return Ok(choice),
            Err(o) => reasons.push(format!("{}: {}", choice.name(), o.sentence())),
        }
    }
    Err(Obstacle {
        why: reasons.join("; "),
        change: None,
    })
}

/// The table of `viola check`.
pub fn rows(
    facts: &HostFacts,
    slices: &Slices,
    accounting: &Result<(), String>,
    scheduler: &Result<(), String>,
    vms: &[Vm],
) -> Vec<Row> {
    let row = |name: &str, answer: Result<String, Obstacle>| match answer {
        Ok(why) => Row {
            name: name.into(),
            state: RowState::Yes,
            value: "yes".into(),
            why,
            change: None,
        },
        Err(Obstacle { why, change }) => Row {
            name: name.into(),
            state: RowState::No,
            value: "no".into(),
            why,
            change,
        },
    };
    let no_change = |why: &String| Obstacle {
        why: why.clone(),
        change: None,
    };
    vec![
        kernel(facts),
        inventory(vms),
        row(
            "accounting (BPF)",
            accounting
                .as_ref()
                .map(|()| "exact, at context switches".into())
                .map_err(no_change),
        ),
        row("slices: sched_ext", sched_ext(facts, slices, scheduler)),
        row("slices: slots", slots(facts, slices, accounting)),
        row("slices: eevdf", eevdf(facts)),
    ]
}

/// The row about vread; a running daemon knows more.
pub fn vread(daemon: Option<&viola_proto::vread::Vread>, config: &Vread) -> Row {
    let row = |state, value: String, why: String, change: Option<&str>| Row {
        name: "vread".into(),
        state,
        value,
        why,
        change: change.map(str::to_owned),
    };
    if config.is_off() {
        return row(
            RowState::Info,
            "off".into(),
            "nobody may read blocks of other VMs".into(),
            Some("see allow in [vread]"),
        );
    }
    let readers = config.readers().len();
    let Some(daemon) = daemon else {
        let why = format!("{readers} VMs may read; no daemon runs");
        return row(RowState::Info, "-".into(), why, None);
    };
    if !daemon.on {
        return row(RowState::No, "no".into(), daemon.why.clone(), None);
    }
    let serving = daemon.datanodes.iter().filter(|d| d.serving).count();
    let connected = daemon.readers.iter().filter(|r| r.connected).count();
    let mut why = format!(
        "{serving} of {} DataNode VMs are served, {connected} of {readers} readers connected",
        daemon.datanodes.len()
    );
    if let Some(not) = daemon.datanodes.iter().find(|d| !d.serving) {
        why.push_str(&format!("; {}: {}", not.name, not.why));
    }
    let is_good = serving > 0 && serving == daemon.datanodes.len();
    let state = if is_good { RowState::Yes } else { RowState::No };
    row(state, if is_good { "yes" } else { "no" }.into(), why, None)
}

fn kernel(facts: &HostFacts) -> Row {
    let name = format!("kernel {}.{}", facts.kernel.major, facts.kernel.minor);
    if facts.kernel.has_fair_server() {
        return Row {
            name,
            state: RowState::Yes,
            value: "ok".into(),
            why: String::new(),
            change: None,
        };
    }
    Row {
        name,
        state: RowState::No,
        value: "old".into(),
        why: "slices need Linux 6.12".into(),
        change: Some("run Linux 6.12 or later".into()),
    }
}

fn inventory(vms: &[Vm]) -> Row {
    let mut kinds: Vec<(String, usize)> = Vec::new();
    for vm in vms {
        let name = vm.hypervisor.to_string();
        match kinds.iter_mut().find(|(k, _)| *k == name) {
            Some((_, n)) => *n += 1,
            None => kinds.push((name, 1)),
        }
    }
    let kinds: Vec<String> = kinds.iter().map(|(k, n)| format!("{n} {k}")).collect();
    let readable = vms.iter().filter(|vm| !vm.vcpus.is_empty()).count();
    let told = vms.iter().filter(|vm| vm.libvirt).count();
    let told = match told {
        0 => String::new(),
        n => format!(" ({n} of libvirt)"),
    };
    let why = if vms.is_empty() {
        "no UML or QEMU guest runs here".to_owned()
    } else {
        format!(
            "{}{told}; vCPU threads of {readable} are known",
            kinds.join(", ")
        )
    };
    Row {
        name: "VMs".into(),
        state: RowState::Info,
        value: vms.len().to_string(),
        why,
        change: None,
    }
}

/// Cores of a list that are in use, for messages.
pub fn cores_text(cores: &CpuSet) -> String {
    if cores.is_empty() {
        "-".into()
    } else {
        cores.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use viola_config::Config;
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

    #[test]
    fn slots_need_cores_that_are_set_aside_and_one_that_is_not() {
        let f = facts("6.18.1");
        assert_eq!(
            slots(&f, &slices("cores = \"1-2\""), &Ok(())),
            Ok("cores 1-2 are kept for VMs".into())
        );
        assert!(why(slots(&f, &slices(""), &Ok(()))).contains("[slices] cores"));
        assert!(
            why(slots(&f, &slices("cores = \"0-3\""), &Ok(())))
                .contains("leaves no CPU to the host")
        );
        assert_eq!(
            slots(&f, &slices("cores = \"0-3\"\nforce = true"), &Ok(())),
            Ok("cores 0-3 are kept for VMs; forced".into())
        );
    }

    #[test]
    fn an_old_kernel_is_refused_unless_forced() {
        let f = facts("6.1.0-18-amd64");
        assert!(
            why(slots(&f, &slices("cores = \"1\""), &Ok(())))
                .contains("Linux 6.12 or later, or set force")
        );
        assert!(slots(&f, &slices("cores = \"1\"\nforce = true"), &Ok(())).is_ok());
        assert!(why(eevdf(&f)).contains("6.12"));
        assert_eq!(kernel(&f).state, RowState::No);
    }

    #[test]
    fn throttling_of_real_time_groups_is_refused_with_what_to_change_even_when_forced() {
        let mut f = facts("6.18.1");
        f.rt_group_sched = Some(true);
        let s = slices("cores = \"1\"\nforce = true");
        assert_eq!(
            why(slots(&f, &s, &Ok(()))),
            "real-time throttling stops VMs for 50000 us of every 1000000 us: \
             sysctl kernel.sched_rt_runtime_us=-1, or boot with rt_group_sched=0"
        );
        for runtime in [-1, 1_000_000] {
            f.rt_runtime_us = Some(runtime);
            assert!(slots(&f, &s, &Ok(())).is_ok());
        }
    }

    #[test]
    fn without_the_accounting_program_or_privilege_there_are_no_slots() {
        let mut f = facts("6.18.1");
        let s = slices("cores = \"1\"");
        assert!(
            why(slots(&f, &s, &Err("kernel without BTF".into()))).contains("kernel without BTF")
        );
        f.privilege = Privilege::default();
        assert!(why(slots(&f, &s, &Ok(()))).contains("root"));
        assert!(why(eevdf(&f)).contains("root"));
    }

    fn none() -> Result<(), String> {
        Err("kernel built without CONFIG_SCHED_CLASS_EXT".into())
    }

    #[test]
    fn the_scheduler_is_for_who_asks_for_it_and_a_kernel_that_does_not_take_it_gives_a_sentence() {
        let mut f = facts("7.3.4");
        f.sched_ext = true;
        let one = slices("cores = \"1\"");
        let choice = |f: &HostFacts, s: &Slices, scheduler: &Result<(), String>| {
            choose(f, s, &Ok(()), scheduler)
        };
        assert_eq!(choice(&f, &one, &Ok(())), Ok(MechanismChoice::Slots));
        let refused = Err("the kernel refused viola's sched_ext scheduler at loading".to_owned());
        assert_eq!(choice(&f, &one, &refused), Ok(MechanismChoice::Slots));
        assert_eq!(choice(&f, &slices(""), &Ok(())), Ok(MechanismChoice::Eevdf));
        let paper = slices("cores = \"1\"\nmode = \"paper\"");
        assert_eq!(choice(&f, &paper, &Ok(())), Ok(MechanismChoice::Slots));
        let only = slices("cores = \"1\"\nmechanism = \"sched_ext\"");
        assert_eq!(choice(&f, &only, &Ok(())), Ok(MechanismChoice::SchedExt));
        let said = choice(&f, &only, &refused).unwrap_err().sentence();
        assert!(said.contains("refused"), "{said}");
        let first = slices("cores = \"1\"\nmechanism = [\"sched_ext\", \"eevdf\"]");
        assert_eq!(choice(&f, &first, &Ok(())), Ok(MechanismChoice::SchedExt));
        assert_eq!(choice(&f, &first, &refused), Ok(MechanismChoice::Eevdf));
        assert!(why(sched_ext(&f, &paper, &Ok(()))).contains("mode interleaved"));
        let said = try_scheduler(&facts("6.18.1")).err().unwrap();
        assert!(said.contains("CONFIG_SCHED_CLASS_EXT"), "{said}");
    }

    #[test]
    fn auto_takes_slots_then_eevdf_then_says_why_neither() {
        let f = facts("6.18.1");
        assert_eq!(
            choose(&f, &slices("cores = \"1\""), &Ok(()), &none()),
            Ok(MechanismChoice::Slots)
        );
        assert_eq!(
            choose(&f, &slices(""), &Ok(()), &none()),
            Ok(MechanismChoice::Eevdf)
        );
        assert!(choose(&f, &slices("mechanism = \"slots\""), &Ok(()), &none()).is_err());
        let old = choose(&facts("5.10.0"), &slices("cores = \"1\""), &Ok(()), &none()).unwrap_err();
        assert!(
            old.why.contains("slots: ") && old.why.contains("eevdf: "),
            "{}",
            old.why
        );
        assert!(
            choose(&f, &slices("enabled = false"), &Ok(()), &none())
                .unwrap_err()
                .why
                .contains("switched off")
        );
    }

    #[test]
    fn vread_is_off_until_it_is_allowed_and_then_says_whom_it_serves() {
        let config = |text: &str| {
            viola_config::Config::parse(std::path::Path::new("v.toml"), text)
                .unwrap()
                .vread
        };
        assert_eq!(vread(None, &config("")).value, "off");
        let c = config("[vread]\nallow = [{ reader = \"a\", datanode = \"dn*\" }]");
        assert_eq!(vread(None, &c).why, "1 VMs may read; no daemon runs");
        let mut daemon = viola_proto::vread::Vread {
            on: true,
            ..Default::default()
        };
        daemon.datanodes.push(viola_proto::vread::Datanode {
            name: "dn1".into(),
            why: "it has no channel to an agent".into(),
            ..Default::default()
        });
        let row = vread(Some(&daemon), &c);
        assert_eq!(
            (row.value.as_str(), row.why.as_str()),
            (
                "no",
                "0 of 1 DataNode VMs are served, 0 of 1 readers connected; dn1: it has no channel to an agent"
            )
        );
        daemon.datanodes[0].serving = true;
        assert_eq!(vread(Some(&daemon), &c).state, RowState::Yes);
    }

    #[test]
    fn the_table_counts_vms_by_hypervisor() {
        let mut silent = crate::testing::vm("b", 20, &[]);
        silent.vcpus.clear();
        let row = inventory(&[crate::testing::vm("a", 10, &[&[1]]), silent]);
        assert_eq!(
            (row.value.as_str(), row.why.as_str()),
            ("2", "2 uml; vCPU threads of 1 are known")
        );
    }
}
