// SPDX-License-Identifier: Apache-2.0
//! Compiles the accounting program, and the one for answer times.

fn main() {
    viola_bpf_build::compile("acct");
    viola_bpf_build::compile("answers");
}
