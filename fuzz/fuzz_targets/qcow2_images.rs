// SPDX-License-Identifier: Apache-2.0
//! Fuzzes the tables of qcow2 images, and reads of their disks.
//!
//! A panic of imago is an error of the image, so only one that nobody catches counts.
#![no_main]

libfuzzer_sys::fuzz_target!(
    init: std::panic::set_hook(Box::new(|_| {})),
    |input: &[u8]| viola_extents::fuzzing::qcow2_images(input)
);
