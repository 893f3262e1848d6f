// SPDX-License-Identifier: Apache-2.0
//! Fuzzes what libvirt, machined, launchers, UML consoles and HTTP interfaces say of VMs.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| viola_host::fuzzing::host_answers(input));
