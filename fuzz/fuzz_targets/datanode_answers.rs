// SPDX-License-Identifier: Apache-2.0
//! Fuzzes a DataNode's response to the agent's probe.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| viola_agent::fuzzing::datanode_answers(input));
