// SPDX-License-Identifier: Apache-2.0
//! NameNode and DataNode in a guest.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, Instant};

use super::config::{CONF, JVM, log4j, site, xml};
use super::root::{self, ROOT, checked};
use super::stack::JavaStack;
use super::{Client, FileSystem, Hadoop};
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::lab::Lab;
use crate::wire::Output;

/// Time limit for a NameNode and a DataNode to start, on a core that others use too.
const START_TIMEOUT: Duration = Duration::from_secs(240);
/// Time limit to mount a disk.
const MOUNT_TIMEOUT: Duration = Duration::from_secs(60);
const NAME_NODE_PORT: u16 = 8020;

/// Set-up of an HDFS.
#[derive(Debug, Clone)]
pub struct Options {
    /// File system on the guest's first disk.
    pub file_system: FileSystem,
    /// Mount options, for example `"noatime"`.
    pub mount: String,
    /// Keys of `hdfs-site.xml` that override the lab's.
    pub keys: BTreeMap<String, String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            file_system: FileSystem::Ext4,
            mount: "noatime".into(),
            keys: BTreeMap::new(),
        }
    }
}

/// A running HDFS. It ends with its lab.
pub struct Hdfs<'a> {
    hadoop: &'a Hadoop,
    node: &'a Guest,
    core: String,
    keys: BTreeMap<String, String>,
    hosts: String,
    /// Further guests with a DataNode.
    others: Vec<&'a Guest>,
}

impl<'a> Hdfs<'a> {
    /// Mounts the guest's first disk, formats a name space if it has none, starts NameNode and
    /// DataNode, and waits until safe mode is off. The DataNode's folder is `/mnt/data`.
    ///
    /// # Errors
    /// [`Error::Guest`] with the last lines of the daemon's log.
    pub fn start(hadoop: &'a Hadoop, node: &'a Guest, options: &Options) -> Result<Self> {
        let address = node
            .address()
            .ok_or_else(|| Error::guest(node.name(), "an HDFS needs a network"))?;
        mount(node, options)?;
        let hdfs = Self {
            hadoop,
            node,
            core: xml(&[("fs.defaultFS", format!("hdfs://{address}:{NAME_NODE_PORT}"))].into()),
            keys: options.keys.clone(),
            hosts: format!("127.0.0.1 localhost\n{address} {}\n", node.name()),
            others: Vec::new(),
        };
        hdfs.prepare(node)?;
        let format = "org.apache.hadoop.hdfs.server.namenode.NameNode";
        if node.exec(&["test", "-e", "/mnt/name/current"])?.status != 0 {
            let arguments = ["-format", "-nonInteractive"];
            checked(
                node,
                "formatting",
                hdfs.java(node, format, &arguments, START_TIMEOUT)?,
            )?;
        }
        hdfs.start_daemons()?;
        Ok(hdfs)
    }

    /// Mounts the first disk of another guest, starts a DataNode there and waits until the NameNode
    /// knows it.
    ///
    /// # Errors
    /// [`Error::Guest`] with the error of the guest or program.
    pub fn join(&mut self, guest: &'a Guest, options: &Options) -> Result<()> {
        mount(guest, options)?;
        self.others.push(guest);
        self.prepare(guest)?;
        self.start_daemon(guest, "datanode", &[])?;
        self.wait_ready()
    }

    /// Sets a key of `hdfs-site.xml` for daemons and clients that start later.
    ///
    /// # Errors
    /// [`Error::Guest`] with the error of the guest or program.
    pub fn set(&mut self, key: &str, value: &str) -> Result<()> {
        self.keys.insert(key.into(), value.into());
        self.prepare(self.node)?;
        self.others.iter().try_for_each(|guest| self.prepare(guest))
    }

    /// Starts both daemons, which must not be running, and waits until safe mode is off.
    ///
    /// # Errors
    /// [`Error::Guest`] with the error of the guest or program.
    pub fn start_daemons(&self) -> Result<()> {
        self.start_daemons_with(&[], &[])
    }

    /// The same with arguments for the NameNode and the DataNode, for example `-upgrade`.
    ///
    /// # Errors
    /// [`Error::Guest`] with the error of the guest or program.
    pub fn start_daemons_with(&self, name_node: &[&str], data_node: &[&str]) -> Result<()> {
        self.start_daemon(self.node, "namenode", name_node)?;
        self.start_daemon(self.node, "datanode", data_node)?;
        self.wait_ready()
    }

    /// Starts a daemon, `namenode` or `datanode`, which must not be running. Does not wait.
    ///
    /// # Errors
    /// [`Error::Guest`] with the error of the guest or program.
    pub fn start_daemon(&self, guest: &Guest, short: &str, arguments: &[&str]) -> Result<()> {
        let class = match short {
            "namenode" => "namenode.NameNode",
            _ => "datanode.DataNode",
        };
        let words = self.words(&format!("org.apache.hadoop.hdfs.server.{class}"), arguments);
        root::start(guest, short, &words)
    }

    /// Ends both daemons, the DataNode first.
    ///
    /// # Errors
    /// [`Error::Guest`] with the error of the guest or program.
    pub fn stop_daemons(&self) -> Result<()> {
        let script = "for d in datanode namenode; do p=$(cat /run/$d.pid); kill $p 2>/dev/null || continue; \
            i=0; while kill -0 $p 2>/dev/null; do i=$((i+1)); [ $i -lt 100 ] || kill -9 $p; sleep 0.1; done; done";
        checked(
            self.node,
            "ending HDFS",
            self.node.exec(&["sh", "-c", script])?,
        )
        .map(drop)
    }

    fn wait_ready(&self) -> Result<()> {
        let end = Instant::now() + START_TIMEOUT;
        let live = 1 + self.others.len();
        let ask = "wget -q -O - 'http://127.0.0.1:9870/jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState'";
        loop {
            let state = self.node.exec(&["sh", "-c", ask])?.stdout;
            if state.contains("\"FSState\" : \"Operational\"")
                && state.contains(&format!("\"NumLiveDataNodes\" : {live},"))
            {
                return Ok(());
            }
            for daemon in ["namenode", "datanode"] {
                let alive = format!("kill -0 $(cat /run/{daemon}.pid)");
                if self.node.exec(&["sh", "-c", &alive])?.status != 0 {
                    return Err(self.failed(&format!("its {daemon} ended"), daemon));
                }
            }
            if Instant::now() > end {
                return Err(self.failed("HDFS did not become ready in time", "datanode"));
            }
            std::thread::sleep(Duration::from_millis(300));
        }
    }

    fn failed(&self, what: &str, daemon: &str) -> Error {
        Error::guest(self.node.name(), format!("{what}: {}", self.log(daemon)))
    }

    /// The last lines of the log of `namenode` or `datanode`.
    pub fn log(&self, daemon: &str) -> String {
        root::log(self.node, daemon)
    }

    /// Address of the file system, `hdfs://ADDRESS:PORT`.
    pub fn uri(&self) -> String {
        let address = self.node.address().map(|a| a.to_string());
        format!("hdfs://{}:{NAME_NODE_PORT}", address.unwrap_or_default())
    }

    pub(super) fn hadoop(&self) -> &'a Hadoop {
        self.hadoop
    }

    /// The guest with the NameNode and the DataNode.
    pub fn node(&self) -> &'a Guest {
        self.node
    }

    /// Prepares a guest to run Java with this HDFS's configuration.
    ///
    /// # Errors
    /// [`Error::Guest`] with the error of the guest or program.
    pub fn prepare(&self, guest: &Guest) -> Result<()> {
        let mut hosts = self.hosts.clone();
        // programs look up the name of the host that they run on
        if let Some(address) = guest.address().filter(|_| guest.name() != self.node.name()) {
            let _ = writeln!(hosts, "{address} {}", guest.name());
        }
        root::make(self.hadoop, guest, &hosts)?;
        let address = if guest.name() == self.node.name() || self.is_data_node(guest) {
            guest.address()
        } else {
            self.node.address()
        };
        let address = address.map(|a| a.to_string()).unwrap_or_default();
        let site = xml(&site(&address, &self.keys));
        root::write(guest, &format!("{CONF}/hdfs-site.xml"), &site)?;
        root::write(guest, &format!("{CONF}/core-site.xml"), &self.core)?;
        root::write(guest, &format!("{CONF}/log4j.properties"), &log4j())
    }

    fn is_data_node(&self, guest: &Guest) -> bool {
        self.others.iter().any(|other| other.name() == guest.name())
    }

    /// Runs a Java class in a prepared guest.
    ///
    /// # Errors
    /// [`Error::Guest`] with the error of the guest or program.
    pub fn java(
        &self,
        guest: &Guest,
        class: &str,
        arguments: &[&str],
        limit: Duration,
    ) -> Result<Output> {
        self.java_fed(guest, class, arguments, "", limit)
    }

    /// The same with a standard input.
    ///
    /// # Errors
    /// [`Error::Guest`] with the error of the guest or program.
    pub fn java_fed(
        &self,
        guest: &Guest,
        class: &str,
        arguments: &[&str],
        stdin: &str,
        limit: Duration,
    ) -> Result<Output> {
        guest.exec_for(&self.words(class, arguments), stdin, limit)
    }

    /// Runs `hdfs dfs` in a prepared guest. `into` redirects its standard output in the shell's
    /// words (`"| sha256sum"`, `"> /dev/null"`).
    ///
    /// # Errors
    /// [`Error::Guest`] with the error of the guest or program.
    pub fn shell(
        &self,
        guest: &Guest,
        arguments: &[&str],
        into: &str,
        limit: Duration,
    ) -> Result<Output> {
        let words = self.words("org.apache.hadoop.fs.FsShell", arguments);
        let script = format!("set -o pipefail; {} {into}", root::quoted(&words));
        root::sh(guest, "hdfs dfs", &script, "", limit)
    }

    fn words(&self, class: &str, arguments: &[&str]) -> Vec<String> {
        self.words_with(JavaStack::Hadoop, &[], CONF, class, arguments)
    }

    pub(super) fn words_with(
        &self,
        stack: JavaStack,
        flags: &[&str],
        conf: &str,
        class: &str,
        arguments: &[&str],
    ) -> Vec<String> {
        let java = self.hadoop.java().join("bin/java").display().to_string();
        let mut words = vec!["chroot".into(), ROOT.into(), java];
        words.extend(JVM.map(str::to_owned));
        words.extend(stack.flags());
        words.extend(flags.iter().map(|flag| (*flag).to_owned()));
        let class_path = stack.class_path(self.hadoop, conf);
        words.extend(["-cp".into(), class_path, class.into()]);
        words.extend(arguments.iter().map(|a| (*a).to_owned()));
        words
    }

    /// Starts the benchmark client in a guest and connects to it.
    ///
    /// # Errors
    /// [`Error::Guest`] with the error of the guest or program.
    pub fn client(&self, lab: &Lab, guest: &Guest) -> Result<Client> {
        self.client_with(lab, guest, JavaStack::Hadoop, Client::PORT)
    }

    /// Starts one more benchmark client in a guest, with this Java stack, on its own port.
    ///
    /// # Errors
    /// [`Error::Guest`] with the end of its log if it does not listen.
    pub fn client_with(
        &self,
        lab: &Lab,
        guest: &Guest,
        stack: JavaStack,
        port: u16,
    ) -> Result<Client> {
        self.hadoop().require(stack)?;
        self.prepare(guest)?;
        // A heap that grows would slow down only the first measurements, so it has its full size
        // from the start. Other programs, whose start is measured, do not pay for touching these
        // pages.
        let port_word = port.to_string();
        let words = self.words_with(stack, &["-Xms512m"], CONF, Client::CLASS, &[&port_word]);
        Client::start(lab, guest, &words, port)
    }
}

fn mount(guest: &Guest, options: &Options) -> Result<()> {
    let script = format!(
        "mountpoint -q /mnt || mount -t {} -o {} /dev/ubda /mnt; mkdir -p /mnt/data /mnt/name",
        options.file_system.name(),
        options.mount,
    );
    root::sh(guest, "mounting its disk", &script, "", MOUNT_TIMEOUT).map(drop)
}
