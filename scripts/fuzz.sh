#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# fuzz.sh [--minimise] [TARGET...]: runs fuzz targets, all of them by default; fails if one finds something.
#
# The targets share SECONDS_IN_ALL (600). A target writes what it finds to fuzz/artifacts/TARGET; move such a file to
# fuzz/corpus/TARGET, and `cargo test -p CRATE fuzzing` repeats it. Inputs that reach new code accumulate in
# build/fuzz/TARGET; --minimise moves a minimal set of them to fuzz/corpus.
#
# Coverage and the address sanitizer are unstable options; with RUSTC_BOOTSTRAP the stable compiler accepts them.
set -euo pipefail
cd "$(dirname "$0")/.."

tool_version=0.13.2
triple=x86_64-unknown-linux-gnu
whole=${SECONDS_IN_ALL:-600}

die() {
    printf 'fuzz: %s\n' "$*" >&2
    exit 2
}

[[ $whole =~ ^[0-9]+$ ]] && [ "$whole" -ge 1 ] || die "SECONDS_IN_ALL is \`$whole\`; give a number of seconds"
minimise=no
if [ "${1:-}" = --minimise ]; then
    minimise=yes
    shift
fi
all=()
for file in fuzz/fuzz_targets/*.rs; do
    all+=("$(basename "$file" .rs)")
done
targets=("$@")
[ $# -gt 0 ] || targets=("${all[@]}")
for target in "${targets[@]}"; do
    [ -f "fuzz/fuzz_targets/$target.rs" ] || die "there is no target $target; there are: ${all[*]}"
done

tool=build/fuzz/tool/bin/cargo-fuzz
if ! command -v c++ >/dev/null; then
    die "libFuzzer needs a C++ compiler; install g++"
fi
if [ "$("$tool" --version 2>/dev/null)" != "cargo-fuzz $tool_version" ]; then
    echo "fuzz: installing cargo-fuzz $tool_version into build/fuzz/tool"
    cargo install --quiet --locked cargo-fuzz --version "$tool_version" --root build/fuzz/tool
fi
export RUSTC_BOOTSTRAP=1
"$tool" build --target "$triple"

each=$(((whole + ${#targets[@]} - 1) / ${#targets[@]}))
failed=()
for target in "${targets[@]}"; do
    program=fuzz/target/$triple/release/$target
    kept=fuzz/corpus/$target
    found=build/fuzz/$target
    bad=fuzz/artifacts/$target/
    mkdir -p "$kept" "$found" "$bad"
    words=()
    [ -f "fuzz/words/$target" ] && words=("-dict=fuzz/words/$target")
    # These have threads, whose beginning and end look like leaks. A leak for each input would reach the limit of memory.
    [[ " agent_messages fuse_requests stream_frames vhost_user " != *" $target "* ]] || words+=(-detect_leaks=0)
    echo "fuzz: $target for $each s"
    "$program" "$found" "$kept" "-max_total_time=$each" -max_len=4096 -timeout=20 -rss_limit_mb=2048 \
        "-artifact_prefix=$bad" -print_final_stats=1 -verbosity=1 "${words[@]}" >"build/fuzz/$target.log" 2>&1 || {
        failed+=("$target")
        tail -n 40 "build/fuzz/$target.log" >&2
        continue
    }
    grep -E '^(#[0-9]+\s+DONE|stat::number_of_executed_units)' "build/fuzz/$target.log"
    if [ $minimise = yes ]; then
        small=build/fuzz/$target.small
        rm -rf "$small"
        mkdir "$small"
        "$program" -set_cover_merge=1 -use_counters=0 -max_len=4096 "$small" "$kept" "$found" >>"build/fuzz/$target.log" 2>&1
        rm -rf "$kept"
        mv "$small" "$kept"
        echo "fuzz: $kept has $(find "$kept" -type f | wc -l) files, $(du -sb "$kept" | cut -f1) bytes"
    fi
done
[ ${#failed[@]} -eq 0 ] || {
    echo "fuzz: found something: ${failed[*]}; see fuzz/artifacts" >&2
    exit 1
}
