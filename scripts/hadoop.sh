#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# hadoop.sh: makes a private Hadoop and viola's HDFS plug-in under build/.
#
#   scripts/hadoop.sh           make what is missing; no network when all is there
#   scripts/hadoop.sh --bench   also HBase and Spark, which only the benchmark runs (260 MB more)
#   scripts/hadoop.sh --jar     only the plug-in and the benchmark client
#   scripts/hadoop.sh --test    run the plug-in's tests
#
# Maven fetches everything from Maven Central into build/m2 and checks the checksums. The script
# installs nothing on this host. Results:
#   build/hadoop/jars            Hadoop with its tests (hdfs/lab/pom.xml is the list)
#   build/hadoop/viola-hdfs.jar  the plug-in;  build/hadoop/viola-hdfs-tests.jar  the benchmark client
#   build/hadoop/java            link to the JDK in use
#   build/hadoop/hbase, spark    those (hdfs/lab/hbase.xml and spark.xml), each with a small tool of the benchmark
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
    --bench) what=bench ;;
    --jar) what=jar ;;
    --test) what=test ;;
    -h | --help)
        sed -n '3,9s/^# \{0,1\}//p' "$0"
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

# The host's JDK, which guests mount at its own path.
ln -sfn "$(dirname "$(dirname "$(readlink -f "$(command -v java)")")")" "$hadoop/java"

# fetch LIST FOLDER NAME [MAVEN OPTION...]: fetches what a list names and needs, unless it is there.
fetch() {
    local list=$top/hdfs/lab/$1 folder=$hadoop/$2 name=$3 sum
    shift 3
    sum=$(sha256sum "$list" | cut -d' ' -f1)
    [ "$(cat "$folder/LIST" 2>/dev/null)" != "$sum" ] || return 0
    rm -rf "$folder.new"
    maven -f "$list" org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies \
        -DoutputDirectory="$folder.new" "$@" || die "$name could not be fetched"
    echo "$sum" >"$folder.new/LIST"
    rm -rf "$folder"
    mv -T "$folder.new" "$folder"
}

# tool CLASS FOLDER: builds the benchmark's tool for the software in that folder.
tool() {
    local source=$top/hdfs/lab/src/org/viola/lab/$1.java folder=$hadoop/$2 out
    [ ! "$folder/viola-$1.jar" -nt "$source" ] || return 0
    out=$(mktemp -d)
    javac --release 11 -nowarn -proc:none -implicit:none -cp "$folder/*:$hadoop/jars/*" -d "$out" "$source" 2>"$hadoop/javac.log" ||
        { cat "$hadoop/javac.log" >&2; die "$1 could not be built"; }
    jar cf "$folder/viola-$1.jar" -C "$out" .
    rm -rf "$out"
}

if [ $what = all ] || [ $what = bench ]; then
    fetch pom.xml jars Hadoop
fi
if [ $what = bench ]; then
    # Hadoop is already there, in the measured version
    fetch hbase.xml hbase HBase -DexcludeGroupIds=org.apache.hadoop
    tool HBaseTable hbase
    fetch spark.xml spark Spark
    tool SparkTable spark
fi

maven package -DskipTests || die "the plug-in could not be built"
for jar in viola-hdfs viola-hdfs-tests; do
    built=$(find "$top/build/hdfs" -maxdepth 1 -name "viola-hdfs-[0-9]*.jar" | grep -E -- "$([ $jar = viola-hdfs ] && echo '[0-9]\.jar' || echo '-tests\.jar')$")
    cmp -s "$built" "$hadoop/$jar.jar" || { cp "$built" "$hadoop/.$jar.new" && mv "$hadoop/.$jar.new" "$hadoop/$jar.jar"; }
done
