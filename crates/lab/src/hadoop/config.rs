// SPDX-License-Identifier: Apache-2.0
//! Configuration files and Java options of all Hadoop programs in the lab.

use std::collections::BTreeMap;
use std::fmt::Write;

/// Folder of the configuration, in the root that Java runs in ([`super::ROOT`]).
pub(super) const CONF: &str = "/run/conf";
pub(super) const LOG: &str = "log4j.rootLogger=WARN,out\n\
    log4j.appender.out=org.apache.log4j.ConsoleAppender\n\
    log4j.appender.out.target=System.err\n\
    log4j.appender.out.layout=org.apache.log4j.PatternLayout\n\
    log4j.appender.out.layout.ConversionPattern=%d{ISO8601} %p %c{1}: %m%n\n\
    log4j.logger.org.apache.hadoop.util.NativeCodeLoader=ERROR\n";
/// Log of what HBase's PerformanceEvaluation measured, in the root that Java runs in.
pub const TOOLS_LOG: &str = "/tmp/tools.log";
/// JVM options for a short start in a guest with one or two GiB of memory.
pub(super) const JVM: [&str; 4] = [
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:-UsePerfData",
    "-Djava.net.preferIPv4Stack=true",
];
/// Warnings go to the program's log, measurements to [`TOOLS_LOG`].
pub(super) fn log4j() -> String {
    const TOOL: &str = "org.apache.hadoop.hbase.PerformanceEvaluation";
    format!(
        "{LOG}log4j.appender.tools=org.apache.log4j.FileAppender\n\
         log4j.appender.tools.file={TOOLS_LOG}\n\
         log4j.appender.tools.layout=org.apache.log4j.PatternLayout\n\
         log4j.appender.tools.layout.ConversionPattern=%m%n\n\
         log4j.logger.{TOOL}=INFO,tools\nlog4j.additivity.{TOOL}=false\n"
    )
}

/// Keys of `hdfs-site.xml`: one replica, all state on the disk, no delays that only large clusters
/// need. `more` overrides them.
pub(super) fn site<'k>(
    address: &str,
    more: &'k BTreeMap<String, String>,
) -> BTreeMap<&'k str, String> {
    let mut keys: BTreeMap<&str, String> = [
        ("dfs.replication", "1".into()),
        ("dfs.namenode.name.dir", "/mnt/name".into()),
        ("dfs.datanode.data.dir", "/mnt/data".into()),
        ("dfs.datanode.hostname", address.into()),
        (
            "dfs.namenode.datanode.registration.ip-hostname-check",
            "false".into(),
        ),
        ("dfs.namenode.safemode.extension", "0".into()),
        ("dfs.namenode.resource.du.reserved", "0".into()),
        ("dfs.namenode.fs-limits.min-block-size", "4096".into()),
        ("dfs.heartbeat.interval", "1".into()),
        ("dfs.permissions.enabled", "false".into()),
        // by default a disk takes no block if less than 1 GiB is free
        (
            "dfs.datanode.round-robin-volume-choosing-policy.additional-available-space",
            "0".into(),
        ),
    ]
    .into();
    keys.extend(
        more.iter()
            .map(|(key, value)| (key.as_str(), value.clone())),
    );
    keys
}

pub(super) fn xml(keys: &BTreeMap<&str, String>) -> String {
    let mut text = String::from("<configuration>\n");
    for (key, value) in keys {
        let value = value.replace('&', "&amp;").replace('<', "&lt;");
        let _ = writeln!(
            text,
            "<property><name>{key}</name><value>{value}</value></property>"
        );
    }
    text + "</configuration>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_of_the_caller_overrides_the_labs() {
        let more = [
            ("dfs.replication".to_owned(), "2".to_owned()),
            ("x".into(), "a&b".into()),
        ]
        .into();
        let keys = site("10.0.0.1", &more);
        assert_eq!(keys["dfs.replication"], "2");
        assert_eq!(keys["dfs.datanode.hostname"], "10.0.0.1");
        assert!(xml(&keys).contains("<name>x</name><value>a&amp;b</value>"));
    }
}
