// SPDX-License-Identifier: Apache-2.0
//! Fuzzes the messages that the agent of a hostile guest sends to its worker.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| viola_vread::fuzzing::agent_messages(input));
