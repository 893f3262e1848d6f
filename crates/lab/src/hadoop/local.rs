// SPDX-License-Identifier: Apache-2.0
//! HDFS and its client as processes of the host, over the loopback: a baseline without VMs.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::config::{JVM, LOG, site, xml};
use super::{Client, Hadoop};
use crate::error::{Error, Result};

/// Time limit for the three processes to start.
const START_TIMEOUT: Duration = Duration::from_secs(120);
const NAME_NODE: &str = "org.apache.hadoop.hdfs.server.namenode.NameNode";
const DATA_NODE: &str = "org.apache.hadoop.hdfs.server.datanode.DataNode";

/// NameNode, DataNode and benchmark client on the host. Dropping it ends the processes.
pub struct LocalHdfs {
    folder: PathBuf,
    class_path: String,
    java: PathBuf,
    // ended in this order: client, DataNode, NameNode
    processes: Vec<Child>,
    data: u16,
}

impl LocalHdfs {
    /// Starts it with all files in `folder`, which is emptied first, and connects a client.
    ///
    /// # Errors
    /// [`Error::Io`] with the last lines of a failed process's log.
    pub fn start(hadoop: &Hadoop, folder: &Path) -> Result<(Self, Client)> {
        Self::start_with(hadoop, folder, &[])
    }

    /// The same with further keys of `hdfs-site.xml`.
    ///
    /// # Errors
    /// [`Error::Io`] with the last lines of a failed process's log.
    pub fn start_with(
        hadoop: &Hadoop,
        folder: &Path,
        keys: &[(&str, &str)],
    ) -> Result<(Self, Client)> {
        let conf = folder.join("conf");
        if folder.exists() {
            std::fs::remove_dir_all(folder).map_err(Error::io("empty", folder))?;
        }
        std::fs::create_dir_all(&conf).map_err(Error::io("make", &conf))?;
        let folder = folder.canonicalize().map_err(Error::io("find", folder))?;
        let conf = folder.join("conf");
        let [rpc, http, data, data_http, data_ipc, bench] = free_ports()?;
        let at = |port: u16| format!("127.0.0.1:{port}");
        let more = [
            ("dfs.namenode.http-address", at(http)),
            (
                "dfs.namenode.name.dir",
                folder.join("name").display().to_string(),
            ),
            (
                "dfs.datanode.data.dir",
                folder.join("data").display().to_string(),
            ),
            ("dfs.datanode.address", at(data)),
            ("dfs.datanode.http.address", at(data_http)),
            ("dfs.datanode.ipc.address", at(data_ipc)),
        ];
        let further = keys.iter().map(|(key, value)| (*key, (*value).to_owned()));
        let more = more.into_iter().chain(further);
        let more = more.map(|(key, value)| (key.to_owned(), value)).collect();
        let core = [("fs.defaultFS", format!("hdfs://{}", at(rpc)))].into();
        for (name, text) in [
            ("core-site.xml", xml(&core)),
            ("hdfs-site.xml", xml(&site("127.0.0.1", &more))),
            ("log4j.properties", LOG.to_owned()),
        ] {
            let path = conf.join(name);
            std::fs::write(&path, text).map_err(Error::io("write", path))?;
        }
        let mut local = Self {
            class_path: hadoop.class_path(&conf.display().to_string()),
            java: hadoop.java().join("bin/java"),
            folder,
            processes: Vec::new(),
            data,
        };
        let mut format = local.spawn("format", NAME_NODE, &["-format", "-nonInteractive"])?;
        let status = format.wait().map_err(Error::io("run", &local.java))?;
        if !status.success() {
            return Err(local.failed("format", "formatting failed"));
        }
        for (name, class) in [("namenode", NAME_NODE), ("datanode", DATA_NODE)] {
            let child = local.spawn(name, class, &[])?;
            local.processes.insert(0, child);
        }
        let child = local.spawn("bench", Client::CLASS, &[&bench.to_string()])?;
        local.processes.insert(0, child);
        let end = Instant::now() + START_TIMEOUT;
        let mut client = loop {
            match TcpStream::connect((Ipv4Addr::LOCALHOST, bench)) {
                Ok(stream) => break Client::over("host", stream)?,
                Err(e) if Instant::now() > end => return Err(local.failed("bench", &e.to_string())),
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        };
        client.ask("open stock")?;
        // the DataNode has registered when a file can be written
        while let Err(e) = client.ask("stock write /ready 1 4096 1") {
            if Instant::now() > end {
                return Err(local.failed("datanode", &e.to_string()));
            }
            std::thread::sleep(Duration::from_millis(300));
        }
        Ok((local, client))
    }

    /// Its folder; the DataNode's blocks are below `data/`.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Address on which its DataNode serves clients, `HOST:PORT`.
    pub fn data_address(&self) -> String {
        format!("127.0.0.1:{}", self.data)
    }

    /// Process ids of client, DataNode and NameNode.
    pub fn pids(&self) -> Vec<u32> {
        self.processes.iter().map(Child::id).collect()
    }

    fn spawn(&self, name: &str, class: &str, arguments: &[&str]) -> Result<Child> {
        let path = self.folder.join(format!("{name}.log"));
        let log = std::fs::File::create(&path).map_err(Error::io("make", &path))?;
        Command::new(&self.java)
            .args(JVM)
            .args(["-cp", &self.class_path, class])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .map_err(Error::io("run", &self.java))
    }

    fn failed(&self, name: &str, what: &str) -> Error {
        let path = self.folder.join(format!("{name}.log"));
        let log = std::fs::read_to_string(&path).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let words = lines[lines.len().saturating_sub(8)..].join(" / ");
        Error::io("start", path)(std::io::Error::other(format!("{what}: {words}")))
    }
}

impl Drop for LocalHdfs {
    fn drop(&mut self) {
        for child in &mut self.processes {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Free ports. All are held until all are found, so that they differ.
fn free_ports<const N: usize>() -> Result<[u16; N]> {
    let mut held = Vec::new();
    let mut ports = [0; N];
    for port in &mut ports {
        let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .map_err(Error::net("finding a free port"))?;
        *port = socket
            .local_addr()
            .map_err(Error::net("finding a free port"))?
            .port();
        held.push(socket);
    }
    Ok(ports)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_ports_differ() {
        let mut ports = free_ports::<16>().unwrap();
        ports.sort_unstable();
        assert!(ports.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
