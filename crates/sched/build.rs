// SPDX-License-Identifier: Apache-2.0
//! Compiles the sched_ext scheduler, and its algorithm alone for a test.

fn main() {
    viola_bpf_build::compile("decide");
    viola_bpf_build::compile("scx");
}
