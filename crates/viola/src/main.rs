// SPDX-License-Identifier: Apache-2.0
//! See the library.

fn main() -> std::process::ExitCode {
    viola::main()
}
