// SPDX-License-Identifier: Apache-2.0
//! Compiles the accounting program, and those for answer times and for the bytes of HDFS blocks.

fn main() {
    viola_bpf_build::compile("acct");
    viola_bpf_build::compile("answers");
    viola_bpf_build::compile("blocks");
}
