// SPDX-License-Identifier: Apache-2.0
//! Fuzzes the state of TCP connections that guest and host hand each other.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| viola_handover::fuzzing::connections(input));
