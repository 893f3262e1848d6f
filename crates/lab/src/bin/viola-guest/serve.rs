// SPDX-License-Identifier: Apache-2.0
//! The server of the command channel.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command as Process, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use rustix::termios::{
    OptionalActions, Winsize, isatty, tcdrain, tcgetattr, tcsetattr, tcsetwinsize,
};
use serde_json::{Value, json};
use viola_lab::set_policy;
use viola_lab::wire::{Command, Reply, Request, Stat, Workload};

use crate::counters::Counters;
use crate::exec::exec;
use crate::{CHANNEL, CHANNEL_PORT, SHELL, agent, apache, halt, has_ports, nginx};

pub fn run() -> Result<(), String> {
    let channel = if has_ports() { CHANNEL_PORT } else { CHANNEL };
    let text = |e: std::io::Error| format!("{channel}: {e}");
    let tty = File::options()
        .read(true)
        .write(true)
        .open(channel)
        .map_err(text)?;
    if isatty(&tty) {
        let mut modes = tcgetattr(&tty).map_err(|e| text(e.into()))?;
        modes.make_raw();
        tcsetattr(&tty, OptionalActions::Now, &modes).map_err(|e| text(e.into()))?;
    }
    let server = Arc::new(Server {
        out: Mutex::new(tty.try_clone().map_err(text)?),
        workloads: Mutex::default(),
    });
    server.send(&Reply {
        event: Some("up".into()),
        ..Reply::default()
    });
    for line in BufReader::new(tty).lines() {
        let line = line.map_err(text)?;
        if line.is_empty() {
            continue; // the lab wakes this guest by it
        }
        let server = Arc::clone(&server);
        match serde_json::from_str::<Request>(&line) {
            Ok(request) if matches!(request.command, Command::Ping) => {
                server.answer(request.id, Ok(Value::Null))
            }
            Ok(request) => {
                std::thread::spawn(move || {
                    let result = server.run(request.id, request.command);
                    server.answer(request.id, result);
                });
            }
            Err(error) => {
                let id = serde_json::from_str::<Reply>(&line)
                    .map(|any| any.id)
                    .unwrap_or(0);
                server.answer(id, Err(format!("the request is not valid: {error}")));
            }
        }
    }
    Ok(())
}

/// A running workload.
struct Running {
    workload: Workload,
    child: Child,
    counters: Counters,
    since: Instant,
}

struct Server {
    out: Mutex<File>,
    workloads: Mutex<HashMap<String, Running>>,
}

impl Server {
    fn send(&self, reply: &Reply) {
        let mut line = serde_json::to_string(reply).unwrap_or_default();
        line.push('\n');
        if let Ok(mut out) = self.out.lock() {
            let _ = out.write_all(line.as_bytes());
        }
    }

    fn answer(&self, id: u64, result: Result<Value, String>) {
        self.send(&match result {
            Ok(value) => Reply {
                id,
                ok: Some(value),
                ..Reply::default()
            },
            Err(sentence) => Reply {
                id,
                error: Some(sentence),
                ..Reply::default()
            },
        });
    }

    fn run(&self, id: u64, command: Command) -> Result<Value, String> {
        match command {
            Command::Ping => Ok(Value::Null),
            Command::Exec {
                argv,
                timeout_ms,
                stdin,
            } => value(&exec(&argv, timeout_ms, stdin)?),
            Command::Start { name, workload } => self.start(name, workload).map(|()| Value::Null),
            Command::Stop { name } => value(&self.stop(&name)?),
            Command::Stat { name } => {
                let mut workloads = self.workloads()?;
                let work = workloads.get_mut(&name).ok_or_else(|| no_workload(&name))?;
                value(&work.stat())
            }
            Command::List => {
                let workloads = self.workloads()?;
                let mut names: Vec<&String> = workloads.keys().collect();
                names.sort();
                Ok(json!(names))
            }
            Command::Winsize { rows, cols } => {
                let tty = File::open(SHELL).map_err(|e| format!("{SHELL}: {e}"))?;
                let size = Winsize {
                    ws_row: rows,
                    ws_col: cols,
                    ws_xpixel: 0,
                    ws_ypixel: 0,
                };
                tcsetwinsize(&tty, size).map_err(|e| format!("{SHELL}: {e}"))?;
                Ok(Value::Null)
            }
            Command::Shutdown => self.end(id, halt::power_off),
            Command::Reboot => self.end(id, halt::restart),
        }
    }

    fn workloads(&self) -> Result<std::sync::MutexGuard<'_, HashMap<String, Running>>, String> {
        self.workloads
            .lock()
            .map_err(|_| "the workload table is broken".to_owned())
    }

    fn end(&self, id: u64, how: fn()) -> Result<Value, String> {
        self.answer(id, Ok(Value::Null));
        if let Ok(out) = self.out.lock() {
            let _ = tcdrain(&*out);
        }
        how();
        Err("the guest did not go down".into())
    }

    fn start(&self, name: String, workload: Workload) -> Result<(), String> {
        workload.check()?;
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if name.is_empty() || name.len() > 32 || !name.chars().all(plain) {
            return Err(format!(
                "workload name `{name}` must be 1 to 32 letters, digits, - or _"
            ));
        }
        let mut workloads = self.workloads()?;
        if workloads.contains_key(&name) {
            return Err(format!(
                "a workload `{name}` runs already; stop it or take another name"
            ));
        }
        let failed = |e: std::io::Error| format!("starting {}: {e}", workload.kind());
        let counters = Counters::open(&name, true).map_err(failed)?;
        let mut command = match &workload {
            Workload::Nginx { port, sizes_kib } => nginx::prepare(&name, *port, sizes_kib)?,
            Workload::Apache { port, sizes_kib } => apache::prepare(&name, *port, sizes_kib)?,
            Workload::Agent { config } => agent::prepare(&name, config)?,
            _ => {
                let json = serde_json::to_string(&workload).map_err(|e| e.to_string())?;
                let mut command = Process::new("/init");
                command
                    .args(["work", &name, &json])
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped());
                command
            }
        };
        if workload.is_server() {
            // SAFETY: only a system call is made between fork and exec.
            unsafe { command.pre_exec(|| set_policy(libc::SCHED_FIFO, 1)) };
        }
        let child = command
            .stdin(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let mut running = Running {
            workload,
            child,
            counters,
            since: Instant::now(),
        };
        match running.wait_ready(&name) {
            Ok(()) => {
                workloads.insert(name, running);
                Ok(())
            }
            Err(sentence) => {
                running.kill();
                Err(sentence)
            }
        }
    }

    fn stop(&self, name: &str) -> Result<Stat, String> {
        let mut work = self
            .workloads()?
            .remove(name)
            .ok_or_else(|| no_workload(name))?;
        let last = work.stat();
        work.kill();
        let _ = std::fs::remove_file(Counters::path(name));
        Ok(last)
    }
}

fn no_workload(name: &str) -> String {
    format!("no workload `{name}` runs here")
}

fn value(result: &impl serde::Serialize) -> Result<Value, String> {
    serde_json::to_value(result).map_err(|e| e.to_string())
}

impl Running {
    fn wait_ready(&mut self, name: &str) -> Result<(), String> {
        if let Workload::Nginx { port, .. } = self.workload {
            return nginx::wait(name, port);
        }
        if let Workload::Apache { port, .. } = self.workload {
            return apache::wait(name, port);
        }
        if let Workload::Agent { .. } = self.workload {
            return agent::wait(name, &mut self.child);
        }
        let mut line = String::new();
        if let Some(out) = self.child.stdout.take() {
            let _ = BufReader::new(out).read_line(&mut line);
        }
        if line == "ready\n" {
            return Ok(());
        }
        let mut why = String::new();
        if let Some(mut err) = self.child.stderr.take() {
            let _ = std::io::Read::read_to_string(&mut err, &mut why);
        }
        Err(why.trim().trim_start_matches("viola-guest: ").to_owned())
    }

    fn stat(&mut self) -> Stat {
        let (mut units, bytes) = self.counters.total();
        if let Workload::Nginx { port, .. } = self.workload {
            units = nginx::requests(port).unwrap_or(0);
        }
        if let Workload::Agent { .. } = self.workload {
            units = agent::named_blocks().unwrap_or(0);
        }
        let (alive, ticks) = group(self.child.id());
        Stat {
            kind: self.workload.kind().into(),
            units,
            bytes,
            cpu_ms: ticks * 1000 / rustix::param::clock_ticks_per_second(),
            up_ms: u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX),
            alive,
        }
    }

    fn kill(&mut self) {
        let pid = Pid::from_child(&self.child);
        if matches!(
            self.workload,
            Workload::Nginx { .. } | Workload::Apache { .. } | Workload::Agent { .. }
        ) {
            let _ = kill_process_group(pid, Signal::TERM);
            for _ in 0..50 {
                if matches!(self.child.try_wait(), Ok(Some(_))) {
                    break;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        let _ = kill_process_group(pid, Signal::KILL);
        let _ = self.child.wait();
    }
}

/// Number of living processes of a process group, and their CPU time in clock ticks, including that
/// of ended children.
fn group(leader: u32) -> (u32, u64) {
    let (mut alive, mut ticks) = (0, 0);
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        let Some((_, rest)) = stat.rsplit_once(") ") else {
            continue;
        };
        let fields: Vec<&str> = rest.split(' ').collect();
        let number = |index: usize| {
            fields
                .get(index)
                .and_then(|f| f.parse::<u64>().ok())
                .unwrap_or(0)
        };
        if number(2) == u64::from(leader) {
            ticks += (11..=14).map(number).sum::<u64>();
            alive += u32::from(fields.first() != Some(&"Z"));
        }
    }
    (alive, ticks)
}
