// SPDX-License-Identifier: Apache-2.0
//! Gives a target all inputs that are kept for it; part of the tests of the crate that owns it.

use std::path::Path;

/// Least number of inputs: with fewer there is something wrong with the folder.
const LEAST: usize = 10;

/// Runs a target on each file of its folder in `fuzz/corpus`.
pub fn replay(target: &str, run: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/corpus")
        .join(target);
    let files: Vec<_> = std::fs::read_dir(&folder)
        .unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
        .map(|entry| entry.expect("a file").path())
        .collect();
    assert!(
        files.len() >= LEAST,
        "{} has {} files only",
        folder.display(),
        files.len()
    );
    for file in files {
        let input = std::fs::read(&file).expect("an input");
        // The name of the file stands before the panic.
        println!("{}", file.display());
        run(&input);
    }
}
