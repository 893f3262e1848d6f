// SPDX-License-Identifier: Apache-2.0
//! Everything that a hypervisor which a VM has taken over can show.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| viola_host::fuzzing::hypervisor(input));
