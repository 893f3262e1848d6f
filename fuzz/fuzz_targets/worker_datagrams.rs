// SPDX-License-Identifier: Apache-2.0
//! Everything that a worker which a VM has taken over can send.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| viola_vread::fuzzing::worker_datagrams(input));
