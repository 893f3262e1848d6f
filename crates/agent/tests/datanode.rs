// SPDX-License-Identifier: Apache-2.0
//! Probes of real DataNodes. Needs the files that `scripts/hadoop.sh` makes.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use viola_agent::blocks::access::Probe;
use viola_agent::blocks::datanode::probe;
use viola_lab::hadoop::{Hadoop, LocalHdfs};
use viola_proto::agent::BlockKey;

/// The block of the only file, from the DataNode's directories.
fn only_block(data: &Path) -> BlockKey {
    let mut folders = vec![data.join("current")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path: PathBuf = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            let words: Vec<&str> = name.trim_end_matches(".meta").split('_').collect();
            if let (Some(["blk", id, stamp]), true) = (words.get(..), name.ends_with(".meta")) {
                let text = path.to_str().unwrap();
                let pool = text.split('/').find(|part| part.starts_with("BP-"));
                return BlockKey::new(pool.unwrap(), id.parse().unwrap(), stamp.parse().unwrap())
                    .unwrap();
            }
        }
    }
    panic!("{}: there is no block", data.display());
}

/// Starts an HDFS with these keys and probes its DataNode.
fn answers(keys: &[(&str, &str)], answer: &Probe) {
    let hadoop = Hadoop::find_from([Path::new(env!("CARGO_MANIFEST_DIR"))])
        .unwrap_or_else(|e| panic!("{e}"));
    let folder = tempfile::tempdir().unwrap();
    let (hdfs, mut client) = LocalHdfs::start_with(&hadoop, &folder.path().join("hdfs"), keys)
        .unwrap_or_else(|e| panic!("{}", e.full()));
    let block = only_block(&hdfs.folder().join("data"));
    assert_eq!(probe(&hdfs.data_address(), &block), *answer);
    // a block that does not exist is inconclusive
    let other = BlockKey::new(block.pool(), block.id() + 1000, block.stamp()).unwrap();
    let about_other = probe(&hdfs.data_address(), &other);
    match answer {
        Probe::Granted => assert!(matches!(about_other, Probe::Unknown(_)), "{about_other:?}"),
        _ => assert_eq!(about_other, *answer),
    }
    // and the plug-in declines where its client was handed a token
    let past = "dfs.client.replica.accessor.builder.classes=org.viola.hdfs.TimedAccess viola.vread.mount=/nothing";
    client.ask(&format!("open viola {past}")).unwrap();
    client.ask("viola read /ready 4096").unwrap();
    let counts: serde_json::Value = client.ask_for("counts").unwrap();
    let declined = counts["fallbacks"]["Token"].as_u64().unwrap();
    assert_eq!(declined > 0, *answer != Probe::Granted, "{counts}");
}

const TOKENS: (&str, &str) = ("dfs.block.access.token.enable", "true");

#[test]
fn a_datanode_of_a_cluster_with_tokens_requires_one() {
    answers(&[TOKENS], &Probe::TokenRequired);
}

#[test]
#[ignore = "a test bed: make test-beds"]
fn a_datanode_of_a_cluster_without_tokens_gives_the_block() {
    answers(&[], &Probe::Granted);
}

#[test]
#[ignore = "a test bed: make test-beds"]
fn a_datanode_that_expects_encryption_hangs_up() {
    let encrypted = ("dfs.encrypt.data.transfer", "true");
    answers(&[TOKENS, encrypted], &Probe::HungUp);
}
