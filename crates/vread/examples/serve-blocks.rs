// SPDX-License-Identifier: Apache-2.0
//! Serves blocks of an image to a VM; a description replaces the agent.
//!
//! ```text
//! serve-blocks DESCRIPTION SOCKET [--sandbox]
//! ```
//!
//! The description is JSON: `{"image": "/path", "blocks": [{"key": {"pool": "BP-1-x-1", "id": 7, "stamp": 1001},
//! "data": {"size": 4096, "extents": [[0, 1048576, 4096, false]]}, "meta": {"size": 0, "extents": []}}]}`.
//! With `--sandbox` it enters the sandbox of the real worker, which needs root.
//! A VMM connects to SOCKET: `virtio_uml.device=SOCKET:26`, and the VM mounts the tag `viola`. Words on
//! the standard input: `withdraw ID` ends a block's lease and says `withdrawn ID` as soon as no read is
//! in flight, `name ID` gives it a new one, `end-epoch` ends all, `stat` prints the counts.

use std::collections::HashMap;
use std::fs::File;
use std::io::BufRead;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, bail};
use serde::Deserialize;
use viola_extents::host::{Image, Layer};
use viola_proto::agent::{BlockKey, FileMap};
use viola_vread::control::socket_pair;
use viola_vread::lookup::{Found, Server};
use viola_vread::reader::{Service, serve_vm};
use viola_vread::table::{Lease, Table};
use viola_vread::{hazard, sandbox, table};

/// The user in the guest who owns the files: sshd of the lab's image.
const OWNER: u32 = 100;

const TABLE: u32 = 1;
const IMAGE: u32 = 1;
const NOBODY: u32 = 65_534;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    image: PathBuf,
    blocks: Vec<Described>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Described {
    key: BlockKey,
    data: FileMap,
    meta: FileMap,
}

/// The agent worker's part: blocks by slot, with their leases while they are named.
struct Named {
    blocks: Vec<Described>,
    leases: Mutex<Vec<Option<Lease>>>,
    table: Table,
    hazards: hazard::View,
}

impl Named {
    fn find(&self, key: &BlockKey) -> Option<Found> {
        let slot = self.blocks.iter().position(|block| block.key == *key)?;
        let lease = self.leases.lock().ok()?.get(slot).copied().flatten()?;
        let block = &self.blocks[slot];
        Some(Found {
            lease,
            image: IMAGE,
            data: block.data.clone(),
            meta: block.meta.clone(),
        })
    }

    fn slot(&self, id: &str) -> anyhow::Result<u32> {
        let id: i64 = id.parse()?;
        let slot = self.blocks.iter().position(|block| block.key.id() == id);
        Ok(slot.context("there is no such block")?.try_into()?)
    }

    fn set(&self, slot: u32, lease: Option<Lease>) {
        if let Ok(mut leases) = self.leases.lock() {
            leases[slot as usize] = lease;
        }
    }

    fn obey(&self, line: &str) -> anyhow::Result<String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["withdraw", id] => {
                let slot = self.slot(id)?;
                self.set(slot, None);
                self.table.withdraw(slot);
                while self.hazards.is_reading(TABLE, slot) {
                    std::thread::sleep(Duration::from_micros(50));
                }
                Ok(format!("withdrawn {id}"))
            }
            ["name", id] => {
                let slot = self.slot(id)?;
                self.set(slot, self.table.lease(slot));
                Ok(format!("named {id}"))
            }
            ["end-epoch"] => {
                self.table.end_epoch();
                while self.hazards.is_reading_any(TABLE) {
                    std::thread::sleep(Duration::from_micros(50));
                }
                Ok("ended".into())
            }
            _ => bail!("expected `withdraw ID`, `name ID`, `end-epoch` or `stat`"),
        }
    }
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [description, socket, options @ ..] = &arguments[..] else {
        bail!("usage: serve-blocks DESCRIPTION SOCKET [--sandbox]");
    };
    let described: Description =
        serde_json::from_slice(&std::fs::read(description).context("the description")?)?;

    let folder = tempfile::tempdir()?;
    let shared = |name: &str| {
        let path = folder.path().join(name);
        File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
    };
    let (table_file, hazard_file) = (shared("table")?, shared("hazards")?);
    table::create(
        &table_file,
        TABLE,
        described.blocks.len().max(1).try_into()?,
    )?;
    hazard::create(&hazard_file, hazard::MAX_CELLS)?;
    let (reader, worker) = socket_pair()?;

    let table = Table::map(&table_file)?;
    let leases = (0..described.blocks.len()).map(|slot| table.lease(slot as u32));
    let named = Arc::new(Named {
        leases: Mutex::new(leases.collect()),
        blocks: described.blocks,
        table,
        hazards: hazard::View::map(&hazard_file)?,
    });
    let answering = named.clone();
    std::thread::spawn(move || Server::new(worker).run(|key| answering.find(key)));

    let service = Arc::new(Service::new(hazard::Cells::map(&hazard_file)?));
    service.add("dn1", reader, table_file.into())?;
    let image = File::open(&described.image).context("the image")?;
    let image = Image::open(vec![Layer::raw(image)])?;
    service.set_images("dn1", HashMap::from([(IMAGE, Arc::new(image))]));

    let counts = service.clone();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            match line.as_str() {
                "stat" => println!("{:?}", counts.stat()),
                _ => match named.obey(&line) {
                    Ok(done) => println!("{done}"),
                    Err(e) => println!("error: {e}"),
                },
            }
        }
    });
    let _ = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket)?;
    folder.close()?;
    if options.iter().any(|word| word == "--sandbox") {
        sandbox::enter(Some((NOBODY, NOBODY)), sandbox::Profile::Reader, &[])?;
    }
    println!("ready");
    serve_vm(&service, listener, OWNER)?;
    Ok(())
}
