#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# loom.sh: runs the models of memory that processes share without a lock, in the orders of accesses that the memory model allows.
#
# The models are the files loom_models.rs. A model of a new access is good if it fails when the access is made Relaxed.
set -euo pipefail
cd "$(dirname "$0")/.."

export RUSTFLAGS="${RUSTFLAGS:-} --cfg loom" CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/loom
cargo test --quiet --release --locked -p viola-vread -p viola-sched -p viola-meter --lib loom_models
