// SPDX-License-Identifier: Apache-2.0
//! Everything that a hostile host can send inside TLS, and a reader's worker to the worker for other hosts.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| viola_vread::fuzzing::peer_frames(input));
