#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# build.sh [CARGO ARGUMENTS...]: the guest image and a cargo command side by side; fails when one of them does.
#
# Most of the image is waiting for downloads, most of the build is the compiler: together they take
# hardly longer than the build alone.
set -uo pipefail
cd "$(dirname "$0")/.."

scripts/lab-image.sh &
image=$!
trap 'kill "$image" 2>/dev/null' INT TERM
cargo "$@"
built=$?
wait "$image"
imaged=$?
[ $built -eq 0 ] || exit $built
exit $imaged
