// SPDX-License-Identifier: Apache-2.0
//! Everything that the agent in a hostile guest can send to its worker.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| viola_vread::fuzzing::agent_messages(input));
