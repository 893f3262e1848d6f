// SPDX-License-Identifier: Apache-2.0
//! The host's CPUs: which share a core, and their sockets and NUMA nodes.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::cpuset::CpuSet;
use crate::error::HostError;
use crate::proc;

const CPUS: &str = "/sys/devices/system/cpu";
const NODES: &str = "/sys/devices/system/node";

/// One online CPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    /// Number.
    pub cpu: u32,
    /// NUMA node; 0 on a kernel without NUMA.
    pub node: u32,
    /// Physical package (socket).
    pub package: u32,
    /// All online CPUs of the same core, this one included: two or more with SMT.
    pub siblings: CpuSet,
}

/// The online CPUs.
///
/// # Errors
/// [`HostError`] naming the file of sysfs.
pub fn online() -> Result<CpuSet, HostError> {
    online_in(Path::new(CPUS))
}

/// All online CPUs with core, socket and node, ascending.
///
/// # Errors
/// [`HostError`] naming the file of sysfs.
pub fn cpus() -> Result<Vec<Cpu>, HostError> {
    cpus_in(Path::new(CPUS), Path::new(NODES))
}

/// CPUs that the scheduler keeps free of ordinary tasks (`isolcpus=`, isolated cpuset partitions).
///
/// # Errors
/// [`HostError`] naming the file of sysfs.
pub fn isolated() -> Result<CpuSet, HostError> {
    Ok(list(&Path::new(CPUS).join("isolated"))?.unwrap_or_default())
}

fn list(path: &Path) -> Result<Option<CpuSet>, HostError> {
    proc::read_text(path)?
        .map(|text| {
            text.parse()
                .map_err(|_| HostError::parse(path, "not a CPU list"))
        })
        .transpose()
}

fn number(path: &Path) -> Result<Option<u32>, HostError> {
    // The kernel shows -1 for a package without a number.
    Ok(proc::read_text(path)?.and_then(|text| text.trim().parse().ok()))
}

fn online_in(cpus: &Path) -> Result<CpuSet, HostError> {
    let path = cpus.join("online");
    list(&path)?.ok_or_else(|| HostError::parse(path, "no such file"))
}

fn cpus_in(cpus: &Path, nodes: &Path) -> Result<Vec<Cpu>, HostError> {
    let online = online_in(cpus)?;
    let mut nodes_cpus: Vec<(u32, CpuSet)> = Vec::new();
    // The list of nodes has the form of a CPU list.
    for node in list(&nodes.join("online"))?.unwrap_or_default().iter() {
        let path = nodes.join(format!("node{node}/cpulist"));
        nodes_cpus.push((node, list(&path)?.unwrap_or_default()));
    }
    let mut found = Vec::new();
    for cpu in online.iter() {
        let topology = cpus.join(format!("cpu{cpu}/topology"));
        let siblings = list(&topology.join("thread_siblings_list"))?.unwrap_or_default();
        let siblings: CpuSet = siblings
            .iter()
            .filter(|s| online.contains(*s))
            .chain([cpu])
            .collect();
        found.push(Cpu {
            cpu,
            node: nodes_cpus
                .iter()
                .find(|(_, cpus)| cpus.contains(cpu))
                .map_or(0, |(node, _)| *node),
            package: number(&topology.join("physical_package_id"))?.unwrap_or(0),
            siblings,
        });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn this_host_lists_its_online_cpus() {
        let online = online().unwrap();
        let cpus = cpus().unwrap();
        assert_eq!(cpus.iter().map(|c| c.cpu).collect::<CpuSet>(), online);
        assert!(cpus.iter().all(|c| c.siblings.contains(c.cpu)));
        assert!(isolated().is_ok());
    }

    #[test]
    fn siblings_and_nodes_of_a_two_socket_machine_with_smt() {
        let dir = tempfile::tempdir().unwrap();
        let (cpus, nodes) = (dir.path().join("cpu"), dir.path().join("node"));
        let write = |path: &Path, text: &str| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(&cpus.join("online"), "0-3,5-7\n");
        for cpu in 0..8u32 {
            let topology = cpus.join(format!("cpu{cpu}/topology"));
            write(
                &topology.join("thread_siblings_list"),
                &format!("{},{}\n", cpu % 4, cpu % 4 + 4),
            );
            write(
                &topology.join("physical_package_id"),
                &format!("{}\n", cpu % 2),
            );
        }
        write(&nodes.join("online"), "0,2\n");
        write(&nodes.join("node0/cpulist"), "0,2,4,6\n");
        write(&nodes.join("node2/cpulist"), "1,3,5,7\n");
        let found = cpus_in(&cpus, &nodes).unwrap();
        let seen: Vec<_> = found
            .iter()
            .map(|c| (c.cpu, c.node, c.package, c.siblings.to_string()))
            .collect();
        assert_eq!(
            seen[0],
            (0, 0, 0, "0".to_owned()),
            "its sibling 4 is offline"
        );
        assert_eq!(seen[1], (1, 2, 1, "1,5".to_owned()));
        assert_eq!(seen.len(), 7);
    }

    #[test]
    fn a_host_without_nodes_is_one_node() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("online"), "0-1\n").unwrap();
        let found = cpus_in(dir.path(), &dir.path().join("none")).unwrap();
        assert!(found.iter().all(|c| c.node == 0 && c.siblings.len() == 1));
        fs::write(dir.path().join("online"), "x\n").unwrap();
        assert!(
            cpus_in(dir.path(), dir.path())
                .unwrap_err()
                .to_string()
                .contains("online")
        );
    }
}
