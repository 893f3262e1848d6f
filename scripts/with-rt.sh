#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# with-rt.sh COMMAND...: runs a command without real-time throttling, then restores the setting.
#
# Kernels with CONFIG_RT_GROUP_SCHED stop real-time threads after kernel.sched_rt_runtime_us of every
# period, and viola's slots are real-time threads. viola itself never writes a sysctl: on a VM host
# that is the operator's decision. This script writes it for `make run`, `make test` and the
# benchmarks, and restores it when the last of several such runs ends. It keeps the old value in
# /run/viola-rt, so that the next run can restore it after a killed one.
set -uo pipefail

knob=${VIOLA_RT_KNOB:-/proc/sys/kernel/sched_rt_runtime_us} # another one only in the script's test
state=${VIOLA_RT_STATE:-/run/viola-rt}

[ $# -gt 0 ] || { echo "with-rt: usage: with-rt.sh COMMAND..." >&2; exit 2; }
[ "$(id -u)" = 0 ] || {
    echo "with-rt: run this as root, for example by sudo: guests, their network and real-time scheduling need it" >&2
    exit 2
}

# Whether this kernel throttles real-time threads; if in doubt, yes.
throttles() {
    [ -e "$knob" ] || return 1
    [ -z "${VIOLA_RT_KNOB-}" ] || return 0
    local file
    for file in /sys/fs/cgroup/cpu.rt_runtime_us /sys/fs/cgroup/*/cpu.rt_runtime_us; do
        [ -e "$file" ] && return 0
    done
    if [ -r /proc/config.gz ]; then
        zcat /proc/config.gz | grep -q '^CONFIG_RT_GROUP_SCHED=y'
    elif [ -r "/boot/config-$(uname -r)" ]; then
        grep -q '^CONFIG_RT_GROUP_SCHED=y' "/boot/config-$(uname -r)"
    fi
}

# Start time of a process, which with its pid identifies it.
stamp() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

# Removes entries of ended users; succeeds if one is left.
others() {
    local file left=1
    for file in "$state"/user.*; do
        [ -e "$file" ] || continue
        if [ "$(stamp "${file##*.}")" = "$(cat "$file")" ]; then left=0; else rm -f "$file"; fi
    done
    return $left
}

locked() { # FUNCTION: runs it under the lock of this host
    mkdir -p "$state" || return 1
    (
        flock 9
        "$1"
    ) 9>"$state/lock"
}

lift() {
    local now
    now=$(cat "$knob")
    if others; then
        : # lifted already; the last user restores it
    elif [ "$now" = -1 ] && [ -s "$state/old" ]; then
        echo "with-rt: a killed run left real-time throttling off; this one restores it to $(cat "$state/old") at its end" >&2
    elif [ "$now" = -1 ]; then
        return 0 # the operator turned it off: nothing to do or to restore
    else
        echo "$now" >"$state/old"
        echo "with-rt: kernel.sched_rt_runtime_us is -1 instead of $now while this runs" >&2
    fi
    stamp $$ >"$state/user.$$"
    [ "$(cat "$knob")" = -1 ] || echo -1 >"$knob" || {
        rm -f "$state/user.$$"
        echo "with-rt: kernel.sched_rt_runtime_us cannot be written" >&2
        return 1
    }
}

restore() {
    [ -n "$old" ] || return 0
    rm -f "$state/user.$$"
    others && return 0
    # a later setting by others stays
    if [ "$(cat "$knob")" = -1 ]; then echo "$old" >"$knob"; fi
    rm -f "$state/old"
}

throttles || exec "$@"

old= child=
trap 'locked restore' EXIT
# A signal from the terminal reaches the command too; one sent to this script alone is passed on.
trap ':' INT
trap '[ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM HUP
locked lift || exit 1
[ ! -e "$state/user.$$" ] || old=$(cat "$state/old") # kept also if /run is cleared

env --default-signal=INT,QUIT "$@" <&0 & # the shell would start it with both ignored
child=$!
while :; do
    wait "$child"
    status=$?
    kill -0 "$child" 2>/dev/null || break # else a signal ended the wait, not the command
done
exit "$status"
