// SPDX-License-Identifier: Apache-2.0
//! Fuzzes the FUSE stream between a hostile VM and its reader worker, in both directions.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| viola_vread::fuzzing::stream_frames(input));
