// SPDX-License-Identifier: Apache-2.0
//! Fuzzes the requests of programs in a guest to its agent.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| viola_agent::fuzzing::program_requests(input));
