# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# private-apt.sh: functions for scripts that fetch Debian packages without installing them. The script sets `state` to a
# folder, where apt keeps everything, and defines `say` and `die`. apt checks the archive's signed index.

keyring=/usr/share/keyrings/debian-archive-keyring.gpg

# Address of the Debian mirror in this host's apt sources (one-line and deb822 form).
mirror() {
    local file files=()
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources; do
        [ -f "$file" ] && files+=("$file")
    done
    [ ${#files[@]} -gt 0 ] || return 1
    awk '
        /^[ \t]*#/ { next }
        FILENAME ~ /\.sources$/ {
            if (tolower($1) == "uris:") for (i = 2; i <= NF; i++) print $i
            next
        }
        $1 == "deb" {
            i = 2
            if ($i ~ /^\[/) { while ($i !~ /\]$/) i++; i++ }
            print $i
        }' "${files[@]}" |
        sed 's#/*$##' | grep -E '^(https?|file|mirror)[:+].*/debian$' | sed -n 1p
}

# Installs those of these programs that this host lacks (each package has the program's name), and the tools that unpack
# and check packages.
need_tools() {
    local tool missing=()
    for tool in "$@"; do
        command -v "$tool" >/dev/null || missing+=("$tool")
    done
    command -v xz >/dev/null || missing+=(xz-utils)
    [ -e "$keyring" ] || missing+=(debian-archive-keyring)
    [ ${#missing[@]} -eq 0 ] && return
    say "installing ${missing[*]}"
    command -v apt-get >/dev/null || die "install ${missing[*]} first"
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null 2>&1 || {
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    }
}

# Runs apt-get with a state of its own.
private_apt() {
    apt-get -qq \
        -o Dir::State="$state/state" -o Dir::State::status="$state/status" \
        -o Dir::State::lists="$state/state/lists" \
        -o Dir::Cache="$state/cache" \
        -o Dir::Etc::sourcelist="$state/sources.list" -o Dir::Etc::sourceparts=/dev/null \
        -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts=/dev/null \
        -o APT::Architecture=amd64 -o APT::Architectures::=amd64 \
        -o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::Retries=3 -o Acquire::GzipIndexes=false \
        -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false \
        -o Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false \
        "$@"
}

# Creates that state and reads the index of these suites.
private_index() {
    local uri suite
    say "reading the archive's index"
    uri=$(mirror) && [ -n "$uri" ] || die "no Debian mirror in this host's apt sources; name one that ends in /debian"
    mkdir -p "$state/state/lists/partial" "$state/cache/archives/partial"
    : >"$state/status"
    for suite in "$@"; do
        printf 'deb [signed-by=%s] %s %s main\n' "$keyring" "$uri" "$suite"
    done >"$state/sources.list"
    private_apt update || die "the Debian mirror $uri does not answer"
}
