// SPDX-License-Identifier: Apache-2.0
//! Starting a lab: in the foreground, or held by a process of its own.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use crate::error::{Error, Result};
use crate::lab::Lab;
use crate::paths::Paths;
use crate::server::serve;
use crate::spec::Spec;

/// How to start a lab.
#[derive(Debug, Clone)]
pub struct Up {
    /// The lab's description.
    pub spec: PathBuf,
    /// Whether this process holds the lab, until a signal or `viola-lab down`.
    pub foreground: bool,
    /// Arguments with which this program calls [`supervise`]; the path of the description follows
    /// them.
    pub supervise: Vec<OsString>,
}

/// Starts a lab and prints each step. In the foreground it returns when the lab has ended, else as
/// soon as all guests are up.
///
/// # Errors
/// [`Error::Spec`], [`Error::AlreadyRunning`], or why the lab cannot start.
pub fn up(options: &Up) -> Result<()> {
    let spec = Spec::load(&options.spec)?;
    if options.foreground {
        let lab = spec.name.clone();
        return hold(&spec, &mut |step| println!("{step}"), || {
            println!("lab `{lab}` is up; Ctrl-C ends it");
            Ok(())
        });
    }
    Paths::find()?;
    let program = std::env::current_exe().map_err(Error::io("find", "this program"))?;
    let failed = || Error::io("start", &program);
    let path = std::path::absolute(&options.spec).map_err(Error::io("find", &options.spec))?;
    let mut command = Command::new(&program);
    command
        .args(&options.supervise)
        .arg(path)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    // SAFETY: only setsid runs between fork and exec.
    unsafe { command.pre_exec(|| Ok(rustix::process::setsid().map(drop)?)) };
    let mut child = command.spawn().map_err(failed())?;
    let steps = child
        .stdout
        .take()
        .ok_or_else(|| Error::Ended(spec.name.clone()))?;
    for line in BufReader::new(steps).lines() {
        let line = line.map_err(failed())?;
        match line.split_once(' ') {
            Some(("step", step)) => println!("{step}"),
            Some(("error", rest)) => {
                let _ = child.wait();
                let (code, sentence) = rest.split_once(' ').unwrap_or(("1", rest));
                return Err(match code {
                    "2" => Error::AlreadyRunning { name: spec.name },
                    _ => Error::Refused(sentence.into()),
                });
            }
            Some(("ready", name)) => {
                println!(
                    "lab `{name}` is up; `viola-lab sh GUEST` opens a shell, `viola-lab down {name}` ends it"
                );
                return Ok(());
            }
            _ => {}
        }
    }
    let _ = child.wait();
    Err(Error::Refused(format!(
        "the supervisor of lab `{}` ended before its guests were up",
        spec.name
    )))
}

/// Holds a lab in this process and reports its steps to the program that started it. Returns when
/// the lab has ended.
///
/// # Errors
/// [`Error::Spec`], [`Error::AlreadyRunning`], or why the lab cannot start.
pub fn supervise(spec: &Path) -> Result<()> {
    // a failed write means that the starting program is gone: start no lab then
    let report = |line: String| -> Result<()> {
        let mut out = std::io::stdout();
        let written = out
            .write_all(format!("{line}\n").as_bytes())
            .and_then(|()| out.flush());
        written.map_err(Error::io("write to", "the starting program"))
    };
    let ended = Spec::load(spec).and_then(|spec| {
        let name = spec.name.clone();
        hold(
            &spec,
            &mut |step| drop(report(format!("step {step}"))),
            || {
                let log = crate::run_folder().join(&name).join("supervisor.log");
                let file = File::create(&log).map_err(Error::io("make", &log))?;
                let _ = rustix::stdio::dup2_stderr(&file);
                report(format!("ready {name}"))?;
                let _ = rustix::stdio::dup2_stdout(&file);
                let _ = std::env::set_current_dir("/");
                Ok(())
            },
        )
    });
    if let Err(error) = &ended {
        let kind = if matches!(error, Error::AlreadyRunning { .. }) {
            2
        } else {
            1
        };
        let _ = report(format!("error {kind} {}", error.full()));
    }
    ended
}

/// Starts the lab, serves its socket, and waits until a signal or a client ends it.
fn hold(
    spec: &Spec,
    progress: &mut dyn FnMut(&str),
    ready: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let (end, ends) = channel();
    watch_signals(end.clone())?;
    let lab = Arc::new(Lab::up_with(spec, &Paths::find()?, progress)?);
    serve(&lab, &end)?;
    ready()?;
    let _ = ends.recv();
    // clients hold the lab while they are served, shells for as long as they are open: end the
    // guests first
    lab.shutdown_guests()?;
    for _ in 0..200 {
        if Arc::strong_count(&lab) == 1 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    match Arc::try_unwrap(lab) {
        Ok(lab) => lab.down(),
        Err(lab) => {
            lab.remove();
            Ok(())
        }
    }
}

/// Turns SIGINT, SIGTERM and SIGHUP into a message.
fn watch_signals(end: Sender<()>) -> Result<()> {
    let failed = |e| Error::io("watch", "signals")(e);
    // SAFETY: the set is initialised before it is used. Threads made later inherit the mask; guests
    // start with an empty one.
    let set = unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            libc::sigaddset(&mut set, signal);
        }
        if libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) != 0 {
            return Err(failed(std::io::Error::last_os_error()));
        }
        set
    };
    let wait = move || {
        let mut signal = 0;
        // SAFETY: the set is initialised.
        while unsafe { libc::sigwait(&set, &mut signal) } == 0 && end.send(()).is_ok() {}
    };
    std::thread::Builder::new()
        .name("viola-lab-sig".into())
        .spawn(wait)
        .map_err(failed)?;
    Ok(())
}
