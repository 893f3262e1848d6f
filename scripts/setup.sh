#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# setup.sh [--guests] [--test] [--bench] [--hadoop]: checks what the build needs, and installs what is missing by apt.
#
# Needs ordinary build packages of Debian or Ubuntu only; with --test also those that some tests use, with --bench the
# clients of `viola-lab bench vpipe` and `turbo`, with --hadoop those of a private Hadoop; --guests checks that this user can
# run guests. Prints nothing if all is there. The packages of the lab's guests (lab-image.sh) are not installed on the host.
set -euo pipefail

packages=(
    gcc libc6-dev make pkg-config # libbpf is built from source
    clang libbpf-dev              # the BPF programs
    libelf-dev zlib1g-dev         # linked by libbpf
    patchelf xz-utils debian-archive-keyring ca-certificates # the guest image
    iproute2 util-linux procps    # ip, flock, ps: scripts and tests
)

die() {
    printf 'setup: %s\n' "$*" >&2
    exit 2
}

for argument in "$@"; do
    case $argument in
        --test)
            packages+=(qemu-system-x86) # QEMU VMs
            packages+=(nftables) # rules at taps and bridges
            packages+=(strace) # reads that hang
            packages+=(qemu-utils e2fsprogs xfsprogs btrfs-progs dmsetup) # images and file systems
            ;;
        --bench)
            packages+=(wrk curl openssh-client e2fsprogs)
            ;;
        --hadoop)
            # Java 11 or newer, Maven 3.6 or newer
            command -v javac >/dev/null || packages+=(default-jdk-headless)
            command -v mvn >/dev/null || packages+=(maven)
            packages+=(e2fsprogs xfsprogs) # file systems of DataNodes
            ;;
        --guests)
            [ "$(id -u)" = 0 ] ||
                die "run this as root, for example by sudo: guests, their network and real-time scheduling need it"
            ;;
        *) die "unknown option $argument" ;;
    esac
done

[ "$(uname -s) $(uname -m)" = "Linux x86_64" ] || die "the lab's guests need Linux on x86_64, this is $(uname -sm)"
command -v dpkg-query >/dev/null || die "this is for Debian and its relatives; elsewhere install by hand: ${packages[*]}"

# newer releases have pkgconf, which provides pkg-config: compare with provided names too
missing=()
installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n${db:Status-Status} ${Provides}\n' |
    sed -n 's/^installed //p' | tr ',' '\n' | sed 's/ *(.*//; s/^ *//')
for package in "${packages[@]}"; do
    grep -qxF "$package" <<<"$installed" || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    [ "$(id -u)" = 0 ] || die "run this as root, or install first: ${missing[*]}"
    echo "setup: installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    install=(apt-get install -y -qq --no-install-recommends "${missing[@]}")
    "${install[@]}" >/dev/null 2>&1 || {
        apt-get update -qq
        "${install[@]}" >/dev/null
    } || die "apt could not install ${missing[*]}"
fi

oldest=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$(dirname "$0")/../Cargo.toml")
how="install it from https://rustup.rs"
command -v cargo >/dev/null && command -v rustc >/dev/null || die "Rust (cargo) is missing; $how, version $oldest or newer"
version=$(rustc --version | cut -d' ' -f2)
[ "$(printf '%s\n' "$oldest" "${version%%-*}" | sort -V | head -1)" = "$oldest" ] ||
    die "Rust $version is too old; viola needs $oldest or newer: \`rustup update\`, or $how"
