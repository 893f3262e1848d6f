// SPDX-License-Identifier: Apache-2.0
//! Queries a VM's HTTP interface, with bounds on time and size: a VM may have taken over its hypervisor.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::monitor;
use crate::thread::Tid;
use crate::vm::{Disk, Hypervisor, printable};

/// Time for one request.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(500);
/// Most bytes of one answer.
const MAX_ANSWER_BYTES: usize = 1 << 20;
/// Most disks or NICs that are read of one VM.
const MAX_DEVICES: usize = 256;

/// What a VM reports of itself.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// `running`, `paused`..., in small letters.
    pub(crate) state: String,
    pub(crate) disks: Vec<Disk>,
    /// MAC addresses by tap.
    pub(crate) macs: BTreeMap<String, String>,
}

/// A page of an HTTP interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Page {
    /// Firecracker's state.
    FirecrackerInstance,
    /// Firecracker's devices.
    FirecrackerConfig,
    /// Cloud Hypervisor's state and devices.
    CloudHypervisorInfo,
}

impl Page {
    fn path(self) -> &'static str {
        match self {
            Self::FirecrackerInstance => "/",
            Self::FirecrackerConfig => "/vm/config",
            Self::CloudHypervisorInfo => "/api/v1/vm.info",
        }
    }

    fn answer(self, body: &Value) -> Answer {
        match self {
            Self::FirecrackerInstance => instance(body),
            Self::FirecrackerConfig => firecracker(body),
            Self::CloudHypervisorInfo => cloud_hypervisor(body),
        }
    }
}

/// Queries a VM for its state and devices. `at` is its socket, and the process that has to listen there.
///
/// # Errors
/// The kernel's error, or that of a malformed answer.
pub(super) fn query(hypervisor: Hypervisor, (socket, owner): (&Path, Tid)) -> io::Result<Answer> {
    let page = |page| monitor::page(socket, owner, page, REQUEST_TIMEOUT);
    if hypervisor == Hypervisor::Firecracker {
        let state = page(Page::FirecrackerInstance)?.state;
        let devices = page(Page::FirecrackerConfig)?;
        return Ok(Answer { state, ..devices });
    }
    page(Page::CloudHypervisorInfo)
}

/// Gets a page on a connection to a VM's interface.
///
/// # Errors
/// The kernel's error; [`io::ErrorKind::InvalidData`] for a malformed answer.
pub(crate) fn get(stream: &mut UnixStream, page: Page) -> io::Result<Answer> {
    let deadline = Instant::now() + REQUEST_TIMEOUT;
    let path = page.path();
    let request =
        format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\r\n");
    stream.set_write_timeout(Some(time_left(deadline)?))?;
    stream.write_all(request.as_bytes())?;
    let body = read(|more| {
        stream.set_read_timeout(Some(time_left(deadline)?))?;
        stream.read(more)
    })?;
    Ok(page.answer(&serde_json::from_slice(&body)?))
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

fn state(value: &Value) -> String {
    text(value, "state").unwrap_or_default().to_lowercase()
}

fn instance(instance: &Value) -> Answer {
    Answer {
        state: state(instance),
        ..Answer::default()
    }
}

fn firecracker(config: &Value) -> Answer {
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
        state: String::new(),
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
        state: state(info),
        disks: list(config, "disks").filter_map(disk).collect(),
        macs: list(config, "net").filter_map(mac).collect(),
    }
}

/// What the answer to a request for this page says of a VM.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn answer_of(page: Page, mut output: &[u8]) -> io::Result<Answer> {
    let body = read(|more| output.read(more))?;
    Ok(page.answer(&serde_json::from_slice(&body)?))
}
