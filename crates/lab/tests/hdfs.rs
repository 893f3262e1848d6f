// SPDX-License-Identifier: Apache-2.0
//! HDFS in guests. Needs root, the lab's image and what `scripts/hadoop.sh` makes.
#![allow(clippy::unwrap_used)]

mod support;

use std::path::Path;
use std::time::Duration;

use support::{core, paths, turn};
use viola_lab::hadoop::{Client, FileSystem, Hadoop, Hdfs, Options};
use viola_lab::{Guest, Lab};

const LONG: Duration = Duration::from_secs(300);

#[test]
fn files_written_to_hdfs_are_read_back() {
    with_hdfs(FileSystem::Xfs, |_, _, mut client| {
        let written = client.ask("stock write /g 5000000 1048576 1").unwrap();
        let read = client.ask("stock read /g 65536").unwrap();
        assert_eq!(
            (read.bytes, read.crc32c, read.local),
            (5_000_000, written.crc32c, 0)
        );
        assert!(read.wall_s > 0.0);
        assert_eq!(client.ask("stock pread /g 10 4096 1").unwrap().reads, 10);
        client.ask("stock append /g 1000 2").unwrap();
        client.ask("stock delete /g").unwrap();
        let error = client.ask("stock delete /g").unwrap_err().to_string();
        assert!(error.contains("there is no /g"), "{error}");
    });
}

#[test]
#[ignore = "a test bed: make test-beds"]
fn files_of_hadoops_own_commands_survive_a_restart() {
    with_hdfs(FileSystem::Ext4, |hdfs, guest, mut client| {
        put_and_get(hdfs, guest);
        hdfs.stop_daemons().unwrap();
        hdfs.start_daemons().unwrap();
        let again = client.ask("stock skim /f 1048576").unwrap();
        assert_eq!(again.bytes, 64 << 20, "the file is there after a restart");
    });
}

/// Runs `test` with an HDFS whose blocks lie on this file system, the guest of the client, and a client of the stock side.
fn with_hdfs(file_system: FileSystem, test: impl FnOnce(&Hdfs<'_>, &Guest, Client)) {
    let _turn = turn();
    let hadoop = Hadoop::find_from([Path::new(env!("CARGO_MANIFEST_DIR"))])
        .unwrap_or_else(|error| panic!("{error}"));
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("data.img");
    let spec = hadoop
        .spec("t-hdfs", &[core()], &image, file_system, 1 << 30)
        .unwrap();
    let lab = Lab::up(&spec, &paths(&folder.path().join("run")))
        .unwrap_or_else(|e| panic!("{}", e.full()));
    let options = Options {
        file_system,
        ..Options::default()
    };
    let hdfs = Hdfs::start(&hadoop, lab.guest("node").unwrap(), &options)
        .unwrap_or_else(|e| panic!("{}", e.full()));
    let guest = lab.guest("client").unwrap();
    hdfs.prepare(guest).unwrap();
    let mut client = hdfs.client(&lab, guest).unwrap();
    client.ask("open stock").unwrap();
    test(&hdfs, guest, client);
    drop(hdfs);
    lab.down().unwrap();
}

/// Copies a file by Hadoop's own command.
fn put_and_get(hdfs: &Hdfs<'_>, guest: &Guest) {
    let sum = |script: &str| {
        let output = guest.exec_for(&["sh", "-ec", script], "", LONG).unwrap();
        assert_eq!(output.status, 0, "{}", output.stderr);
        output.stdout.split(' ').next().unwrap().to_owned()
    };
    let before = sum(
        "dd if=/dev/urandom of=/run/hadoop/tmp/f bs=1M count=64 2>/dev/null; sha256sum /run/hadoop/tmp/f",
    );
    let put = hdfs.shell(guest, &["-put", "/tmp/f", "/f"], "", LONG);
    put.unwrap_or_else(|e| panic!("{e}; {}", hdfs.log("datanode")));
    let stored = hdfs
        .node()
        .exec(&[
            "sh",
            "-c",
            "cat $(find /mnt/data -name 'blk_*[0-9]') | wc -c",
        ])
        .unwrap();
    assert_eq!(stored.stdout.trim(), (64 << 20).to_string());
    let after = hdfs
        .shell(guest, &["-cat", "/f"], "| sha256sum", LONG)
        .unwrap()
        .stdout;
    assert_eq!(after.split(' ').next().unwrap(), before);
}
