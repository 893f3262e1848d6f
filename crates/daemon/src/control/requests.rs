// SPDX-License-Identifier: Apache-2.0
//! What clients and signals ask for.

use std::time::Instant;

use viola_host::Vm;
use viola_proto::lanes::{LaneChange, Nic};
use viola_proto::{Change, Done, VmReport};

use crate::api::http::{Peer, Refusal};
use crate::control::{Control, show};
use crate::vms::find;
use crate::vms::settings::Controls;
use viola_cli::error::chain;
use viola_cli::log::{self, Level};
use viola_cli::quantities::{cap_text, exact};
use viola_config::Config;

impl Control {
    /// Changes what holds for a VM, at once.
    pub fn set(&mut self, name: &str, change: &Change, peer: Peer) -> Result<VmReport, Refusal> {
        let refuse = |status: u16, error: String| {
            (
                status,
                viola_proto::Error {
                    error,
                    nearest: Vec::new(),
                },
            )
        };
        let now = Instant::now();
        let found = |vms: &[Vm]| {
            find::find(
                vms.iter().map(|vm| (vm.name.as_str(), vm.id.as_str())),
                name,
            )
        };
        // It may have been started a moment ago.
        if found(self.inventory.vms()).is_err() {
            self.look(now);
        }
        let at = found(self.inventory.vms()).map_err(|e| e.answer(name))?;
        let vm = self.inventory.vms()[at].clone();
        if self.dry_run && change.keep {
            return Err(refuse(
                400,
                "a dry run keeps nothing; leave --keep out".into(),
            ));
        }
        let before = self.settings.controls(&self.config, &vm);
        self.settings
            .change(&vm, change)
            .map_err(|e| refuse(400, e))?;
        if let Some(lanes) = &self.lanes {
            lanes.said(self.settings.lanes());
        }
        let by = format!(
            "viola set by {peer}{}",
            if change.keep { ", kept" } else { "" }
        );
        self.tell_controls(&vm, &before, &by);
        self.read_facts(now);
        self.act(now);
        self.reports()
            .into_iter()
            .find(|r| r.id == vm.id.as_str())
            .ok_or_else(|| refuse(404, format!("{} is gone", vm.name)))
    }

    /// Changes whether a guest may have a VF; it takes effect with the next sample.
    pub fn lane(&mut self, name: &str, change: LaneChange, peer: Peer) -> Result<Nic, Refusal> {
        let refuse = |status: u16, error: String| {
            let nearest = Vec::new();
            (status, viola_proto::Error { error, nearest })
        };
        let Some(lanes) = &self.lanes else {
            return Err(refuse(400, "this is a dry run, and moves no VFs".into()));
        };
        let shown = lanes.shown();
        let known = shown
            .nics
            .iter()
            .map(|n| (n.name.as_str(), n.guest.as_str()));
        let at = find::find(known, name).map_err(|e| e.answer(name))?;
        let mut nic = shown.nics[at].clone();
        let said = self.settings.change_lane(&nic.guest, change);
        let said = said.map_err(|e| refuse(400, e))?;
        lanes.said(self.settings.lanes());
        let kept = if change.keep { ", kept" } else { "" };
        let word = match said {
            Some((lane, source)) => {
                (nic.lane, nic.source) = (lane, Some(source));
                lane.to_string()
            }
            None => "as the configuration says".to_owned(),
        };
        let what = format!("lane {word}: viola set by {peer}{kept}");
        log::about(Level::Notice, &nic.guest, what);
        Ok(nic)
    }

    /// One line per control that is another one now.
    pub(super) fn tell_controls(&self, vm: &Vm, old: &Controls, by: &str) {
        let new = self.settings.controls(&self.config, vm);
        let tell = |what: &str, was: String, is: String| {
            if was != is {
                log::about(
                    Level::Notice,
                    &vm.id,
                    format!("{what} {is} (was {was}): {by}"),
                );
            }
        };
        let class = |c: &Controls| show::class_text(c.class.value).to_owned();
        tell("class", class(old), class(&new));
        tell(
            "microslice",
            exact(old.microslice.value),
            exact(new.microslice.value),
        );
        tell(
            "weight",
            old.weight.value.to_string(),
            new.weight.value.to_string(),
        );
        tell("cap", cap_text(old.cap.value), cap_text(new.cap.value));
    }

    /// Stops everything until further notice, or goes on.
    pub fn pause(&mut self, stop: bool, peer: Peer) -> Result<Done, Refusal> {
        let now = Instant::now();
        self.stopped = stop.then(|| format!("viola stop --all by {peer}"));
        let done = if stop {
            log::line(
                Level::Notice,
                format!("stopped: viola stop --all by {peer}"),
            );
            let failed = self.engine.stop().err();
            let by = format!("viola stop --all by {peer}");
            if self.vread.as_ref().is_some_and(|v| !v.stop(&by)) {
                let error = "a worker of vread does not end; try viola restore".to_owned();
                log::line(Level::Error, &error);
                return Err((
                    500,
                    viola_proto::Error {
                        error,
                        nearest: Vec::new(),
                    },
                ));
            }
            if self.lanes.as_ref().is_some_and(|l| !l.stop(&by)) {
                let error = "VFs are being taken back; see viola lanes".to_owned();
                log::line(Level::Warning, &error);
            }
            if let Some(e) = failed {
                let error = format!(
                    "not everything could be put back: {}; try viola restore",
                    chain(&e)
                );
                log::line(Level::Error, &error);
                return Err((
                    500,
                    viola_proto::Error {
                        error,
                        nearest: Vec::new(),
                    },
                ));
            }
            "all VMs have stock scheduling; viola start goes on".to_owned()
        } else {
            log::line(Level::Notice, format!("started: viola start by {peer}"));
            self.engine.trouble.forgive();
            self.try_scheduler_again();
            self.refused.clear();
            if let Some(vread) = &self.vread {
                vread.go_on();
            }
            if let Some(lanes) = &self.lanes {
                lanes.go_on();
            }
            self.read_facts(now);
            self.look(now);
            String::new()
        };
        self.act(now);
        let done = if stop { done } else { self.status(now).why };
        Ok(Done { done })
    }

    /// Reads the configuration again; a wrong one is told and left.
    pub fn reload(&mut self) {
        let path = self.config.path.clone();
        let read = Config::read(&path).and_then(|c| c.check_host(&self.facts.online()).map(|()| c));
        let mut config = match read {
            Ok(config) => config,
            Err(e) => {
                log::line(
                    Level::Error,
                    format!("SIGHUP: {e}; the old configuration holds"),
                );
                return;
            }
        };
        let (old, new) = (&self.config.daemon, &config.daemon);
        let fixed = |d: &viola_config::Daemon| {
            (
                d.socket.clone(),
                d.group.clone(),
                d.vms,
                d.run_dir.clone(),
                d.state_dir.clone(),
            )
        };
        if fixed(old) != fixed(new) {
            log::line(
                Level::Warning,
                "SIGHUP: socket, group, vms, run_dir and state_dir hold from the next start on",
            );
        }
        config.daemon = viola_config::Daemon {
            interval: new.interval,
            ..old.clone()
        };
        let before: Vec<(Vm, Controls)> = self
            .inventory
            .vms()
            .iter()
            .map(|vm| (vm.clone(), self.settings.controls(&self.config, vm)))
            .collect();
        log::line(Level::Notice, format!("SIGHUP: {} holds", path.display()));
        self.config = config;
        if let Some(vread) = &self.vread {
            vread.configure(&self.config);
        }
        if let Some(lanes) = &self.lanes {
            lanes.configure(&self.config);
        }
        for (vm, old) in &before {
            self.tell_controls(vm, old, "configuration");
        }
        crate::step_aside(&self.config, &self.facts);
        let now = Instant::now();
        self.engine.trouble.forgive();
        self.try_scheduler_again();
        self.refused.clear();
        self.read_facts(now);
        self.look(now);
        self.act(now);
    }
}
