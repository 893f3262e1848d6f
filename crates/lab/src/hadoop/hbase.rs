// SPDX-License-Identifier: Apache-2.0
//! HBase in a guest, on the HDFS of another one.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::JavaStack;
use super::config::{CONF, xml};
use super::hdfs::Hdfs;
use super::root::{self, ROOT, log};
use crate::error::{Error, Result};
use crate::guest::Guest;

/// Time limit for HBase to start, on a core that others use too.
const START_TIMEOUT: Duration = Duration::from_secs(240);

impl Hdfs<'_> {
    /// Starts an unmodified HBase in a guest: master, one region server and ZooKeeper in one
    /// process, with its files in HDFS below `/NAME`. `keys` override its `hbase-site.xml`.
    /// ZooKeeper listens on `port`, master and region server on ports 10,000 and 20,000 higher.
    /// Returns when ZooKeeper listens; the master may need longer.
    ///
    /// # Errors
    /// [`Error::Guest`] with the end of its log.
    pub fn hbase(
        &self,
        guest: &Guest,
        name: &str,
        port: u16,
        keys: &BTreeMap<&str, String>,
    ) -> Result<()> {
        self.hadoop().require(JavaStack::HBase)?;
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
            // ports that differ between several HBases in one guest
            ("hbase.master.port", (port + 10_000).to_string()),
            ("hbase.regionserver.port", (port + 20_000).to_string()),
            // no web pages
            ("hbase.master.info.port", "-1".into()),
            ("hbase.regionserver.info.port", "-1".into()),
            // the default provider uses internals of an older HDFS client
            ("hbase.wal.provider", "filesystem".into()),
            // an open log reserves a whole block: by default 256 MiB of a lab's small disk, five
            // times
            ("hbase.regionserver.hlog.blocksize", (16 << 20).to_string()),
        ]
        .into();
        all.extend(keys.iter().map(|(key, value)| (*key, value.clone())));
        root::write(guest, &format!("{folder}/hbase-site.xml"), &xml(&all))?;
        let words = self.words_with(
            JavaStack::HBase,
            &[],
            &format!("{folder}:{CONF}"),
            "org.apache.hadoop.hbase.master.HMaster",
            &["start"],
        );
        let script = format!("mkdir -p {ROOT}/tmp/{name}");
        root::sh(guest, name, &script, "", START_TIMEOUT)?;
        root::start(guest, name, &words)?;
        let end = Instant::now() + START_TIMEOUT;
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
