// SPDX-License-Identifier: Apache-2.0
//! File servers in a guest: OpenSSH for scp, and the kernel's NFS server (paper 002, figure 9).

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use viola_lab::{Guest, Lab};

use crate::harness::guests::shell;
use crate::harness::side::lab_failure;
use crate::harness::tool;
use viola_cli::error::{Failure, Outcome};

/// Timeout for a server or a connection, with a busy guest.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// Grace period of the NFS server after its start, in which it waits for clients of an earlier instance (the kernel's
/// minimum).
const NFS_GRACE_PERIOD: Duration = Duration::from_secs(11);
/// Size of the disk, MiB.
const DISK: u32 = 256;

/// Script in the guest that mounts the disk and starts an OpenSSH server and the kernel's NFS server (only version 4,
/// which needs no helpers). It writes the exports to the kernel as mountd would: any client, any port, access as root
/// (flags: insecure, no subtree check, fsid). The server's threads belong to the kernel, so they stay on the first
/// vCPU.
const SERVERS: &str = r#"set -e
mkdir -p /run/sshd; chmod 755 /run/sshd
mount -o noatime DISK /mnt
cat >/run/ssh/config <<'END'
Port 22
HostKey /run/ssh/host
AuthorizedKeysFile /run/ssh/keys
StrictModes no
UsePAM no
PidFile none
Subsystem sftp /usr/lib/openssh/sftp-server
END
chmod 600 /run/ssh/host
mount -t nfsd nfsd /proc/fs/nfsd
echo "nfsd PEER 2147483647 *" >/proc/net/rpc/auth.unix.ip/channel
echo "* /mnt 2147483647 9218 65534 65534 0" >/proc/net/rpc/nfsd.export/channel
printf '* 1 \\x00000000 2147483647 /mnt\n' >/proc/net/rpc/nfsd.fh/channel
echo 1048576 >/proc/fs/nfsd/max_block_size
echo "-3 +4" >/proc/fs/nfsd/versions
echo 10 >/proc/fs/nfsd/nfsv4leasetime
echo 10 >/proc/fs/nfsd/nfsv4gracetime
echo "tcp 2049" >/proc/fs/nfsd/portlist
echo 4 >/proc/fs/nfsd/threads
for p in $(pgrep '^nfsd'); do taskset -p 1 $p >/dev/null; done
"#;

/// Script in the guest that restarts the ssh server. Its channel buffer grows in steps to 2 MiB with a copy at each
/// step. With malloc's defaults each copy is a new mapping, and its pages cost 60,000 faults for 8 MB. Under User Mode
/// Linux a fault takes 0.2 ms, so the faults would dominate the copy.
const SSHD: &str = "p=$(cat /run/ssh/pid 2>/dev/null) && kill $p && while [ -e /proc/$p/exe ]; do usleep 50000; done
    export GLIBC_TUNABLES=glibc.malloc.mmap_threshold=67108864:glibc.malloc.trim_threshold=134217728:glibc.malloc.top_pad=16777216
    /usr/sbin/sshd -D -e -f /run/ssh/config </dev/null >/run/ssh/log 2>&1 & echo $! >/run/ssh/pid";

/// No prompts and no known hosts: the host key exists only for the measurement.
const OPTIONS: [&str; 8] = [
    "-o",
    "BatchMode=yes",
    "-o",
    "StrictHostKeyChecking=no",
    "-o",
    "UserKnownHostsFile=/dev/null",
    "-o",
    "ConnectTimeout=30",
];

/// Creates the disk image: a file system with one file of `mib`.
///
/// # Errors
/// No space is left, or mkfs.ext4 is missing.
pub fn image(path: &Path, mib: u32) -> Outcome {
    let failed = |e: std::io::Error| Failure::run(format!("{}: {e}", path.display()));
    let tree = path.with_extension("tree");
    // An NFS client must name a folder below the root.
    fs::create_dir_all(tree.join("files")).map_err(failed)?;
    fs::write(tree.join("files/served"), bytes(mib)).map_err(failed)?;
    let result = tool::output(
        Command::new("/usr/sbin/mkfs.ext4")
            .args(["-q", "-b", "4096", "-d"])
            .args([tree.as_path(), path])
            .arg(format!("{DISK}M")),
    );
    fs::remove_dir_all(&tree).map_err(failed)?;
    result.map(drop)
}

/// This many MiB of varying bytes.
fn bytes(mib: u32) -> Vec<u8> {
    (0..u64::from(mib) << 17)
        .flat_map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes())
        .collect()
}

/// The clients and their settings.
pub struct Files {
    address: Ipv4Addr,
    mib: u32,
    /// The lab's image with its nfs-cp; that of Debian 12 writes nothing longer than 3 KiB.
    image: PathBuf,
    /// The file to send.
    file: PathBuf,
    /// Control socket of the persistent ssh connection.
    control: PathBuf,
    /// Its key.
    key: PathBuf,
    /// The process of the persistent ssh connection.
    master: Option<Child>,
}

impl Files {
    /// Starts the servers in the guest, and one ssh connection for all copies, so that connection setup is not
    /// measured.
    ///
    /// # Errors
    /// A server does not start or accepts no connection.
    pub fn start(
        lab: &Lab,
        guest: &Guest,
        address: Ipv4Addr,
        (folder, image): (&Path, &Path),
        disk: &str,
        mib: u32,
    ) -> Outcome<Self> {
        let failed = |e: std::io::Error| Failure::run(format!("{}: {e}", folder.display()));
        let at = |name: &str| folder.join(name);
        for name in ["host", "key"] {
            tool::output(
                Command::new("ssh-keygen")
                    .args(["-q", "-t", "ed25519", "-N", "", "-f"])
                    .arg(at(name)),
            )?;
        }
        let host = fs::read_to_string(at("host")).map_err(failed)?;
        let public = fs::read_to_string(at("key.pub")).map_err(failed)?;
        shell(
            guest,
            &format!(
                "mkdir -p /run/ssh; cat >/run/ssh/host <<'END'\n{host}END\ncat >/run/ssh/keys <<'END'\n{public}END\n"
            ),
        )?;
        let [a, b, c, _] = address.octets();
        let peer = Ipv4Addr::new(a, b, c, 1).to_string();
        shell(guest, &SERVERS.replace("PEER", &peer).replace("DISK", disk))?;
        let started = Instant::now();
        let file = at("sent");
        fs::write(&file, bytes(mib)).map_err(failed)?;
        let control = at("ssh");
        let mut files = Self {
            address,
            mib,
            image: image.into(),
            file,
            control,
            key: at("key"),
            master: None,
        };
        files.connect(lab, guest)?;
        std::thread::sleep(NFS_GRACE_PERIOD.saturating_sub(started.elapsed()));
        Ok(files)
    }

    /// (Re)starts the ssh server and the connection for copies. Their sockets use the buffer sizes that apply at that
    /// moment.
    ///
    /// # Errors
    /// The server accepts no connection.
    pub fn connect(&mut self, lab: &Lab, guest: &Guest) -> Outcome {
        self.disconnect();
        shell(guest, SSHD)?;
        let started = Instant::now();
        let mut ssh = Command::new("ssh");
        ssh.args(["-q", "-N", "-M", "-S"])
            .arg(&self.control)
            .arg("-i")
            .arg(&self.key)
            .args(OPTIONS)
            .arg(format!("root@{}", self.address))
            .stdin(Stdio::null())
            // ssh reports that it was ended.
            .stderr(Stdio::null());
        while !self.control.exists() {
            // A client that connected before the server listened has ended.
            let ended = |master: &mut Child| !matches!(master.try_wait(), Ok(None));
            if self.master.as_mut().is_none_or(ended) {
                let spawned = lab.in_netns(|| ssh.spawn()).map_err(lab_failure)?;
                let master = spawned
                    .map_err(|e| Failure::run(format!("ssh: {e}: run scripts/setup.sh --bench")))?;
                self.master = Some(master);
            }
            if started.elapsed() > READY_TIMEOUT {
                let output_text = shell(guest, "tail -n 3 /run/ssh/log")?.stdout;
                return Err(Failure::run(format!(
                    "guest {} accepts no ssh connection: {}",
                    guest.name(),
                    output_text.trim()
                )));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    fn disconnect(&mut self) {
        if let Some(mut master) = self.master.take() {
            let _ = master.kill();
            let _ = master.wait();
        }
        let _ = fs::remove_file(&self.control);
    }

    /// MB/s of a copy into the guest by scp.
    ///
    /// # Errors
    /// The client fails, or the file in the guest is incomplete.
    pub fn scp(&self, lab: &Lab, guest: &Guest) -> Outcome<f64> {
        let to = format!("root@{}:/mnt/files/copied", self.address);
        let mut scp = Command::new("scp");
        scp.args(["-q", "-B"]).args(OPTIONS).arg("-o");
        scp.arg(format!("ControlPath={}", self.control.display()));
        self.timed(lab, guest, scp.arg(&self.file).arg(to), "copied")
    }

    /// MB/s of a write over NFS.
    ///
    /// # Errors
    /// As [`Self::scp`].
    pub fn nfs_write(&self, lab: &Lab, guest: &Guest) -> Outcome<f64> {
        let to = self.url("written");
        let mut copy = self.nfs_cp();
        self.timed(lab, guest, copy.arg(&self.file).arg(to), "written")
    }

    /// MB/s of a read over NFS without the guest's page cache.
    ///
    /// # Errors
    /// As [`Self::scp`].
    pub fn nfs_read(&self, lab: &Lab, guest: &Guest) -> Outcome<f64> {
        shell(guest, "echo 1 >/proc/sys/vm/drop_caches")?;
        let to = self.file.with_extension("read");
        let _ = fs::remove_file(&to);
        let mut copy = self.nfs_cp();
        self.timed(lab, guest, copy.arg(self.url("served")).arg(to), "served")
    }

    fn nfs_cp(&self) -> Command {
        tool::image_program(&self.image, "bin/nfs-cp")
    }

    fn url(&self, name: &str) -> String {
        format!("nfs://{}/files/{name}?version=4", self.address)
    }

    /// Runs a client and checks that the file is complete in the guest. Then it flushes dirty pages before the next
    /// measurement.
    fn timed(&self, lab: &Lab, guest: &Guest, client: &mut Command, name: &str) -> Outcome<f64> {
        let started = Instant::now();
        lab.in_netns(|| tool::output(client))
            .map_err(lab_failure)??;
        let seconds = started.elapsed().as_secs_f64();
        let size = shell(
            guest,
            &format!("sync; cd /mnt/files; stat -c %s {name}; [ {name} = served ] || rm {name}"),
        )?;
        let expected = u64::from(self.mib) << 20;
        if size.stdout.trim().parse() != Ok(expected) {
            return Err(Failure::run(format!(
                "in guest {}: {name} has {} bytes instead of {expected}",
                guest.name(),
                size.stdout.trim()
            )));
        }
        Ok(expected as f64 / 1e6 / seconds.max(0.001))
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        self.disconnect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sent_file_has_its_size_and_varying_bytes() {
        let sent = bytes(1);
        assert_eq!(sent.len(), 1 << 20);
        assert_ne!(sent[8..16], sent[16..24]);
    }
}
