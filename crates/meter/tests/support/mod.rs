// SPDX-License-Identifier: Apache-2.0
//! Processes that stand for vCPUs.
#![allow(dead_code, clippy::unwrap_used)]

pub mod netns;

use std::process::{Child, Command};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// The core on which the processes run.
pub const CORE: u32 = 1;

/// A shell on [`CORE`], ended when dropped, and by the kernel when the test is killed.
pub struct Process(Child);

impl Process {
    pub fn start(script: &str) -> Self {
        let core = CORE.to_string();
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "taskset", "-c", &core]);
        command.args(["sh", "-c", script]);
        Self(command.spawn().unwrap())
    }

    pub fn tid(&self) -> i32 {
        self.0.id() as i32
    }

    pub fn cpu_ns(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/schedstat", self.0.id())).unwrap();
        text.split(' ').next().unwrap().parse().unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.tid()).unwrap(), signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub const SPIN: &str = "while :; do :; done";

pub fn nap(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms));
}
