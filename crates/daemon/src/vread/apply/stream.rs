// SPDX-License-Identifier: Apache-2.0
//! The byte stream between a reader's worker and the agent in its VM: found, connected, handed over.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use std::os::fd::AsFd;

use viola_host::{Vm, sockets, unix_connect};
use viola_vread::control::{Order, StreamState as State};

use crate::workers::process::Worker;
use viola_cli::error::chain;
use viola_config::{Transport, VmVread};

/// Time between two attempts.
const RETRY: Duration = Duration::from_secs(1);

/// What this side knows of one reader's stream.
#[derive(Debug, Default)]
pub struct Line {
    tried: Option<Instant>,
    why: String,
}

impl Line {
    /// Gives the worker a stream if it has none and there is one to be had; `state` is what the worker says of its
    /// own. The new state, or why the worker is of no use.
    pub fn keep(
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
        let waits = |at: Instant| now.saturating_duration_since(at) < RETRY;
        if self.tried.is_some_and(waits) {
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
        match unix_connect::connect(&path) {
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

    /// Why no blocks go that way, if that is to be told.
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
