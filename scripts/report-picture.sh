#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# report-picture.sh [REPORT.html] [PICTURE.png]: renders the top of the demo's report as a picture for the book.
#
# Needs chromium; uses pngquant, if it is installed, to make the picture smaller.
set -euo pipefail
cd "$(dirname "$0")/.."

report=${1:-build/report.html} picture=${2:-docs/src/img/report.png}
die() { printf 'report-picture: %s\n' "$*" >&2; exit 1; }
[ -s "$report" ] || die "$report is missing; make run writes it"
command -v chromium >/dev/null || die "chromium is missing; install it with: apt-get install chromium"

mkdir -p "$(dirname "$picture")"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$scratch/profile" \
    --window-size=1200,1480 --screenshot="$scratch/report.png" "file://$(realpath "$report")" >/dev/null 2>&1
[ -s "$scratch/report.png" ] || die "chromium made no picture of $report"
if command -v pngquant >/dev/null; then
    pngquant --force --output "$scratch/small.png" 64 "$scratch/report.png" && mv "$scratch/small.png" "$scratch/report.png"
fi
mv "$scratch/report.png" "$picture"
echo "report-picture: $picture, $(($(stat -c %s "$picture") / 1024)) KiB"
