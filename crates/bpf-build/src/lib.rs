// SPDX-License-Identifier: Apache-2.0
//! Compiles the programs of `bpf/` with clang, for build scripts, and their headers as libraries,
//! for tests.

#[cfg(feature = "testing")]
pub mod replay;

use std::path::PathBuf;
use std::process::Command;

/// Compiles `bpf/NAME.bpf.c` to `NAME.bpf.o` in the output folder of the build script. Cargo runs
/// the build script again when that file, a header of `bpf/` or the variable CLANG changes.
///
/// # Panics
/// When clang or libbpf's headers are missing; cargo shows the message.
pub fn compile(name: &str) {
    let folder = |variable: &str| PathBuf::from(std::env::var_os(variable).unwrap_or_default());
    let bpf = folder("CARGO_MANIFEST_DIR").join("../../bpf");
    let source = bpf.join(format!("{name}.bpf.c"));
    let out = folder("OUT_DIR").join(format!("{name}.bpf.o"));
    println!("cargo::rerun-if-changed={}", source.display());
    let headers = std::fs::read_dir(&bpf).into_iter().flatten().flatten();
    for header in headers.filter(|entry| entry.path().extension().is_some_and(|e| e == "h")) {
        println!("cargo::rerun-if-changed={}", header.path().display());
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
        .arg(&source)
        .arg("-o")
        .arg(&out)
        .status();
    match run {
        Ok(status) if status.success() => {}
        Ok(_) => panic!(
            "{clang} could not compile bpf/{name}.bpf.c; libbpf's headers (libbpf-dev) must be installed"
        ),
        Err(e) => {
            panic!("{clang} cannot be run ({e}); install clang 14 or newer, or name one in CLANG")
        }
    }
}
