// SPDX-License-Identifier: Apache-2.0
//! Everything that a hostile VM can put into the queue of its virtio-fs device.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| viola_vread::fuzzing::fuse_requests(input));
