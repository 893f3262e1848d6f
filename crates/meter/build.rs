// SPDX-License-Identifier: Apache-2.0
//! The accounting program.

fn main() {
    viola_bpf_build::compile("acct", &["types.h", "acct.h"]);
}
