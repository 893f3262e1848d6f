// SPDX-License-Identifier: Apache-2.0
//! Compiles the accounting program (bpf/acct.bpf.c) with clang.

use std::path::PathBuf;
use std::process::Command;

fn main() {
    let bpf =
        PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default()).join("../../bpf");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default()).join("acct.bpf.o");
    for file in ["acct.bpf.c", "acct.h"] {
        println!("cargo::rerun-if-changed={}", bpf.join(file).display());
    }
    println!("cargo::rerun-if-env-changed=CLANG");
    let clang = std::env::var("CLANG").unwrap_or_else(|_| "clang".into());
    let arch = match std::env::var("CARGO_CFG_TARGET_ARCH").as_deref() {
        Ok("aarch64") => "arm64",
        _ => "x86",
    };
    let run = Command::new(&clang)
        .args([
            "-g", "-O2", "-Wall", "-Werror", "-target", "bpf", "-mcpu=v3",
        ])
        .arg(format!("-D__TARGET_ARCH_{arch}"))
        .arg("-I")
        .arg(&bpf)
        .arg("-c")
        .arg(bpf.join("acct.bpf.c"))
        .arg("-o")
        .arg(&out)
        .status();
    match run {
        Ok(status) if status.success() => {}
        Ok(_) => panic!(
            "{clang} could not compile bpf/acct.bpf.c; libbpf's headers (libbpf-dev) must be installed"
        ),
        Err(e) => {
            panic!("{clang} cannot be run ({e}); install clang 14 or newer, or name one in CLANG")
        }
    }
}
