#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The speed of the simulator: one host by events, then fleets of 100, 1,000 and 10,000 hosts by the fluid model.
# Usage: bench-sim.sh VIOLA
set -eu
viola=$1
scenario=$(dirname "$0")/../crates/sim/scenarios/host64.toml
begun=$(date +%s%N)
"$viola" sim run --json "$scenario" > /dev/null
took=$(( $(date +%s%N) - begun ))
seconds=$(sed -n 's/^seconds = //p' "$scenario")
awk -v took="$took" -v s="$seconds" 'BEGIN {
    printf "one host, 64 VMs on 16 cores: %.0f s in %.2f s on one core, %.0f times real time\n", s, took / 1e9, s * 1e9 / took }'
for hosts in 100 1000 10000; do
    "$viola" sim fleet --hosts "$hosts" --json |
        awk -v hosts="$hosts" '/"wall_s"/ { gsub(/[^0-9.]/, ""); printf "%d hosts, 10 minutes: %.2f s\n", hosts, $0 }'
done
"$viola" sim fleet --hosts 100
