#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# hadoop.sh: make a private Hadoop and viola's HDFS plug-in under build/.
#
#   scripts/hadoop.sh           make what is missing; no network when all is there
#   scripts/hadoop.sh --jar     only the plug-in and the benchmark client
#   scripts/hadoop.sh --test    run the plug-in's tests
#
# Maven fetches everything from Maven Central into build/m2, checked against its checksums; nothing is
# installed on this machine. Results:
#   build/hadoop/jars            Hadoop with its tests (hdfs/lab/pom.xml is the list)
#   build/hadoop/viola-hdfs.jar  the plug-in;  build/hadoop/viola-hdfs-tests.jar  the benchmark client
#   build/hadoop/java            link to the JDK in use
set -euo pipefail

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
hadoop=$top/build/hadoop
m2=$top/build/m2

die() {
    printf 'hadoop: %s\n' "$*" >&2
    exit 1
}

what=all
case ${1:-} in
    '') ;;
    --jar) what=jar ;;
    --test) what=test ;;
    -h | --help)
        sed -n '3,8s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    *) die "unknown option $1; see --help" ;;
esac

"$top/scripts/setup.sh" --hadoop
mkdir -p "$hadoop" "$m2"
exec 9>"$hadoop/.lock"
flock 9 # one at a time; the second finds the first one's result

# Maven in $top/hdfs: offline when the cache suffices.
maven() {
    local log=$hadoop/maven.log
    (cd "$top/hdfs" && mvn -B -q -o -Dmaven.repo.local="$m2" "$@") >"$log" 2>&1 && return
    if grep -q 'in offline mode' "$log"; then
        echo "hadoop: fetching from Maven Central"
        (cd "$top/hdfs" && mvn -B -q -Dmaven.repo.local="$m2" "$@") >"$log" 2>&1 && return
    fi
    grep -v '^SLF4J' "$log" >&2
    return 1
}

if [ $what = test ]; then
    maven test || die "the plug-in's tests failed"
    exit 0
fi

# The JDK that runs here, mounted into guests at its own path.
ln -sfn "$(dirname "$(dirname "$(readlink -f "$(command -v java)")")")" "$hadoop/java"

list=$(sha256sum "$top/hdfs/lab/pom.xml" | cut -d' ' -f1)
if [ $what = all ] && [ "$(cat "$hadoop/jars/LIST" 2>/dev/null)" != "$list" ]; then
    rm -rf "$hadoop/jars.new"
    maven -f lab/pom.xml org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies \
        -DoutputDirectory="$hadoop/jars.new" || die "Hadoop could not be fetched"
    echo "$list" >"$hadoop/jars.new/LIST"
    rm -rf "$hadoop/jars"
    mv -T "$hadoop/jars.new" "$hadoop/jars"
fi

maven package -DskipTests || die "the plug-in could not be built"
for jar in viola-hdfs viola-hdfs-tests; do
    built=$(find "$top/build/hdfs" -maxdepth 1 -name "viola-hdfs-[0-9]*.jar" | grep -E -- "$([ $jar = viola-hdfs ] && echo '[0-9]\.jar' || echo '-tests\.jar')$")
    cmp -s "$built" "$hadoop/$jar.jar" || { cp "$built" "$hadoop/.$jar.new" && mv "$hadoop/.$jar.new" "$hadoop/$jar.jar"; }
done
