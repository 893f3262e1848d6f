// SPDX-License-Identifier: Apache-2.0
//! The one program: run, check, vms, set, stop, restore, lab, demo, bench.

fn main() {}
