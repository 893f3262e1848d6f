// SPDX-License-Identifier: Apache-2.0
//! Queries a VM's HTTP interface, with bounds on time and size: a VM may have taken over its hypervisor.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::thread::Tid;
use crate::vm::{Disk, Hypervisor, printable};

/// Time for all requests to one VM together.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(500);
/// Most bytes of one answer.
const MAX_ANSWER_BYTES: usize = 1 << 20;
/// Most disks or NICs that are read of one VM.
const MAX_DEVICES: usize = 256;

/// What a VM reports of itself.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Answer {
    /// `running`, `paused`..., in small letters.
    pub(super) state: String,
    pub(super) disks: Vec<Disk>,
    /// MAC addresses by tap.
    pub(super) macs: BTreeMap<String, String>,
}

/// Queries a VM for its state and devices. `at` is its socket, and the process that has to listen there.
///
/// # Errors
/// The kernel's error; [`io::ErrorKind::InvalidData`] for a malformed answer.
pub(super) fn query(hypervisor: Hypervisor, at: (&Path, Tid)) -> io::Result<Answer> {
    let deadline = Instant::now() + REQUEST_TIMEOUT;
    if hypervisor == Hypervisor::Firecracker {
        let about = get(at, "/", deadline)?;
        let config = get(at, "/vm/config", deadline)?;
        return Ok(firecracker(&about, &config));
    }
    let info = get(at, "/api/v1/vm.info", deadline)?;
    Ok(cloud_hypervisor(&info))
}

fn get((socket, owner): (&Path, Tid), path: &str, deadline: Instant) -> io::Result<Value> {
    let mut stream = crate::unix_connect::connect(socket, Some(owner))?;
    let request =
        format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\r\n");
    stream.set_write_timeout(Some(time_left(deadline)?))?;
    stream.write_all(request.as_bytes())?;
    let body = read(|more| {
        stream.set_read_timeout(Some(time_left(deadline)?))?;
        stream.read(more)
    })?;
    serde_json::from_slice(&body).map_err(io::Error::other)
}

fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    match left.is_zero() {
        true => Err(io::ErrorKind::TimedOut.into()),
        false => Ok(left),
    }
}

/// Reads the body of an answer; the connection stays open.
fn read(mut receive: impl FnMut(&mut [u8]) -> io::Result<usize>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut more = [0; 4096];
    loop {
        if let Some((head, length)) = head(&bytes)?
            && bytes.len() >= head + length
        {
            return Ok(bytes[head..head + length].to_vec());
        }
        match receive(&mut more)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => bytes.extend_from_slice(&more[..n]),
        }
        if bytes.len() > MAX_ANSWER_BYTES {
            return Err(invalid());
        }
    }
}

fn invalid() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

/// Lengths of the head and the body, once the head is complete. Accepts only status 200.
fn head(bytes: &[u8]) -> io::Result<Option<(usize, usize)>> {
    let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") else {
        return Ok(None);
    };
    let head = std::str::from_utf8(&bytes[..end]).map_err(|_| invalid())?;
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.split(' ').nth(1));
    if status != Some("200") {
        return Err(invalid());
    }
    let length = lines.find_map(|line| {
        let (name, value) = line.split_once(':')?;
        let is_it = name.eq_ignore_ascii_case("content-length");
        is_it.then(|| value.trim().parse::<usize>().ok())?
    });
    let length = length
        .filter(|n| *n <= MAX_ANSWER_BYTES)
        .ok_or_else(invalid)?;
    Ok(Some((end + 4, length)))
}

fn text(value: &Value, key: &str) -> Option<String> {
    value.get(key)?.as_str().map(printable)
}

fn list<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    let list = value.get(key).and_then(Value::as_array);
    list.into_iter().flatten().take(MAX_DEVICES)
}

fn firecracker(about: &Value, config: &Value) -> Answer {
    let disk = |drive: &Value| {
        Some(Disk {
            path: PathBuf::from(text(drive, "path_on_host")?),
            device: text(drive, "drive_id").unwrap_or_default(),
            read_only: drive.get("is_read_only") == Some(&Value::Bool(true)),
            format: Some("raw".to_owned()),
        })
    };
    let mac = |nic: &Value| Some((text(nic, "host_dev_name")?, text(nic, "guest_mac")?));
    Answer {
        state: text(about, "state").unwrap_or_default().to_lowercase(),
        disks: list(config, "drives").filter_map(disk).collect(),
        macs: list(config, "network-interfaces").filter_map(mac).collect(),
    }
}

fn cloud_hypervisor(info: &Value) -> Answer {
    let none = Value::Null;
    let config = info.get("config").unwrap_or(&none);
    // Cloud Hypervisor detects the format from the image; viola never probes images.
    let disk = |disk: &Value| {
        Some(Disk {
            path: PathBuf::from(text(disk, "path")?),
            device: text(disk, "id").unwrap_or_default(),
            read_only: disk.get("readonly") == Some(&Value::Bool(true)),
            format: None,
        })
    };
    let mac = |nic: &Value| Some((text(nic, "tap")?, text(nic, "mac")?));
    Answer {
        state: text(info, "state").unwrap_or_default().to_lowercase(),
        disks: list(config, "disks").filter_map(disk).collect(),
        macs: list(config, "net").filter_map(mac).collect(),
    }
}

/// What answers, to all requests in turn, say of a VM.
#[cfg(any(test, feature = "fuzzing"))]
pub(super) fn answer_of<'a>(
    hypervisor: Hypervisor,
    mut answers: impl Iterator<Item = &'a [u8]>,
) -> io::Result<Answer> {
    let mut next = || -> io::Result<Value> {
        let mut output = answers.next().unwrap_or_default();
        let body = read(|more| output.read(more))?;
        serde_json::from_slice(&body).map_err(io::Error::other)
    };
    Ok(match hypervisor {
        Hypervisor::Firecracker => firecracker(&next()?, &next()?),
        _ => cloud_hypervisor(&next()?),
    })
}
