// SPDX-License-Identifier: Apache-2.0
//! Everything that a client can send to the control socket.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| viola_daemon::fuzzing::control_socket(input));
