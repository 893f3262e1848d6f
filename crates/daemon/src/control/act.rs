// SPDX-License-Identifier: Apache-2.0
//! From what is known to what is done: candidates, a draft, and the engine that carries it out.

use std::time::Instant;

use viola_host::Vm;

use crate::control::{Control, REFUSAL_AGE};
use crate::slices::decide::placement::Placed;
use crate::slices::decide::plan::{self, Candidate, CoreNote, Draft, Frame, TurboFrame};
use viola_cli::error::chain;
use viola_cli::log::{self, Level};
use viola_config::MechanismChoice;

impl Control {
    /// Draws up a plan and carries it out.
    pub(super) fn act(&mut self, now: Instant) {
        let choice = self.choice.clone().ok().filter(|_| self.stopped.is_none());
        if !self.dry_run {
            self.engine.choose(choice);
        }
        // A refusal makes another plan; each VM can be refused once.
        for _ in 0..=self.inventory.vms().len() {
            let (draft, placed) = self.draw(now, choice);
            self.draft = draft;
            self.tell_moved(&placed);
            self.placement.take(now, placed);
            // Only the slots' controllers listen.
            if choice == Some(MechanismChoice::Slots) {
                self.watch_packets();
            }
            if self.dry_run {
                self.engine
                    .pretend(choice, &self.draft, self.inventory.vms());
                break;
            }
            let driven =
                self.engine
                    .drive(now, &self.draft, self.inventory.vms(), self.meter.acct());
            if driven.refused.is_empty() {
                break;
            }
            for (id, why) in driven.refused {
                self.blocked.insert(id.clone(), why.clone());
                self.refused.insert(id, (now + REFUSAL_AGE, why));
            }
        }
        for (id, why) in self
            .draft
            .left_out
            .iter()
            .filter(|l| !self.left_out.contains(l))
        {
            log::about(Level::Warning, id, format!("stock scheduling: {why}"));
        }
        self.left_out.clone_from(&self.draft.left_out);
    }

    fn draw(&self, now: Instant, choice: Option<MechanismChoice>) -> (Draft, Placed) {
        let (slices, turbo) = (&self.config.slices, &self.config.turbo);
        let split = self.pools.split(&slices.cores, turbo, &self.online);
        let frame = Frame {
            cores: &split.regular,
            algorithm: slices.algorithm(),
            batch_slice: slices.batch_slice(),
            turbo: (!turbo.cores.is_empty()).then_some(TurboFrame {
                cores: &split.turbo,
                slot: turbo.slot,
                budget_permille: turbo.budget,
                reserve_permille: turbo.reserve,
                why_none: &split.why_none,
            }),
        };
        let mut cores = split.regular.clone();
        cores.extend(&split.turbo);
        let candidates: Vec<Candidate<'_>> = self
            .inventory
            .vms()
            .iter()
            .map(|vm| self.candidate(vm))
            .collect();
        match choice {
            None => (Draft::default(), Placed::default()),
            Some(MechanismChoice::Eevdf) => (plan::eevdf(frame, &candidates), Placed::default()),
            Some(_) => {
                let mut placed = Placed::default();
                let mut draft = plan::slots(frame, &candidates, |asks| {
                    let (answers, p) = self.placement.answer(
                        now,
                        &self.facts,
                        &cores,
                        &candidates,
                        asks,
                        &self.meter,
                    );
                    placed = p;
                    answers
                });
                let offline = |cpu| CoreNote {
                    cpu,
                    managed: false,
                    why: "it is offline".into(),
                    vms: Vec::new(),
                };
                draft.cores.extend(split.offline.iter().map(offline));
                let is_noted = |cpu: &u32| draft.cores.iter().any(|note| note.cpu == *cpu);
                let spare: Vec<u32> = turbo.cores.iter().filter(|cpu| !is_noted(cpu)).collect();
                draft.cores.extend(spare.into_iter().map(|cpu| CoreNote {
                    why: "no turbo core is needed there".into(),
                    ..offline(cpu)
                }));
                draft.cores.sort_by_key(|note| note.cpu);
                (draft, placed)
            }
        }
    }

    /// Why vCPUs that are pinned go to another core.
    fn tell_moved(&self, placed: &Placed) {
        for (id, vcpu, why) in &placed.moved {
            let threads = self
                .inventory
                .get(id)
                .and_then(|vm| vm.vcpus.get(*vcpu))
                .map(|v| &v.threads);
            let pin = threads
                .and_then(|t| t.first())
                .and_then(|t| self.draft.pins.get(t));
            if let Some(cpus) = pin {
                log::about(
                    Level::Notice,
                    id,
                    format!("vCPU {vcpu} goes to core {cpus}: {why}"),
                );
            }
        }
    }

    /// Lets the accounting program announce the packets of latency-sensitive VMs to their controllers.
    fn watch_packets(&mut self) {
        if self.dry_run {
            return;
        }
        match self.meter.watch_packets(&self.draft.interrupts) {
            Ok(served) => self.draft.sees_packets_of(&served, self.inventory.vms()),
            // They are then given the core on suspicion.
            Err(e) => self.say(
                Level::Warning,
                format!("packets are not seen: {}", chain(&e)),
            ),
        }
    }

    pub(super) fn candidate<'a>(&self, vm: &'a Vm) -> Candidate<'a> {
        let c = self.settings.controls(&self.config, vm);
        Candidate {
            vm,
            index: self.meter.index(&vm.id).unwrap_or(u32::MAX),
            class: self.classes.class(&vm.id, c.class.value),
            turbo: self.turbos.has(&vm.id, c.class.value),
            microslice: c.microslice.value,
            weight: c.weight.value,
            cap_permille: c.cap.value,
            capped_by_viola: c.capped_by_viola(),
            vcpu_quota: c.vcpu_quota,
            allowed: self.allowed.get(&vm.id).cloned().unwrap_or_default(),
            blocked: self.blocked.get(&vm.id).cloned(),
        }
    }
}
