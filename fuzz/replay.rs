// SPDX-License-Identifier: Apache-2.0
//! Runs a fuzz target on each input of `fuzz/corpus/TARGET`. The crate that owns the target includes this file in its
//! tests. With `MUTATE_SECONDS=N` in the environment it also runs random changes of these inputs for N seconds, for machines
//! without libFuzzer.

use std::path::Path;
use std::time::{Duration, Instant};

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
    let mut inputs = Vec::new();
    for file in files {
        let input = std::fs::read(&file).expect("an input");
        // If the target panics, the test output ends with the name of the input.
        println!("{}", file.display());
        run(&input);
        inputs.push(input);
    }
    let seconds = std::env::var("MUTATE_SECONDS").ok();
    if let Some(seconds) = seconds.and_then(|text| text.parse().ok()) {
        mutate(target, &inputs, run, Duration::from_secs(seconds));
    }
}

/// Runs random changes of the inputs. An input at which the target panics is left in the folder of temporary files.
fn mutate(target: &str, inputs: &[Vec<u8>], run: fn(&[u8]), time: Duration) {
    const MAX_BYTES: usize = 4096;
    const NUMBERS: [u8; 6] = [0, 1, 0x7f, 0x80, 0xfe, 0xff];
    let mut seed = u64::from(std::process::id());
    // splitmix64
    let mut random = move |below: usize| {
        seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % below.max(1) as u64) as usize
    };
    let bad = std::env::temp_dir().join(format!("viola-fuzz-{target}"));
    let end = Instant::now() + time;
    let (mut runs, mut longest) = (0, Duration::ZERO);
    while Instant::now() < end {
        let mut input = inputs[random(inputs.len())].clone();
        for _ in 0..=random(6) {
            let at = random(input.len());
            let length = random(input.len() - at).min(random(64));
            match random(6) {
                0 if at < input.len() => input[at] ^= 1 << random(8),
                1 if at < input.len() => input[at] = NUMBERS[random(NUMBERS.len())],
                2 => drop(input.drain(at..at + length)),
                3 => {
                    let other = &inputs[random(inputs.len())];
                    let from = random(other.len());
                    let part = &other[from..other.len().min(from + 1 + random(256))];
                    input.splice(at..at, part.iter().copied());
                }
                4 => {
                    let part = input[at..at + length].to_vec();
                    input.splice(at..at, part);
                }
                _ if at < input.len() => input[at] = random(256) as u8,
                _ => {}
            }
        }
        input.truncate(MAX_BYTES);
        let begun = Instant::now();
        if let Err(panic) = std::panic::catch_unwind(|| run(&input)) {
            std::fs::write(&bad, &input).expect("the input");
            eprintln!("{target}: it panics with the input {}", bad.display());
            std::panic::resume_unwind(panic);
        }
        longest = longest.max(begun.elapsed());
        runs += 1;
    }
    eprintln!("{target}: {runs} inputs, the longest took {longest:?}");
}
