#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The speed of the simulator: one host by events, then fleets of 100, 1,000 and 10,000 hosts by the fluid model.
# Usage: bench-sim.sh VIOLA
set -eu
viola=$1
scenario=$(dirname "$0")/../crates/sim/scenarios/host64.toml
seconds=$(sed -n 's/^seconds = //p' "$scenario")
# The quickest of five: the rest is other programs' doing.
TIMEFORMAT='%3R %3U'
quickest=$(for _ in 1 2 3 4 5; do { time "$viola" sim run --json "$scenario" > /dev/null; } 2>&1; done | sort -n | head -1)
awk -v took="$quickest" -v s="$seconds" 'BEGIN {
    split(took, t, " ")
    printf "one host, 64 VMs on 16 cores: %.0f s in %.3f s on one core, %.0f times real time; %.3f s of CPU time, %.0f times\n",
        s, t[1], s / t[1], t[2], s / t[2] }'
for hosts in 100 1000 10000; do
    "$viola" sim fleet --hosts "$hosts" --json |
        awk -v hosts="$hosts" '/"wall_s"/ { gsub(/[^0-9.]/, ""); printf "%d hosts, 10 minutes: %.2f s\n", hosts, $0 }'
done
"$viola" sim fleet --hosts 100
