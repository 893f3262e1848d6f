// SPDX-License-Identifier: Apache-2.0
//! `viola prepare` and `viola unprepare`: what a libvirt VM needs for an accelerator, written into its domain and plugged where that
//! is possible.

mod domain;
mod show;
mod virsh;

use std::path::{Path, PathBuf};

use viola_config::{Config, Transport};
use viola_daemon::workers::run_dir;

use crate::args::{self, PrepareWhat};
use domain::{Part, Use, VmNames};
use show::{Answer, Line, State};
use viola_cli::error::{Failure, Outcome};
use viola_cli::quantities::quoted;
use virsh::Virsh;

/// Changes the domain of a VM.
pub fn prepare(args: &args::Prepare) -> Outcome {
    let (uses, mount) = match args.what {
        PrepareWhat::Vread => granted(&args.vm, &args.config)?,
        PrepareWhat::Vpipe => (vec![Use::Vpipe], PathBuf::new()),
        PrepareWhat::Turbo => (vec![Use::Turbo], PathBuf::new()),
        PrepareWhat::Lane => (vec![Use::Lane], PathBuf::new()),
    };
    let vm = VmNames {
        name: args.vm.clone(),
        mount,
    };
    let answer = prepare_by(&Virsh::default(), &vm, uses, args.dry_run)?;
    show::print(&answer, args.json)
}

/// Takes back what `prepare` has changed.
pub fn unprepare(args: &args::Unprepare) -> Outcome {
    let uses = args.what.map(|what| match what {
        PrepareWhat::Vread => vec![Use::Datanode, Use::Reader],
        PrepareWhat::Vpipe => vec![Use::Vpipe],
        PrepareWhat::Turbo => vec![Use::Turbo],
        PrepareWhat::Lane => vec![Use::Lane],
    });
    let answer = unprepare_by(&Virsh::default(), &args.vm, uses, args.dry_run)?;
    show::print(&answer, args.json)
}

/// What the grants of vread make of the VM, and the socket of its mount.
fn granted(vm: &str, path: &Path) -> Outcome<(Vec<Use>, PathBuf)> {
    let config = Config::read(path).map_err(|e| Failure::usage(e.to_string()))?;
    let id = format!("qemu:{vm}");
    let mut uses = Vec::new();
    let allow = &config.vread.allow;
    if allow
        .iter()
        .any(|a| a.is_for_datanode(vm) || a.is_for_datanode(&id))
    {
        uses.push(Use::Datanode);
    }
    let is_named = |reader: &&str| *reader == vm || *reader == id;
    let reader = config.vread.readers().into_iter().find(is_named);
    let setting = config.vm(&id, vm).map(|vm| vm.vread.transport);
    let has_mount = setting.unwrap_or_default() != Transport::Stream;
    if reader.is_some() && has_mount {
        uses.push(Use::Reader);
    }
    if uses.is_empty() {
        let why = match reader {
            Some(_) => "reads by a stream, which needs no mount ([vm.vread] transport)",
            None => {
                "is named by allow in [vread] neither as reader nor as datanode; write the grant first"
            }
        };
        return Err(Failure::usage(format!(
            "{}: VM {} {why}",
            path.display(),
            quoted(vm)
        )));
    }
    let folder = config.vread.sockets.clone();
    let folder = folder.unwrap_or_else(|| config.daemon.run_dir.join("mounts"));
    let name = run_dir::component(reader.unwrap_or(vm));
    Ok((uses, folder.join(format!("{name}.sock"))))
}

/// The domain that libvirt keeps, and the one of the VM's process.
fn domains(virsh: &Virsh, vm: &str) -> Outcome<(String, Option<String>)> {
    let xml = virsh.domain(vm)?;
    let name = domain::name(&xml).map_err(|e| refused(vm, &e))?;
    if name != vm {
        return Err(Failure::usage(format!(
            "{} is libvirt's number or UUID of VM {}; give the VM's name",
            quoted(vm),
            quoted(&name)
        )));
    }
    Ok((xml, virsh.live(vm)?))
}

fn prepare_by(virsh: &Virsh, vm: &VmNames, uses: Vec<Use>, dry_run: bool) -> Outcome<Answer> {
    let name = &vm.name;
    let fault = |e| refused(name, &e);
    let (xml, live) = domains(virsh, name)?;
    let done = domain::prepare(&xml, &uses, vm).map_err(fault)?;
    if !dry_run && done.xml != xml {
        virsh.define(&done.xml)?;
        // By now libvirt has given all other devices a place.
        if let Some(more) = domain::with_free_port(&virsh.domain(name)?).map_err(fault)? {
            virsh.define(&more)?;
        }
    }
    let mut parts = Vec::new();
    for part in Part::ALL {
        let is_present = done.present.contains(&part);
        if !is_present && !done.added.contains(&part) {
            continue;
        }
        let runs_with = match &live {
            Some(live) => domain::has(live, part).map_err(fault)?,
            None => true,
        };
        let (state, why) = match &live {
            _ if is_present && runs_with => (State::Present, String::new()),
            Some(_) if part.can_be_plugged() && dry_run => (State::Now, String::new()),
            Some(_) if part.can_be_plugged() => match virsh.attach(name, &part.xml(vm)) {
                Ok(()) => (State::Now, String::new()),
                Err(why) => (State::NextStart, why),
            },
            _ => (State::NextStart, String::new()),
        };
        parts.push(Line::new(part, vm, state, why));
    }
    let mut next = Vec::from_iter(restart(name, live.is_some(), &parts));
    next.extend(apparmor(&parts));
    next.extend(uses.iter().flat_map(|u| show::by_hand(*u, name)));
    Ok(Answer {
        vm: name.clone(),
        dry_run,
        uses,
        parts,
        next,
    })
}

fn unprepare_by(
    virsh: &Virsh,
    name: &str,
    uses: Option<Vec<Use>>,
    dry_run: bool,
) -> Outcome<Answer> {
    let fault = |e| refused(name, &e);
    let (xml, live) = domains(virsh, name)?;
    let (text, gone) = domain::unprepare(&xml, uses.as_deref()).map_err(fault)?;
    if !dry_run && text != xml {
        virsh.define(&text)?;
    }
    let vm = VmNames {
        name: name.to_owned(),
        mount: PathBuf::new(),
    };
    let mut parts = Vec::new();
    for part in gone {
        let element = match &live {
            Some(live) => domain::source_of(live, part).map_err(fault)?,
            None => None,
        };
        let (state, why) = match element {
            None => (State::Removed, String::new()),
            Some(_) if part.can_be_plugged() && dry_run => (State::Removed, String::new()),
            Some(element) if part.can_be_plugged() => match virsh.detach(name, &element) {
                Ok(()) => (State::Removed, String::new()),
                Err(why) => (State::NextStart, why),
            },
            Some(_) => (State::NextStart, String::new()),
        };
        parts.push(Line::new(part, &vm, state, why));
    }
    let next = Vec::from_iter(restart(name, live.is_some(), &parts));
    Ok(Answer {
        vm: name.to_owned(),
        dry_run,
        uses: uses.unwrap_or_default(),
        parts,
        next,
    })
}

fn refused(vm: &str, e: &domain::DomainError) -> Failure {
    Failure::run(format!("VM {}: {e}", quoted(vm)))
}

/// The step by which a running VM gets what cannot be plugged.
fn restart(vm: &str, is_running: bool, parts: &[Line]) -> Option<String> {
    let waits = is_running && parts.iter().any(|line| line.state == State::NextStart);
    waits.then(|| {
        let vm = show::shell_word(vm);
        format!(
            "virsh shutdown {vm}; once it is off, virsh start {vm} (a reboot inside the VM is not enough)"
        )
    })
}

/// The step by which AppArmor lets QEMU have the sockets; libvirt allows only those that it makes itself.
fn apparmor(parts: &[Line]) -> Option<String> {
    let sockets = [Part::EventSocket, Part::LaneSocket, Part::BlocksMount];
    let is_armed = std::fs::read_to_string("/sys/module/apparmor/parameters/enabled");
    let is_armed = is_armed.is_ok_and(|text| text.trim() == "Y");
    let needs = is_armed && parts.iter().any(|line| sockets.contains(&line.part));
    needs.then(|| {
        "before the VM starts, in /etc/apparmor.d/local/abstractions/libvirt-qemu: owner /var/lib/libvirt/qemu/viola-*.qmp rw, and \
         /run/viola/mounts/*.sock rw,"
            .into()
    })
}

#[cfg(test)]
mod tests;
