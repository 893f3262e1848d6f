// SPDX-License-Identifier: Apache-2.0
//! What `viola check` says of slices: the accounting program, and each mechanism.

use viola_host::facts::HostFacts;
use viola_proto::{Row, RowState};

use super::observe::mechanisms::Support;
use crate::host::check::Obstacle;
use viola_config::{Config, MechanismChoice};

/// A row for the accounting program and one for each mechanism.
pub fn rows(config: &Config, facts: &HostFacts, support: &Support) -> Vec<Row> {
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
    let accounting = match &support.accounting {
        Ok(()) => Ok("exact, at context switches".to_owned()),
        Err(why) => Err(Obstacle::fixed(why)),
    };
    let supports = |choice| support.supports(choice, facts, &config.slices);
    vec![
        row("accounting (BPF)", accounting),
        row("slices: sched_ext", supports(MechanismChoice::SchedExt)),
        row("slices: slots", supports(MechanismChoice::Slots)),
        row("slices: eevdf", supports(MechanismChoice::Eevdf)),
    ]
}
