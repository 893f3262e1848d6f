// SPDX-License-Identifier: Apache-2.0
//! Fuzzes the tables of qcow2 images, and reads of their disks.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| viola_extents::fuzzing::qcow2_images(input));
