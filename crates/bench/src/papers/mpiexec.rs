// SPDX-License-Identifier: Apache-2.0
//! MPICH's mpiexec on the host. It prints the commands to start in each guest, forwards the ranks' output, and ends the
//! ranks when it ends.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::BorrowedFd;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::harness::spawn;
use crate::harness::tool::first_line;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;

/// Timeout for one run, long enough for 30 ms slices.
pub const RUN_TIMEOUT: Duration = Duration::from_secs(180);
/// Timeout for mpiexec to print the proxies' commands.
const PROXY_TIMEOUT: Duration = Duration::from_secs(20);
/// Interval between two checks for an interrupt.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Events of a run.
pub enum Event {
    /// An output line of the first rank.
    Line(String),
    /// mpiexec closed its output.
    End,
    /// A proxy ended.
    Proxy(Outcome),
}

/// A running mpiexec; drop kills it.
pub struct Mpiexec {
    started: Instant,
    child: Child,
    output: Option<BufReader<ChildStdout>>,
    errors: Option<JoinHandle<String>>,
}

impl Mpiexec {
    /// Starts mpiexec in the guests' network.
    ///
    /// # Errors
    /// The program is missing.
    pub fn start(command: &mut Command, netns: Option<BorrowedFd<'_>>) -> Outcome<Self> {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = spawn::spawn_bound(command, Signal::KILL, netns)
            .map_err(|e| Failure::run(format!("mpiexec: {e}: run scripts/mpi.sh")))?;
        let output = child.stdout.take().map(BufReader::new);
        let errors = child.stderr.take().map(|mut pipe| {
            std::thread::spawn(move || {
                let mut text = Vec::new();
                let _ = pipe.read_to_end(&mut text);
                String::from_utf8_lossy(&text).into_owned()
            })
        });
        Ok(Self {
            started: Instant::now(),
            child,
            output,
            errors,
        })
    }

    /// Arguments of each host's proxy, in the hosts' order.
    ///
    /// # Errors
    /// mpiexec prints another number of commands; the error quotes its output.
    pub fn proxies(&mut self, count: usize) -> Outcome<Vec<Vec<String>>> {
        let mut output = self
            .output
            .take()
            .ok_or_else(|| Failure::run("mpiexec has no output"))?;
        let (launched, tells) = channel();
        // A pipe has no timeout, so a thread reads it. The thread ends with mpiexec.
        std::thread::spawn(move || {
            let mut proxies = Vec::new();
            let mut line = String::new();
            while output.read_line(&mut line).is_ok_and(|n| n > 0) && !is_last(&line) {
                proxies.extend(launch(&line));
                line.clear();
            }
            let _ = launched.send((proxies, output));
        });
        match tells.recv_timeout(PROXY_TIMEOUT) {
            Ok((proxies, output)) if proxies.len() == count => {
                self.output = Some(output);
                Ok(proxies)
            }
            _ => Err(Failure::run(format!(
                "mpiexec did not print the commands for the guests: {}",
                self.log_tail().unwrap_or_else(|| "no output".into())
            ))),
        }
    }

    /// Forwards mpiexec's lines from now on.
    pub fn listen(&mut self, sender: Sender<Event>) {
        if let Some(output) = self.output.take() {
            std::thread::spawn(move || {
                for line in output.lines().map_while(Result::ok) {
                    let _ = sender.send(Event::Line(line));
                }
                let _ = sender.send(Event::End);
            });
        }
    }

    /// Returns all lines once mpiexec and all proxies have ended successfully.
    ///
    /// # Errors
    /// mpiexec or a proxy fails or times out; the error quotes its output.
    pub fn text(&mut self, events: &Receiver<Event>, ranks: usize) -> Outcome<String> {
        let (mut text, mut closed, mut ended) = (String::new(), false, 0);
        while !closed || ended < ranks {
            match events.recv_timeout(POLL_INTERVAL) {
                Ok(Event::Line(line)) => text.extend([line.as_str(), "\n"]),
                Ok(Event::End) => closed = true,
                Ok(Event::Proxy(Ok(()))) => ended += 1,
                // A failing rank ends the others; mpiexec's message comes first.
                Ok(Event::Proxy(Err(failure))) => {
                    return Err(match self.log_tail() {
                        Some(words) => Failure::run(format!("MPI failed: {words}")),
                        None => failure,
                    });
                }
                Err(RecvTimeoutError::Timeout) => interrupt::check()?,
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if self.started.elapsed() > RUN_TIMEOUT {
                return Err(timeout_failure());
            }
        }
        match self.child.wait().map_err(Failure::run)? {
            status if status.success() => Ok(text),
            _ => Err(Failure::run(format!(
                "the MPI benchmark failed: {}",
                self.log_tail()
                    .unwrap_or_else(|| last_line(&text).to_owned())
            ))),
        }
    }

    /// Its standard error, after it has ended.
    fn log_tail(&mut self) -> Option<String> {
        self.end();
        let text = self.errors.take()?.join().ok()?;
        Some(first_line(&text)).filter(|line| !line.is_empty())
    }

    /// Kills it. mpiexec ignores weaker signals while it waits for its proxies.
    pub fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Mpiexec {
    fn drop(&mut self) {
        self.end();
    }
}

/// The error of a run that exceeds [`RUN_TIMEOUT`].
pub fn timeout_failure() -> Failure {
    Failure::run(format!(
        "the MPI benchmark did not end within {} s",
        RUN_TIMEOUT.as_secs()
    ))
}

/// The last line that is not empty.
pub fn last_line(text: &str) -> &str {
    let mut lines = text.lines().rev().map(str::trim);
    lines.find(|line| !line.is_empty()).unwrap_or("none")
}

/// Whether this line follows the last proxy command.
fn is_last(line: &str) -> bool {
    line.trim() == "HYDRA_LAUNCH_END"
}

/// Arguments of a proxy.
fn launch(line: &str) -> Option<Vec<String>> {
    let words = line.strip_prefix("HYDRA_LAUNCH: ")?.split_whitespace();
    Some(words.skip(1).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxy_arguments_are_parsed_from_mpiexecs_output() {
        let line = "HYDRA_LAUNCH: /x/usr/bin/hydra_pmi_proxy --control-port 10.77.0.1:40977 --rmk user --proxy-id 1 \n";
        assert_eq!(
            launch(line).unwrap(),
            [
                "--control-port",
                "10.77.0.1:40977",
                "--rmk",
                "user",
                "--proxy-id",
                "1"
            ]
        );
        assert_eq!(launch("HYDRA_LAUNCH_END\n"), None);
        assert!(is_last("HYDRA_LAUNCH_END\n"));
        assert!(!is_last(line));
    }

    /// A shell script in place of mpiexec that has printed two proxy commands.
    fn launched(script: &str) -> (Mpiexec, Sender<Event>, Receiver<Event>) {
        let launch = "for i in 0 1; do echo HYDRA_LAUNCH: /x/hydra_pmi_proxy --proxy-id $i; done; echo HYDRA_LAUNCH_END";
        let mut mpiexec = started(&format!("{launch}; {script}"));
        let proxies = mpiexec.proxies(2).unwrap();
        assert_eq!(proxies, [["--proxy-id", "0"], ["--proxy-id", "1"]]);
        let (sender, events) = channel();
        mpiexec.listen(sender.clone());
        (mpiexec, sender, events)
    }

    fn sentence(failure: Failure) -> String {
        let (Failure::Run(sentence) | Failure::Usage(sentence)) = failure;
        sentence
    }

    fn started(script: &str) -> Mpiexec {
        Mpiexec::start(Command::new("sh").args(["-c", script]), None).unwrap()
    }

    #[test]
    fn a_run_ends_with_mpiexec_and_all_proxies() {
        let (mut mpiexec, sender, events) = launched("echo one; echo two");
        for _ in 0..2 {
            sender.send(Event::Proxy(Ok(()))).unwrap();
        }
        let text = mpiexec.text(&events, 2).unwrap();
        assert_eq!(text, "one\ntwo\n");
    }

    #[test]
    fn a_failing_rank_ends_the_run_with_mpiexecs_message() {
        let (mut mpiexec, sender, events) =
            launched("echo 'rank 1 is lost' >&2; echo more >&2; exec sleep 60");
        sender.send(Event::Proxy(Ok(()))).unwrap();
        // Its output is complete before any guest can reply.
        std::thread::sleep(POLL_INTERVAL);
        sender
            .send(Event::Proxy(Err(Failure::run("status 1"))))
            .unwrap();
        let failure = mpiexec.text(&events, 2).unwrap_err();
        assert_eq!(sentence(failure), "MPI failed: rank 1 is lost");
        assert!(mpiexec.child.try_wait().unwrap().is_some());
    }

    #[test]
    fn a_failed_benchmark_reports_its_last_line() {
        let (mut mpiexec, sender, events) = launched("echo 'Invalid benchmark name'; echo; exit 3");
        for _ in 0..2 {
            sender.send(Event::Proxy(Ok(()))).unwrap();
        }
        let failure = mpiexec.text(&events, 2).unwrap_err();
        let expected = "the MPI benchmark failed: Invalid benchmark name";
        assert_eq!(sentence(failure), expected);
    }

    #[test]
    fn an_mpiexec_that_cannot_start_reports_why() {
        let mut mpiexec = started("echo 'no such host' >&2; exit 1");
        let failure = mpiexec.proxies(4).unwrap_err();
        let expected = "mpiexec did not print the commands for the guests: no such host";
        assert_eq!(sentence(failure), expected);
    }
}
