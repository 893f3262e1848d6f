// SPDX-License-Identifier: Apache-2.0
//! Everything that a configuration can have in it.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| viola_daemon::fuzzing::configuration(input));
