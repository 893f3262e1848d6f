#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# with-rt.sh COMMAND...: run a command with real-time throttling lifted, then put it back.
#
# Kernels with CONFIG_RT_GROUP_SCHED stop real-time threads after kernel.sched_rt_runtime_us of every
# period, and viola's slots are made of real-time threads. viola itself never writes a sysctl: on a VM
# host that is the operator's decision. For `make run`, `make test` and the benchmarks this script
# makes it, and takes it back when the last of several such runs ends. The value to go back to is in
# /run/viola-rt, so that a run that was killed leaves it for the next one to know.
set -uo pipefail

knob=${VIOLA_RT_KNOB:-/proc/sys/kernel/sched_rt_runtime_us} # another one only in the script's test
state=${VIOLA_RT_STATE:-/run/viola-rt}

[ $# -gt 0 ] || { echo "with-rt: usage: with-rt.sh COMMAND..." >&2; exit 2; }
[ "$(id -u)" = 0 ] || {
    echo "with-rt: run this as root, for example by sudo: guests, their network and real-time scheduling need it" >&2
    exit 2
}

# Whether this kernel throttles real-time threads at all; when in doubt, yes.
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

# A process and when it started: names it for ever.
stamp() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

# Forget users that are gone; succeeds when one is left.
others() {
    local file left=1
    for file in "$state"/user.*; do
        [ -e "$file" ] || continue
        if [ "$(stamp "${file##*.}")" = "$(cat "$file")" ]; then left=0; else rm -f "$file"; fi
    done
    return $left
}

locked() { # FUNCTION: one at a time on this machine
    mkdir -p "$state" || return 1
    (
        flock 9
        "$1"
    ) 9>"$state/lock"
}

take() {
    local now
    now=$(cat "$knob")
    if others; then
        : # lifted already; whoever ends last puts it back
    elif [ "$now" = -1 ] && [ -s "$state/old" ]; then
        echo "with-rt: a run that was killed left real-time throttling lifted; it goes back to $(cat "$state/old") after this one" >&2
    elif [ "$now" = -1 ]; then
        return 0 # lifted by the operator: nothing to do, nothing to put back
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

give_back() {
    [ -n "$old" ] || return 0
    rm -f "$state/user.$$"
    others && return 0
    # somebody else's later setting stays
    if [ "$(cat "$knob")" = -1 ]; then echo "$old" >"$knob"; fi
    rm -f "$state/old"
}

throttles || exec "$@"

old= child=
trap 'locked give_back' EXIT
# A signal from the terminal reaches the command as well; one that was sent to this script is passed on.
trap ':' INT
trap '[ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM HUP
locked take || exit 1
[ ! -e "$state/user.$$" ] || old=$(cat "$state/old") # remembered also when somebody clears /run

env --default-signal=INT,QUIT "$@" <&0 & # the shell would start it deaf to both
child=$!
while :; do
    wait "$child"
    status=$?
    kill -0 "$child" 2>/dev/null || break # else a signal ended the wait, not the command
done
exit "$status"
