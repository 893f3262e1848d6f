// SPDX-License-Identifier: Apache-2.0
//! Compiles the accounting program.

fn main() {
    viola_bpf_build::compile("acct");
}
