#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# build.sh [--bare] [CARGO ARGUMENTS...]: the guest image and a cargo command side by side; fails when one of them does.
#
# Most of the image is waiting for downloads, most of the build is the compiler: together they take
# hardly longer than the build alone. With --bare the image has only what `make run` needs.
set -uo pipefail
cd "$(dirname "$0")/.."

image_options=()
if [ "${1-}" = --bare ]; then
    image_options=(--bare)
    shift
fi
scripts/lab-image.sh "${image_options[@]}" &
image=$!
trap 'kill "$image" 2>/dev/null' INT TERM
cargo "$@"
built=$?
wait "$image"
imaged=$?
[ $built -eq 0 ] || exit $built
exit $imaged
