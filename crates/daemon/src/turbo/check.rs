// SPDX-License-Identifier: Apache-2.0
//! What `viola check` says of turbo cores.

use viola_host::facts::HostFacts;
use viola_host::{CpuSet, Hypervisor, Vm};
use viola_proto::{Row, RowState};

use crate::host::check::Obstacle;
use viola_config::{Config, MechanismChoice};

/// The row about turbo cores. `mechanism` is what [`crate::slices`] uses, or why it uses none.
pub fn row(
    config: &Config,
    facts: &HostFacts,
    mechanism: Result<MechanismChoice, Obstacle>,
    vms: &[Vm],
) -> Row {
    let supported = mechanism
        .map_err(|o| o.sentence())
        .and_then(has_turbo_cores);
    let (state, value, why, change) =
        describe(&config.turbo.cores, &facts.online(), supported, vms);
    Row {
        name: "turbo cores".into(),
        state,
        value: value.into(),
        why,
        change: change.map(str::to_owned),
    }
}

/// Whether a mechanism schedules turbo cores.
fn has_turbo_cores(choice: MechanismChoice) -> Result<(), String> {
    match choice {
        MechanismChoice::Slots | MechanismChoice::SchedExt => Ok(()),
        MechanismChoice::Eevdf => Err("it needs slots or sched_ext".to_owned()),
    }
}

fn describe(
    cores: &CpuSet,
    online: &CpuSet,
    supported: Result<(), String>,
    vms: &[Vm],
) -> (RowState, &'static str, String, Option<&'static str>) {
    if cores.is_empty() {
        let why = "no cores are named in [turbo] cores".to_owned();
        return (RowState::Info, "off", why, None);
    }
    if let Err(why) = supported {
        return (RowState::No, "no", why, None);
    }
    if !cores.iter().any(|cpu| online.contains(cpu)) {
        let why = format!("{cores} of [turbo] cores is offline");
        return (RowState::No, "no", why, None);
    }
    let able = |vm: &&Vm| vm.vcpus.len() >= 2;
    let (all, able) = (vms.len(), vms.iter().filter(able).count());
    let mut why = match cores.len() {
        1 => format!("core {cores}"),
        n => format!("up to {n} cores of {cores}"),
    };
    why.push_str(&format!(
        "; {able} of {all} VMs have the two vCPUs that it takes"
    ));
    let needs_agent = |vm: &Vm| vm.vcpus.len() >= 2 && vm.hypervisor != Hypervisor::Uml;
    let change = vms
        .iter()
        .any(needs_agent)
        .then_some("let viola-agent move their interrupts, see [turbo] in its configuration");
    (RowState::Yes, "yes", why, change)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vm;

    fn cpus(list: &str) -> CpuSet {
        list.parse().unwrap()
    }

    #[test]
    fn the_row_says_which_cores_and_how_many_vms_could_use_them() {
        let vms = [vm("a", 10, &[&[1], &[1]]), vm("b", 20, &[&[1]])];
        let (state, value, why, change) = describe(&cpus("2-3"), &cpus("0-3"), Ok(()), &vms);
        assert_eq!((state, value), (RowState::Yes, "yes"));
        assert_eq!(
            why,
            "up to 2 cores of 2-3; 1 of 2 VMs have the two vCPUs that it takes"
        );
        assert_eq!(change, None);
        let mut kvm = vms;
        kvm[0].hypervisor = Hypervisor::Qemu;
        let (_, _, why, change) = describe(&cpus("2"), &cpus("0-3"), Ok(()), &kvm);
        assert!(why.starts_with("core 2; "), "{why}");
        assert!(change.is_some());
    }

    #[test]
    fn slots_and_sched_ext_have_turbo_cores_and_eevdf_has_none() {
        assert_eq!(has_turbo_cores(MechanismChoice::Slots), Ok(()));
        assert_eq!(has_turbo_cores(MechanismChoice::SchedExt), Ok(()));
        assert!(has_turbo_cores(MechanismChoice::Eevdf).is_err());
    }

    #[test]
    fn without_cores_without_slots_or_offline_it_says_so() {
        let none = describe(&CpuSet::new(), &cpus("0-3"), Ok(()), &[]);
        assert_eq!((none.0, none.1), (RowState::Info, "off"));
        let no = describe(&cpus("2"), &cpus("0-3"), Err("no BPF".into()), &[]);
        assert_eq!((no.0, no.2.as_str()), (RowState::No, "no BPF"));
        let off = describe(&cpus("9"), &cpus("0-3"), Ok(()), &[]);
        assert!(off.0 == RowState::No && off.2.contains("offline"));
    }
}
