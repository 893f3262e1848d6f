// SPDX-License-Identifier: Apache-2.0
//! Fuzzes the files from which threads get their scheduling back.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| viola_sched::fuzzing::state_files(input));
