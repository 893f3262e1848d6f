// SPDX-License-Identifier: Apache-2.0
//! Compiles the sched_ext scheduler, and its algorithm alone for a test.

fn main() {
    viola_bpf_build::compile("decide", &["types.h", "slices.h", "turbo.h"]);
    viola_bpf_build::compile(
        "scx",
        &[
            "types.h",
            "slices.h",
            "turbo.h",
            "scx.h",
            "scx_kernel.h",
            "scx_core.h",
        ],
    );
}
