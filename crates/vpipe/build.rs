// SPDX-License-Identifier: Apache-2.0
//! The steering program.

fn main() {
    viola_bpf_build::compile("pipe");
}
