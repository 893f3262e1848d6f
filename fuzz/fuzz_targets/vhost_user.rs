// SPDX-License-Identifier: Apache-2.0
//! Everything that a hostile VMM can send to its reader's worker.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| viola_vread::fuzzing::vhost_user(input));
