// SPDX-License-Identifier: Apache-2.0
//! Fuzzes the lines of the process that talks to libvirt.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| viola_daemon::fuzzing::libvirt_lines(input));
