// SPDX-License-Identifier: Apache-2.0
//! Queries a VM's state, threads and disks over QMP.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::message::list;
use super::qmp::{ANSWER_TIMEOUT, Connection, QmpError, QmpFailure, SESSION_TIMEOUT};
use crate::monitor::{Request, Session};
use crate::thread::Tid;
use crate::vm::{Disk, printable};

/// What QEMU reports of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QemuState {
    /// `-name guest=`, when QEMU has one.
    pub name: Option<String>,
    /// Run state: `running`, `paused`, `prelaunch`...
    pub status: String,
    /// vCPU index, and thread number in QEMU's PID namespace.
    pub vcpus: Vec<(u32, Tid)>,
    /// Thread numbers of iothreads in QEMU's PID namespace.
    pub iothreads: Vec<Tid>,
    /// Disks with a medium in them.
    pub disks: Vec<Disk>,
}

/// Queries the QMP server at `reach`, a path that this program can open and at which process `owner` has to listen. `vm` and
/// `socket` are names for the error.
///
/// # Errors
/// [`QmpError`] after at most two seconds.
pub(super) fn query(
    vm: &str,
    socket: &Path,
    reach: &Path,
    owner: Tid,
) -> Result<QemuState, QmpError> {
    let answer = Session::open(reach, Some(owner), ANSWER_TIMEOUT)
        .and_then(|mut session| session.ask(&Request::State, SESSION_TIMEOUT));
    answer.map_err(|cause| QmpError {
        vm: vm.to_owned(),
        socket: socket.to_owned(),
        cause,
    })
}

/// Runs the queries on a connection.
pub(crate) fn query_all(connection: &mut Connection) -> Result<QemuState, QmpFailure> {
    let name = connection.command("query-name")?;
    let status = connection.command("query-status")?;
    let cpus = connection.command("query-cpus-fast")?;
    let iothreads = connection.command("query-iothreads")?;
    let blocks = connection.command("query-block")?;
    Ok(QemuState {
        name: name["name"].as_str().map(printable),
        status: text(&status, "status")?,
        vcpus: list("query-cpus-fast", &cpus)?
            .iter()
            .map(|cpu| Ok((number(cpu, "cpu-index")?, number(cpu, "thread-id")?)))
            .collect::<Result<_, QmpFailure>>()?,
        iothreads: list("query-iothreads", &iothreads)?
            .iter()
            .map(|thread| number(thread, "thread-id"))
            .collect::<Result<_, QmpFailure>>()?,
        disks: list("query-block", &blocks)?
            .iter()
            .filter_map(disk)
            .collect(),
    })
}

fn number(value: &Value, key: &str) -> Result<u32, QmpFailure> {
    value[key]
        .as_u64()
        .and_then(|n| u32::try_from(n).ok())
        .ok_or_else(|| QmpFailure::Malformed(format!("{key} is missing or no number")))
}

fn text(value: &Value, key: &str) -> Result<String, QmpFailure> {
    value[key]
        .as_str()
        .map(printable)
        .ok_or_else(|| QmpFailure::Malformed(format!("{key} is missing or no text")))
}

/// One item of `query-block`; `None` without a medium and for firmware.
fn disk(block: &Value) -> Option<Disk> {
    let inserted = &block["inserted"];
    let path = inserted["file"].as_str()?;
    let qdev = block["qdev"].as_str().unwrap_or("");
    let device = block["device"].as_str().unwrap_or("");
    if device.starts_with("pflash") || qdev.contains("flash") {
        return None;
    }
    let node = inserted["node-name"].as_str().unwrap_or("");
    let name = [device, qdev, node].into_iter().find(|n| !n.is_empty())?;
    Some(Disk {
        path: PathBuf::from(path),
        device: printable(name),
        read_only: inserted["ro"].as_bool().unwrap_or(false),
        format: inserted["drv"].as_str().map(printable),
    })
}

#[cfg(test)]
mod tests {
    use super::super::message::MAX_LINE_BYTES;
    use super::*;
    use serde_json::json;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;
    use std::thread;

    const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": []}}"#;

    /// What `ask` says to a server that sends `answer` and then waits for the client to go.
    fn ask_server(answer: Vec<u8>) -> Result<QemuState, QmpError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.write_all(&answer);
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let result = query("web", Path::new("/run/web.qmp"), &path, std::process::id());
        server.join().unwrap();
        result
    }

    fn cause_of(answer: &str) -> String {
        let error = ask_server(answer.into()).unwrap_err().to_string();
        let rest = error
            .strip_prefix("web: QMP socket /run/web.qmp: ")
            .unwrap();
        rest.to_owned()
    }

    #[test]
    fn a_malformed_answer_is_named_with_vm_and_socket() {
        assert!(cause_of("SSH-2.0-OpenSSH\r\n").contains("does not speak QMP"));
        assert!(cause_of("{}\n").contains("does not speak QMP"));
        assert!(cause_of("{\"return\": {}}\n").contains("not a greeting"));
        assert!(
            cause_of(&format!("{GREETING}\n{{\"return\": {{}}, \"id\": 9}}\n"))
                .contains("another command than")
        );
    }

    #[test]
    fn a_line_without_end_is_cut_off() {
        assert!(cause_of(&"x".repeat(MAX_LINE_BYTES + 20_000)).contains("more than"));
    }

    #[test]
    fn silence_ends_with_a_timeout() {
        assert!(cause_of("").contains("no answer within 500 ms"));
        let flood = format!("{GREETING}\n{}", "{\"event\": \"X\"}\n".repeat(1000));
        assert!(cause_of(&flood).contains("no answer within 500 ms"));
    }

    #[test]
    fn a_refused_command_has_qemus_reason() {
        let refusal =
            r#"{"error": {"class": "CommandNotFound", "desc": "no such thing"}, "id": 1}"#;
        assert!(
            cause_of(&format!("{GREETING}\n{refusal}\n"))
                .contains("qmp_capabilities: no such thing")
        );
    }

    #[test]
    fn an_answer_of_another_shape_is_refused() {
        let returns = |cpus: &str| {
            let values = ["{}", "{}", r#"{"status": "running"}"#, cpus, "[]", "[]"];
            let lines: Vec<String> = values
                .iter()
                .enumerate()
                .map(|(i, v)| format!("{{\"return\": {v}, \"id\": {}}}", i + 1))
                .collect();
            format!("{GREETING}\n{}\n", lines.join("\n"))
        };
        assert!(cause_of(&returns("{}")).contains("no list"));
        assert!(cause_of(&returns(r#"[{"cpu-index": -1, "thread-id": 5}]"#)).contains("cpu-index"));
        assert!(cause_of(&returns(r#"[{"cpu-index": 0}]"#)).contains("thread-id"));
        let answer = ask_server(returns(r#"[{"cpu-index": 0, "thread-id": 5}]"#).into()).unwrap();
        assert_eq!(
            (answer.vcpus, answer.status.as_str()),
            (vec![(0, 5)], "running")
        );
    }

    #[test]
    fn a_socket_without_a_server_fails_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let own = std::process::id();
        let missing = query("web", &path, &path, own).unwrap_err();
        assert!(matches!(missing.cause, QmpFailure::Io(_)), "{missing}");
        drop(UnixListener::bind(&path).unwrap());
        let refused = query("web", &path, &path, own).unwrap_err();
        assert!(matches!(refused.cause, QmpFailure::Io(_)), "{refused}");
    }

    #[test]
    fn firmware_and_empty_drives_are_no_disks() {
        let flash =
            json!({"device": "pflash0", "inserted": {"file": "/fw", "ro": true, "drv": "raw"}});
        let empty = json!({"device": "cd0", "qdev": "/machine/x"});
        let node = json!({"device": "", "qdev": "/machine/peripheral/virtio-disk0/virtio-backend",
            "inserted": {"file": "/a.qcow2", "ro": false, "drv": "qcow2"}});
        assert_eq!(disk(&flash), None);
        assert_eq!(disk(&empty), None);
        assert_eq!(disk(&node).unwrap().path, Path::new("/a.qcow2"));
    }
}
