// SPDX-License-Identifier: Apache-2.0
//! Fuzzes the replies of a hostile guest about virtual functions, and the journal of these.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| viola_lanes::fuzzing::lanes(input));
