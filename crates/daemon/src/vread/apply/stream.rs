// SPDX-License-Identifier: Apache-2.0
//! Connects the byte stream between the agent in a reading VM and the reader's worker, for VMs without virtiofs.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use std::os::fd::AsFd;

use viola_host::{Vm, sockets, unix_connect};
use viola_vread::control::{Order, StreamState as State};

use crate::workers::process::Worker;
use viola_cli::error::chain;
use viola_config::{Transport, VmVread};

/// The daemon connects at most this often.
const RECONNECT_INTERVAL: Duration = Duration::from_secs(1);

/// The byte stream of one reader.
#[derive(Debug, Default)]
pub struct Stream {
    tried: Option<Instant>,
    why: String,
}

impl Stream {
    /// Gives the worker a stream if it has none and the VM has a port for one. `state` is the worker's state of its stream; returns the
    /// new one.
    ///
    /// # Errors
    /// Why the worker cannot be used.
    pub fn connect(
        &mut self,
        now: Instant,
        worker: &Worker,
        state: State,
        config: &VmVread,
        vm: Option<&Vm>,
    ) -> Result<State, String> {
        if config.transport == Transport::Virtiofs {
            self.why.clear();
            return Ok(state);
        }
        match state {
            State::NoStream => {}
            State::Silent => {
                self.why = "no agent answers at its port".into();
                return Ok(state);
            }
            State::Connected => {
                self.why.clear();
                return Ok(state);
            }
        }
        let must_wait = |at: Instant| now.saturating_duration_since(at) < RECONNECT_INTERVAL;
        if self.tried.is_some_and(must_wait) {
            return Ok(state);
        }
        self.tried = Some(now);
        let path = match find(config, vm) {
            Ok(Some(path)) => path,
            Ok(None) => {
                self.why = match (config.transport, vm) {
                    (Transport::Stream, None) => "the VM does not run".into(),
                    (Transport::Stream, Some(_)) => {
                        format!("the VM has no port {}", sockets::READ_PORT)
                    }
                    _ => String::new(),
                };
                return Ok(state);
            }
            Err(why) => {
                self.why = why;
                return Ok(state);
            }
        };
        let owner = vm.filter(|_| config.stream.is_none()).map(|vm| vm.pid);
        match unix_connect::connect(&path, owner) {
            Ok(stream) => {
                worker
                    .order(&Order::Stream, &[stream.as_fd()])
                    .map_err(|e| chain(&e))?;
                Ok(State::Silent)
            }
            Err(e) => {
                self.why = format!("its port {}: {e}", path.display());
                Ok(state)
            }
        }
    }

    /// Why no stream is connected, if one should be.
    pub fn why(&self) -> &str {
        &self.why
    }
}

fn find(config: &VmVread, vm: Option<&Vm>) -> Result<Option<PathBuf>, String> {
    match (&config.stream, vm) {
        (Some(path), _) => Ok(Some(path.clone())),
        (None, Some(vm)) => sockets::port_socket(vm, sockets::READ_PORT).map_err(|e| e.one_line()),
        (None, None) => Ok(None),
    }
}
