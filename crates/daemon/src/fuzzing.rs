// SPDX-License-Identifier: Apache-2.0
//! Fuzz targets (`scripts/fuzz.sh`): input on the control socket, configurations, and lines of the libvirt helper. Tests replay the
//! inputs that fuzzers found.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};

use axum::Router;
use viola_proto::Done;

use crate::api::http::{self, Request, Shared};
use crate::testing::{view, vm};
use crate::vms::settings::Settings;
use viola_config::Config;

/// Bytes of an answer that the client reads.
const MAX_ANSWER_BYTES: u64 = 1 << 20;

/// Sends `input` on one connection of the control socket. Panics when the answer is no HTTP or no JSON.
pub fn control_socket(input: &[u8]) {
    let (mut client, server) = UnixStream::pair().expect("sockets");
    server.set_nonblocking(true).expect("a setting");
    // Inputs fit into the socket's buffer, so no second thread is needed.
    client.set_nonblocking(true).expect("a setting");
    let _ = client.write(input);
    client.shutdown(std::net::Shutdown::Write).expect("an end");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let stream = tokio::net::UnixStream::from_std(server).expect("a socket");
        http::serve_connection(stream, router().clone(), Arc::default()).await;
    });
    let mut answer = Vec::new();
    let _ = Read::take(&client, MAX_ANSWER_BYTES).read_to_end(&mut answer);
    if answer.is_empty() {
        return;
    }
    assert!(answer.starts_with(b"HTTP/1."), "{answer:?}");
    let text = String::from_utf8_lossy(&answer);
    // A whole first answer is JSON or metrics, also when it is a refusal.
    let Some((head, rest)) = text.split_once("\r\n\r\n") else {
        return;
    };
    let length = head.lines().find_map(|l| {
        l.strip_prefix("content-length: ")?
            .trim()
            .parse::<usize>()
            .ok()
    });
    let body = length.and_then(|n| rest.get(..n));
    if let Some(body) = body.filter(|_| head.contains("application/json")) {
        let parsed = serde_json::from_str::<serde_json::Value>(body);
        assert!(parsed.is_ok(), "{head}\n{body}");
    }
}

/// A server with two VMs, whose changes apply to settings of its own.
fn router() -> &'static Router {
    static ROUTER: OnceLock<Router> = OnceLock::new();
    ROUTER.get_or_init(|| {
        let (send, requests) = mpsc::sync_channel(4);
        std::thread::spawn(move || {
            requests.into_iter().for_each(answer);
        });
        http::router(Arc::new(Shared::new(view(&["db01", "web"]), send)))
    })
}

fn answer(request: Request) {
    static SETTINGS: Mutex<Option<Settings>> = Mutex::new(None);
    match request {
        Request::Set {
            name,
            mut change,
            reply,
            ..
        } => {
            // The settings are not written to a file.
            change.keep = false;
            let mut settings = SETTINGS.lock().unwrap_or_else(PoisonError::into_inner);
            let settings =
                settings.get_or_insert_with(|| Settings::read(Path::new("/nonexistent")).0);
            let vms = view(&["db01", "web"]).vms.vms;
            let done = match settings.change(&vm("db01", 10, &[&[1]]), &change) {
                Ok(()) => vms
                    .into_iter()
                    .find(|vm| vm.name == name)
                    .ok_or("gone".into()),
                Err(e) => Err(e),
            };
            let refuse = |error: String| {
                assert!(!error.contains('\n'), "{error}");
                let nearest = Vec::new();
                (400, viola_proto::Error { error, nearest })
            };
            let _ = reply.send(done.map_err(refuse));
        }
        Request::Lane { reply, .. } => {
            let error = "it is in no network with VFs".into();
            let nearest = Vec::new();
            let _ = reply.send(Err((404, viola_proto::Error { error, nearest })));
        }
        Request::Pause { reply, .. } => {
            let done = "done".to_owned();
            let _ = reply.send(Ok(Done { done }));
        }
        Request::Publish { reply } => {
            let _ = reply.send(Ok(()));
        }
        Request::Reload | Request::Quit(_) => unreachable!("no client can ask for it"),
    }
}

/// Reads `input` as a configuration. Panics unless it is read, or refused in one sentence that names the file.
pub fn configuration(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    match Config::parse(Path::new("viola.toml"), &text) {
        Ok(config) => {
            let online = "0-3".parse().expect("a list of CPUs");
            let _ = config.check_host(&online);
        }
        Err(e) => {
            let said = e.to_string();
            assert!(said.starts_with("viola.toml"), "{said}");
            let said = viola_cli::error::one_line(&said);
            assert!(!said.is_empty() && said.len() < 2000, "{said}");
        }
    }
}

/// Takes `input` as the output of the process that talks to libvirt. Panics when a domain has no UUID of its own, or the end's
/// cause is not one line.
pub fn libvirt_lines(input: &[u8]) {
    let (why, domains) = crate::host::libvirt::after(input);
    for (uuid, domain) in &domains {
        assert_eq!(*uuid, domain.uuid);
    }
    let lines = input.iter().filter(|b| **b == b'\n').count();
    assert!(lines > 0 || domains.is_empty() && why.is_none());
    if let Some(why) = why {
        assert!(!why.contains(char::is_control), "{why:?}");
    }
}

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    #[test]
    fn the_control_socket_answers_every_input_that_fuzzers_found() {
        super::replay::replay("control_socket", super::control_socket);
    }

    #[test]
    fn every_line_of_libvirts_helper_is_handled_or_ignored() {
        super::replay::replay("libvirt_lines", super::libvirt_lines);
    }

    #[test]
    fn every_configuration_that_fuzzers_found_is_read_or_refused() {
        super::replay::replay("configuration", super::configuration);
    }
}
