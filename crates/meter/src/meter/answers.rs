// SPDX-License-Identifier: Apache-2.0
//! Answer times of the followed VMs. They cost a look at every packet of the host, so they are measured only while somebody asks.

use std::collections::BTreeMap;

use viola_host::VmId;

use super::Meter;
use super::groups::{TimeSource, now};
use crate::acct::{AcctError, AnswerMeter};
use crate::hist::Histogram;
use crate::waits::WaitLog;

/// Times that the clients of a VM saw over the last [`crate::WAIT_WINDOW_SECONDS`] seconds, at the VM's NIC.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AnswerTimes {
    /// From a TCP SYN to the VM until its SYN-ACK.
    pub connects: Histogram,
    /// From the first byte of a request until the first byte of the VM's answer.
    pub answers: Histogram,
}

/// What was counted of a VM.
#[derive(Default)]
pub(super) struct Logs {
    connects: WaitLog,
    answers: WaitLog,
}

/// Whether answer times are measured.
#[derive(Default)]
pub(super) enum MeasuredAnswers {
    /// Nobody wants them.
    #[default]
    Unwanted,
    /// The kernel has refused the program since somebody wants them.
    Refused,
    /// The program, and what it counted of each VM.
    Running {
        program: Box<AnswerMeter>,
        logs: BTreeMap<VmId, Logs>,
    },
}

impl Meter {
    /// Begins to measure answer times, or ends it. Without BPF there are none.
    ///
    /// # Errors
    /// The kernel refuses the program. It is tried again when the times are wanted anew.
    pub fn measure_answers(&mut self, wanted: bool) -> Result<(), AcctError> {
        match (&self.source, &self.answers) {
            (_, _) if !wanted => self.answers = MeasuredAnswers::Unwanted,
            (TimeSource::Acct(acct), MeasuredAnswers::Unwanted) => {
                self.answers = MeasuredAnswers::Refused;
                self.answers = MeasuredAnswers::Running {
                    program: Box::new(AnswerMeter::load(acct)?),
                    logs: BTreeMap::new(),
                };
            }
            _ => {}
        }
        Ok(())
    }

    /// The answer times of a VM, while they are measured. [`Meter::unseen`] tells whether its packets are seen.
    pub fn answer_times(&self, id: &VmId) -> Option<AnswerTimes> {
        let MeasuredAnswers::Running { program, logs } = &self.answers else {
            return None;
        };
        let (logs, vm) = (logs.get(id)?, self.vms.get(id)?);
        let (at, counters) = (now(), program.vm(vm.index));
        Some(AnswerTimes {
            connects: logs.connects.since(at, &counters.connects).histogram,
            answers: logs.answers.since(at, &counters.answers).histogram,
        })
    }

    /// Logs the answer times once a second.
    pub(super) fn log_answers(&mut self, at: u64) {
        let MeasuredAnswers::Running { program, logs } = &mut self.answers else {
            return;
        };
        logs.retain(|id, _| self.vms.contains_key(id));
        for (id, vm) in &self.vms {
            let logs = logs.entry(id.clone()).or_default();
            if logs.answers.is_due(at) {
                let counters = program.vm(vm.index);
                logs.connects.push(at, &counters.connects);
                logs.answers.push(at, &counters.answers);
            }
        }
    }
}
