// SPDX-License-Identifier: Apache-2.0
//! Carries out what clients and signals ask for.

use std::time::Instant;

use viola_host::Vm;
use viola_proto::lanes::{LaneChange, Nic};
use viola_proto::{Change, Done, VmReport};

use super::Control;
use crate::api::http::{Peer, Refusal, Request, Shared, refusal};
use crate::vms::find;
use crate::vms::report::class_text;
use crate::vms::settings::Controls;
use viola_cli::error::chain;
use viola_cli::log::{self, Level};
use viola_cli::quantities::{cap_text, exact};
use viola_config::Config;

impl Control {
    /// Carries a request out and replies. Clients that ask afterwards see its effect. A client that went away gets no reply.
    pub(crate) fn answer(&mut self, request: Request, shared: &Shared) {
        let publish = |control: &Self| shared.publish(control.view(Instant::now()));
        match request {
            Request::Publish { reply } => {
                if !shared.is_fresh() {
                    publish(self);
                }
                let _ = reply.send(Ok(()));
            }
            Request::Reload => {
                self.reload();
                publish(self);
            }
            Request::Set {
                name,
                change,
                peer,
                reply,
            } => {
                let answer = self.set(&name, &change, peer);
                publish(self);
                let _ = reply.send(answer);
            }
            Request::Lane {
                name,
                change,
                peer,
                reply,
            } => {
                let _ = reply.send(self.set_lane(&name, change, peer));
            }
            Request::Pause { stop, peer, reply } => {
                let answer = match stop {
                    true => self.stop(peer),
                    false => Ok(self.resume(peer)),
                };
                publish(self);
                let _ = reply.send(answer);
            }
            Request::Quit(_) => {}
        }
    }

    /// Changes the settings of a VM and plans again at once.
    fn set(&mut self, name: &str, change: &Change, peer: Peer) -> Result<VmReport, Refusal> {
        let now = Instant::now();
        let found = |vms: &[Vm]| {
            let names = vms.iter().map(|vm| (vm.name.as_str(), vm.id.as_str()));
            find::find(names, name)
        };
        // The VM may have been started after the last scan.
        if found(self.inputs.vms()).is_err() {
            self.scan_host(now);
        }
        let at = found(self.inputs.vms()).map_err(|e| e.answer(name))?;
        let vm = self.inputs.vms()[at].clone();
        if self.inputs.dry_run && change.keep {
            return Err(refusal(400, "a dry run keeps nothing; leave --keep out"));
        }
        let before = self.inputs.controls(&vm);
        let settings = &mut self.inputs.settings;
        let changed = match change.for_s {
            Some(seconds) => settings.change_for(&vm, change, seconds, now),
            None => settings.change(&vm, change),
        };
        changed.map_err(|e| refusal(400, e))?;
        if let Some(lanes) = &self.lanes {
            lanes.set_overrides(self.inputs.settings.lanes());
        }
        let lasting = match change.for_s {
            Some(seconds) => format!(", for {seconds} s"),
            None if change.keep => ", kept".into(),
            None => String::new(),
        };
        self.log_controls(&vm, &before, &format!("viola set by {peer}{lasting}"));
        self.read_facts(now);
        self.plan_and_apply(now);
        let mut reports = self.reports().into_iter();
        let report = reports.find(|r| r.id == vm.id.as_str());
        report.ok_or_else(|| refusal(404, format!("{} is gone", vm.name)))
    }

    /// Ends the classes that were set for a time that is over. Returns whether there were any.
    pub(crate) fn end_temporary_classes(&mut self, now: Instant) -> bool {
        let ended = self.inputs.settings.end_temporary(now);
        for vm in self.inputs.vms() {
            if ended.iter().any(|id| id == vm.id.as_str()) {
                let class = class_text(self.inputs.controls(vm).class.value);
                let line = format!("class {class}: the time of the temporary class is over");
                log::about(Level::Notice, &vm.id, line);
            }
        }
        !ended.is_empty()
    }

    /// Changes whether a guest may have a VF, from the next sample on.
    fn set_lane(&mut self, name: &str, change: LaneChange, peer: Peer) -> Result<Nic, Refusal> {
        let Some(lanes) = &self.lanes else {
            return Err(refusal(400, "this is a dry run, and moves no VFs"));
        };
        let shown = lanes.shown();
        let known = shown
            .nics
            .iter()
            .map(|n| (n.name.as_str(), n.guest.as_str()));
        let at = find::find(known, name).map_err(|e| e.answer(name))?;
        let mut nic = shown.nics[at].clone();
        let set = self.inputs.settings.change_lane(&nic.guest, change);
        let set = set.map_err(|e| refusal(400, e))?;
        lanes.set_overrides(self.inputs.settings.lanes());
        let kept = if change.keep { ", kept" } else { "" };
        let lane = match set {
            Some((lane, source)) => {
                (nic.lane, nic.source) = (lane, Some(source));
                lane.to_string()
            }
            None => "as the configuration says".to_owned(),
        };
        let what = format!("lane {lane}: viola set by {peer}{kept}");
        log::about(Level::Notice, &nic.guest, what);
        Ok(nic)
    }

    /// Logs each control of a VM that is no longer as in `old`, and who changed it.
    fn log_controls(&self, vm: &Vm, old: &Controls, by: &str) {
        let new = self.inputs.controls(vm);
        let log = |what: &str, was: String, is: String| {
            if was != is {
                let line = format!("{what} {is} (was {was}): {by}");
                log::about(Level::Notice, &vm.id, line);
            }
        };
        let class = |c: &Controls| class_text(c.class.value).to_owned();
        log("class", class(old), class(&new));
        log(
            "microslice",
            exact(old.microslice.value),
            exact(new.microslice.value),
        );
        log(
            "weight",
            old.weight.value.to_string(),
            new.weight.value.to_string(),
        );
        log("cap", cap_text(old.cap.value), cap_text(new.cap.value));
    }

    /// Puts everything back as without viola, until [`Control::resume`].
    fn stop(&mut self, peer: Peer) -> Result<Done, Refusal> {
        let by = format!("viola stop --all by {peer}");
        self.inputs.stopped = Some(by.clone());
        log::line(Level::Notice, format!("stopped: {by}"));
        let not_restored = self.slices.stop().err();
        if self.workers.as_ref().is_some_and(|w| !w.stop(&by)) {
            let error = "a worker of vread does not end; try viola restore";
            log::line(Level::Error, error);
            return Err(refusal(500, error));
        }
        if self.lanes.as_ref().is_some_and(|l| !l.stop(&by)) {
            let error = "VFs are being taken back; see viola lanes";
            log::line(Level::Warning, error);
        }
        if let Some(e) = not_restored {
            let error = format!(
                "not everything could be put back: {}; try viola restore",
                chain(&e)
            );
            log::line(Level::Error, &error);
            return Err(refusal(500, error));
        }
        self.plan_and_apply(Instant::now());
        let done = "all VMs have stock scheduling; viola start goes on".to_owned();
        Ok(Done { done })
    }

    /// Starts again after [`Control::stop`], and tries again what failed.
    fn resume(&mut self, peer: Peer) -> Done {
        let now = Instant::now();
        self.inputs.stopped = None;
        log::line(Level::Notice, format!("started: viola start by {peer}"));
        self.slices.retry_all(&self.inputs);
        if let Some(workers) = &self.workers {
            workers.resume();
        }
        if let Some(lanes) = &self.lanes {
            lanes.resume();
        }
        self.read_facts(now);
        self.scan_host(now);
        self.plan_and_apply(now);
        let done = self.status(now).why;
        Done { done }
    }

    /// SIGHUP: reads the configuration again. A wrong one is logged, and the old one stays.
    fn reload(&mut self) {
        let now = Instant::now();
        let path = self.inputs.config.path.clone();
        let online = self.inputs.facts.online();
        let read = Config::read(&path).and_then(|c| c.check_host(&online).map(|()| c));
        let mut config = match read {
            Ok(config) => config,
            Err(e) => {
                let what = format!("SIGHUP: {e}; the old configuration holds");
                return log::line(Level::Error, what);
            }
        };
        let (old, new) = (&self.inputs.config.daemon, &config.daemon);
        let fixed = |d: &viola_config::Daemon| {
            let files = (d.run_dir.clone(), d.state_dir.clone());
            let control = (d.socket.clone(), d.group.clone());
            let read = (d.read_socket.clone(), d.read_group.clone());
            (control, read, d.vms, files)
        };
        if fixed(old) != fixed(new) {
            log::line(
                Level::Warning,
                "SIGHUP: socket, group, read_socket, read_group, vms, run_dir and state_dir change only at the next start",
            );
        }
        config.daemon = viola_config::Daemon {
            interval: new.interval,
            ..old.clone()
        };
        let vms = self.inputs.vms().iter();
        let before: Vec<(Vm, Controls)> = vms
            .map(|vm| (vm.clone(), self.inputs.controls(vm)))
            .collect();
        log::line(
            Level::Notice,
            format!("SIGHUP: {} is in force", path.display()),
        );
        self.inputs.config = config;
        self.set_launchers();
        if let Some(workers) = &self.workers {
            workers.configure(&self.inputs.config);
        }
        if let Some(lanes) = &self.lanes {
            lanes.configure(&self.inputs.config);
        }
        for (vm, old) in &before {
            self.log_controls(vm, old, "configuration");
        }
        crate::host::affinity::leave_vm_cores(&self.inputs.config, &self.inputs.facts);
        self.slices.retry_all(&self.inputs);
        self.read_facts(now);
        self.scan_host(now);
        self.plan_and_apply(now);
    }
}
