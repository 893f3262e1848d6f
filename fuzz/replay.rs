// SPDX-License-Identifier: Apache-2.0
//! Runs a fuzz target on each input of `fuzz/corpus/TARGET`. The crate that owns the target includes this file in its
//! tests.

use std::path::Path;

/// Fewer inputs than this mean that the folder is wrong.
const MIN_INPUTS: usize = 10;

/// Runs a target on each file of its corpus folder.
pub fn replay(target: &str, run: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/corpus")
        .join(target);
    let files: Vec<_> = std::fs::read_dir(&folder)
        .unwrap_or_else(|e| panic!("cannot read {}: {e}", folder.display()))
        .map(|entry| entry.expect("a file").path())
        .collect();
    assert!(
        files.len() >= MIN_INPUTS,
        "{} has only {} inputs, expected at least {MIN_INPUTS}",
        folder.display(),
        files.len()
    );
    for file in files {
        let input = std::fs::read(&file).expect("an input");
        // If the target panics, the test output ends with the name of the input.
        println!("{}", file.display());
        run(&input);
    }
}
