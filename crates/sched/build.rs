// SPDX-License-Identifier: Apache-2.0
//! The sched_ext scheduler.

fn main() {
    viola_bpf_build::compile("scx", &["types.h", "slices.h", "scx.h"]);
}
