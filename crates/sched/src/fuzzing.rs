// SPDX-License-Identifier: Apache-2.0
//! Fuzz target: the files of attributes that `viola restore` gives back to threads (`slots.json`, `affinity.json`).
//! `scripts/fuzz.sh` runs it, and a test replays the corpus.

use std::collections::BTreeSet;
use std::path::Path;

use viola_host::cpuset::MAX_CPUS;

use crate::restore::SavedState;

/// Reads `input` as a file of saved attributes; panics when a property does not hold.
///
/// A file that is read names each process and thread with its start time, and only CPUs that can exist. A file that is not
/// read gives one sentence without control characters.
pub fn state_files(input: &[u8]) {
    let state = match SavedState::parse(Path::new("slots.json"), input) {
        Ok(state) => state,
        Err(e) => {
            let said = e.to_string();
            assert!(said.starts_with("slots.json "), "{said}");
            assert!(!said.contains(char::is_control), "{said:?}");
            return;
        }
    };
    // By their digits: a parser that makes values of all numbers refuses those that no value holds, also where nobody reads them.
    let digits = input.split(|byte| !byte.is_ascii_digit());
    let numbers: BTreeSet<u64> = digits
        .filter_map(|digits| std::str::from_utf8(digits).ok()?.parse().ok())
        .collect();
    let is_named = |number: u64| assert!(numbers.contains(&number), "{number} is not in the file");
    for (pid, start_time) in &state.processes {
        is_named((*pid).into());
        is_named(*start_time);
    }
    for vm in &state.vms {
        is_named(vm.pid.into());
        is_named(vm.start_time);
        for (pid, start_time) in &vm.helpers {
            is_named((*pid).into());
            is_named(*start_time);
        }
        for thread in &vm.threads {
            is_named(thread.tid.into());
            is_named(thread.start_time);
        }
        let sets = vm.threads.iter().map(|t| &t.affinity);
        for cpus in sets.chain([&vm.affinity]) {
            assert!(cpus.iter().all(|cpu| cpu < MAX_CPUS), "{cpus:?}");
        }
    }
    let written = serde_json::to_vec(&state).expect("JSON");
    let again = SavedState::parse(Path::new("slots.json"), &written).expect("the same file");
    assert_eq!(again, state);
}

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpus_breaks_no_property() {
        super::replay::replay("state_files", super::state_files);
    }
}
