// SPDX-License-Identifier: Apache-2.0
//! What is built on Hadoop, and the programs of it that run in guests: HBase, Spark.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::hdfs::{CONF, Hdfs, xml};
use super::root::{self, ROOT, checked};
use super::{Client, Hadoop};
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::lab::Lab;

/// What a program of a guest finds on its class path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kit {
    /// Hadoop and the benchmark client.
    Hadoop,
    /// HBase, its PerformanceEvaluation and Hadoop.
    HBase,
    /// Spark SQL and Hadoop.
    Spark,
}

/// Parts of the JDK that HBase and Spark look into; both say so in their start scripts.
const OPENED: [&str; 13] = [
    "java.base/java.lang",
    "java.base/java.lang.invoke",
    "java.base/java.lang.reflect",
    "java.base/java.io",
    "java.base/java.net",
    "java.base/java.nio",
    "java.base/java.util",
    "java.base/java.util.concurrent",
    "java.base/java.util.concurrent.atomic",
    "java.base/jdk.internal.ref",
    "java.base/jdk.internal.misc",
    "java.base/sun.nio.ch",
    "java.base/sun.util.calendar",
];

impl Kit {
    /// Its folder in the private Hadoop's.
    fn folder(self) -> Option<&'static str> {
        match self {
            Self::Hadoop => None,
            Self::HBase => Some("hbase"),
            Self::Spark => Some("spark"),
        }
    }

    /// Words for Java beside those of all programs.
    pub(super) fn flags(self) -> Vec<String> {
        match self {
            Self::Hadoop => Vec::new(),
            Self::HBase | Self::Spark => {
                let open = |part: &str| format!("--add-opens={part}=ALL-UNNAMED");
                OPENED.into_iter().map(open).collect()
            }
        }
    }

    /// Where both have a library, Spark's is the newer one and HBase's the older.
    pub(super) fn class_path(self, hadoop: &Hadoop, conf: &str) -> String {
        let own = |name: &str| format!("{}/{name}/*", hadoop.folder().display());
        match self {
            Self::Hadoop => hadoop.class_path(conf),
            Self::HBase => format!("{}:{}", hadoop.class_path(conf), own("hbase")),
            Self::Spark => {
                let [conf, plug_in, tests, jars] = hadoop.class_parts(conf);
                format!("{conf}:{plug_in}:{tests}:{}:{jars}", own("spark"))
            }
        }
    }
}

impl Hadoop {
    /// Whether what is built on Hadoop is here too.
    ///
    /// # Errors
    /// [`Error::NoKit`] when it is not.
    pub fn need(&self, kit: Kit) -> Result<()> {
        match kit.folder() {
            Some(name) if !self.folder().join(name).join("LIST").is_file() => Err(Error::NoKit),
            _ => Ok(()),
        }
    }
}

/// Longest start of HBase, on a core that others use too.
const START: Duration = Duration::from_secs(240);

impl Hdfs<'_> {
    /// Starts one more benchmark client in a guest, with this kit, on its own port.
    ///
    /// # Errors
    /// When it does not listen, with the end of its log.
    pub fn client_with(&self, lab: &Lab, guest: &Guest, kit: Kit, port: u16) -> Result<Client> {
        self.hadoop().need(kit)?;
        self.prepare(guest)?;
        // Its heap has one size from the start: what grows it would be in the first figures only. Others, whose start
        // counts, are spared the pages that they would touch for the first time.
        let port_word = port.to_string();
        let words = self.words_with(kit, &["-Xms512m"], CONF, Client::CLASS, &[&port_word]);
        Client::start(lab, guest, &words, port)
    }

    /// Starts an HBase in a guest: master, one region server and ZooKeeper in one process, unmodified, with
    /// its files in HDFS below `/NAME`. `keys` go to its `hbase-site.xml`; `port` is ZooKeeper's, 10,000 and 20,000 above
    /// are the servers'. Waits until
    /// ZooKeeper answers; the master may take longer.
    ///
    /// # Errors
    /// With the end of its log.
    pub fn hbase(
        &self,
        guest: &Guest,
        name: &str,
        port: u16,
        keys: &BTreeMap<&str, String>,
    ) -> Result<()> {
        self.hadoop().need(Kit::HBase)?;
        self.prepare(guest)?;
        let folder = format!("{CONF}/{name}");
        let mut all: BTreeMap<&str, String> = [
            ("hbase.rootdir", format!("{}/{name}", self.uri())),
            ("hbase.tmp.dir", format!("/tmp/{name}")),
            (
                "hbase.zookeeper.property.dataDir",
                format!("/tmp/{name}/zookeeper"),
            ),
            ("hbase.zookeeper.property.clientPort", port.to_string()),
            ("hbase.zookeeper.quorum", "127.0.0.1".into()),
            ("hbase.master.hostname", "localhost".into()),
            ("hbase.regionserver.hostname", "localhost".into()),
            // several in one guest
            ("hbase.master.port", (port + 10_000).to_string()),
            ("hbase.regionserver.port", (port + 20_000).to_string()),
            // no pages for people
            ("hbase.master.info.port", "-1".into()),
            ("hbase.regionserver.info.port", "-1".into()),
            // the other one looks into the insides of an older HDFS client
            ("hbase.wal.provider", "filesystem".into()),
            // an open log reserves a whole block: by default 256 MiB of a lab's small disk, five times
            ("hbase.regionserver.hlog.blocksize", (16 << 20).to_string()),
        ]
        .into();
        all.extend(keys.iter().map(|(key, value)| (*key, value.clone())));
        root::write(guest, &format!("{folder}/hbase-site.xml"), &xml(&all))?;
        let words = self.words_with(
            Kit::HBase,
            &[],
            &format!("{folder}:{CONF}"),
            "org.apache.hadoop.hbase.master.HMaster",
            &["start"],
        );
        let command: Vec<String> = words.iter().map(|w| format!("'{w}'")).collect();
        let script = format!(
            "mkdir -p {ROOT}/tmp/{name}; setsid {} </dev/null >/run/{name}.log 2>&1 & echo $! >/run/{name}.pid",
            command.join(" ")
        );
        checked(guest, name, guest.exec(&["sh", "-ec", &script])?)?;
        let end = Instant::now() + START;
        let listens =
            format!("grep -qi ':{port:04X} 00000000:0000 0A' /proc/net/tcp /proc/net/tcp6");
        while guest.exec(&["sh", "-c", &listens])?.status != 0 {
            let alive = format!("kill -0 $(cat /run/{name}.pid)");
            if guest.exec(&["sh", "-c", &alive])?.status != 0 || Instant::now() > end {
                return Err(Error::guest(
                    guest.name(),
                    format!("{name} did not start: {}", log(guest, name)),
                ));
            }
            std::thread::sleep(Duration::from_millis(300));
        }
        Ok(())
    }
}

/// The last lines of a program's log in a guest.
pub fn log(guest: &Guest, name: &str) -> String {
    guest
        .exec(&["tail", "-n", "15", &format!("/run/{name}.log")])
        .map(|output| output.stdout.trim().to_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hadoop(folder: &std::path::Path) -> Hadoop {
        std::fs::create_dir_all(folder.join("build/hadoop/jars")).unwrap();
        for jar in ["viola-hdfs.jar", "viola-hdfs-tests.jar"] {
            std::fs::write(folder.join("build/hadoop").join(jar), "").unwrap();
        }
        let java = folder.join("jdk/bin");
        std::fs::create_dir_all(&java).unwrap();
        std::fs::write(java.join("java"), "").unwrap();
        std::os::unix::fs::symlink(folder.join("jdk"), folder.join("build/hadoop/java")).unwrap();
        Hadoop::find_from([folder]).unwrap()
    }

    #[test]
    fn the_plug_in_comes_before_what_is_built_on_hadoop() {
        let folder = tempfile::tempdir().unwrap();
        let hadoop = hadoop(folder.path());
        for kit in [Kit::Hadoop, Kit::HBase, Kit::Spark] {
            let path = kit.class_path(&hadoop, "/conf");
            let parts: Vec<&str> = path.split(':').collect();
            assert_eq!(parts[0], "/conf");
            assert!(parts[1].ends_with("viola-hdfs.jar"), "{path}");
            assert_eq!(parts.iter().filter(|p| p.ends_with("jars/*")).count(), 1);
        }
        assert!(Kit::Spark.class_path(&hadoop, "/conf").ends_with("/jars/*"));
    }

    #[test]
    fn what_was_not_fetched_is_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let hadoop = hadoop(folder.path());
        hadoop.need(Kit::Hadoop).unwrap();
        let error = hadoop.need(Kit::Spark).unwrap_err().to_string();
        assert!(error.contains("--bench"), "{error}");
    }
}
