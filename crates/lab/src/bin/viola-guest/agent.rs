// SPDX-License-Identifier: Apache-2.0
//! The workload `agent`: the image's viola-agent, on its line to the lab.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crate::{AGENT, AGENT_PORT, RUN, has_ports};

/// Socket on which the agent reports its status.
const STATUS_SOCKET: &str = "/run/viola-agent.sock";

/// Writes the configuration. Returns the command that runs the agent in the foreground.
pub fn prepare(name: &str, config: &str) -> Result<Command, String> {
    let path = format!("{RUN}/{name}.toml");
    let text = |e: std::io::Error| format!("{path}: {e}");
    let channel = if has_ports() { AGENT_PORT } else { AGENT };
    // the DataNodes of most tests are scripts, which answer no requests
    let datanode = match config.contains("datanode = ") {
        true => "",
        false => "datanode = \"none\"\n",
    };
    let whole = format!("channel = \"{channel}\"\n{datanode}{config}");
    fs::write(&path, whole).map_err(text)?;
    let log = fs::File::create(log(name)).map_err(text)?;
    let mut command = Command::new("/usr/bin/viola-agent");
    command
        .args(["--config", &path])
        .stdout(log.try_clone().map_err(text)?)
        .stderr(log);
    Ok(command)
}

/// Waits until the agent answers.
pub fn wait(name: &str, child: &mut Child) -> Result<(), String> {
    let begin = Instant::now();
    while named_blocks().is_none() {
        let ended = !matches!(child.try_wait(), Ok(None));
        if ended || begin.elapsed() > Duration::from_secs(20) {
            let log = fs::read_to_string(log(name)).unwrap_or_default();
            return Err(format!("viola-agent does not run: {}", log.trim()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Number of blocks that the agent has named since its start.
pub fn named_blocks() -> Option<u64> {
    let mut stream = UnixStream::connect(STATUS_SOCKET).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    stream.write_all(b"status\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let status: serde_json::Value = serde_json::from_str(&answer).ok()?;
    status.get("stats")?.get("names")?.as_u64()
}

fn log(name: &str) -> String {
    format!("{RUN}/{name}.log")
}
