// SPDX-License-Identifier: Apache-2.0
use super::*;
use crate::testing::view;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc;
use viola_cli::client::{Client, ClientError};
use viola_proto::{Check, ClassSetting, Status, VmList};

/// An HTTP server on its own socket whose control loop is a closure of the test.
struct Served {
    _dir: tempfile::TempDir,
    socket: PathBuf,
}

impl Served {
    fn new(answer: impl Fn(Request) + Send + 'static) -> Self {
        Self::with(router, answer)
    }

    /// The read socket of a control socket at /run/v.sock.
    fn read_only() -> Self {
        Self::with(
            |shared| read_router(shared, FilePath::new("/run/v.sock")),
            no_requests,
        )
    }

    fn with(router: fn(Arc<Shared>) -> Router, answer: impl Fn(Request) + Send + 'static) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("viola.sock");
        let (send, receive) = mpsc::sync_channel(4);
        std::thread::spawn(move || receive.into_iter().for_each(answer));
        let shared = Arc::new(Shared::new(view(&["db01", "web"]), send));
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        listener.set_nonblocking(true).unwrap();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                serve(UnixListener::from_std(listener).unwrap(), router(shared)).await
            });
        });
        Self { _dir: dir, socket }
    }

    fn client(&self) -> Client {
        Client::new(&self.socket)
    }

    fn raw(&self, bytes: &[u8]) -> String {
        let mut s = UnixStream::connect(&self.socket).unwrap();
        s.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        // The server may close the connection before the client has sent all bytes.
        let _ = s.write_all(bytes);
        let _ = s.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = s.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }
}

/// A control loop that gets no request, but for a new view when a test takes long.
fn no_requests(request: Request) {
    match request {
        Request::Publish { reply } => reply.send(Ok(())).unwrap(),
        other => panic!("the loop got a request: {other:?}"),
    }
}

fn refused<T: std::fmt::Debug>(r: Result<T, ClientError>) -> (u16, Error) {
    match r {
        Err(ClientError::Refused { status, answer }) => (status, answer),
        other => panic!("{other:?}"),
    }
}

#[test]
fn get_requests_are_answered_from_the_last_view() {
    let s = Served::new(no_requests);
    let c = s.client();
    assert_eq!(c.get::<VmList>("/vms").unwrap().vms.len(), 2);
    assert_eq!(c.get::<VmReport>("/vms/web").unwrap().id, "uml:web");
    assert_eq!(c.get::<VmReport>("/vms/uml:web").unwrap().name, "web");
    assert_eq!(c.get::<Status>("/status").unwrap().pid, std::process::id());
    assert!(c.get::<Check>("/check").unwrap().advice.is_empty());
}

#[test]
fn a_change_reaches_the_loop_with_the_requesting_user() {
    let s = Served::new(|r| match r {
        Request::Set {
            name,
            change,
            peer,
            reply,
        } => {
            assert_eq!(
                (name.as_str(), change.class),
                ("db 01/ü", Some(ClassSetting::Ls))
            );
            assert_eq!(peer, Peer(Some(rustix::process::getuid().as_raw())));
            reply.send(Ok(view(&["db01"]).vms.vms[0].clone())).unwrap();
        }
        other => panic!("{other:?}"),
    });
    let change = Change {
        class: Some(ClassSetting::Ls),
        ..Change::default()
    };
    let path = format!("/vms/{}", viola_cli::client::segment("db 01/ü"));
    assert_eq!(
        s.client().patch::<VmReport>(&path, &change).unwrap().name,
        "db01"
    );
}

#[test]
fn a_refusal_of_the_loop_reaches_the_client() {
    let s = Served::new(|r| match r {
        Request::Set { reply, .. } => reply.send(Err((400, error("weight: no")))).unwrap(),
        Request::Pause { stop, reply, .. } => reply
            .send(Ok(Done {
                done: format!("stop {stop}"),
            }))
            .unwrap(),
        other => panic!("{other:?}"),
    });
    let change = Change {
        weight: Some(-1),
        ..Change::default()
    };
    assert_eq!(
        refused(s.client().patch::<VmReport>("/vms/db01", &change)),
        (400, error("weight: no"))
    );
    assert_eq!(s.client().post::<Done>("/stop").unwrap().done, "stop true");
    assert_eq!(
        s.client().post::<Done>("/start").unwrap().done,
        "stop false"
    );
}

#[test]
fn a_vm_that_does_not_exist_is_404_with_the_nearest_names() {
    let s = Served::new(no_requests);
    let (status, e) = refused(s.client().get::<VmReport>("/vms/db1"));
    assert_eq!((status, e.nearest), (404, vec!["db01".to_owned()]));
}

#[test]
fn invalid_bodies_are_400_and_too_long_ones_413() {
    let s = Served::new(no_requests);
    for body in [
        "",
        "{",
        "[]",
        "{\"class\":\"fast\"}",
        "{\"clas\":\"ls\"}",
        "{\"weight\":\"5\"}",
        "\u{0}\u{1}",
    ] {
        let text = s.raw(
            format!("PATCH /v1/vms/db01 HTTP/1.1\r\nhost: v\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len())
                .as_bytes(),
        );
        assert!(
            text.starts_with("HTTP/1.1 400 ")
                && text.contains("{\"error\":\"the body is no change"),
            "{body}: {text}"
        );
    }
    let long = format!("{{\"microslice\":\"{}\"}}", "9".repeat(100_000));
    assert_eq!(
        refused(
            s.client()
                .patch::<VmReport>("/vms/db01", &serde_json::json!({ "microslice": long }))
        )
        .0,
        413
    );
}

#[test]
fn a_client_that_closed_its_sending_side_gets_a_late_answer() {
    let s = Served::new(|request| {
        if let Request::Pause { reply, .. } = request {
            std::thread::sleep(Duration::from_millis(200));
            let done = Done {
                done: "late".into(),
            };
            reply.send(Ok(done)).unwrap();
        }
    });
    let text = s.raw(b"POST /v1/stop HTTP/1.1\r\nhost: v\r\nconnection: close\r\n\r\n");
    assert!(text.ends_with("{\"done\":\"late\"}"), "{text}");
}

#[test]
fn other_paths_and_methods_are_refused_in_json() {
    let s = Served::new(no_requests);
    assert_eq!(refused(s.client().get::<Status>("/nothing")).0, 404);
    assert_eq!(refused(s.client().get::<Done>("/stop")).0, 405);
    assert_eq!(refused(s.client().post::<Status>("/status")).0, 405);
    assert_eq!(refused(s.client().get::<VmReport>("/vms/%ff")).0, 400);
}

#[test]
fn garbage_is_refused_and_the_next_request_is_answered() {
    let s = Served::new(no_requests);
    let header = format!(
        "GET /v1/status HTTP/1.1\r\nx: {}\r\n\r\n",
        "y".repeat(1 << 20)
    );
    for bytes in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..],
        b"\0\0\0\0\r\n\r\n",
        b"GET\r\n\r\n",
        header.as_bytes(),
    ] {
        let answer = s.raw(bytes);
        assert!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 4"),
            "{answer}"
        );
        assert!(s.client().get::<Status>("/status").is_ok());
    }
}

#[test]
fn half_a_request_delays_no_other_client_and_times_out() {
    let s = Served::new(no_requests);
    let mut half = UnixStream::connect(&s.socket).unwrap();
    half.write_all(b"GET /v1/status HT").unwrap();
    assert!(s.client().get::<Status>("/status").is_ok());
    half.set_read_timeout(Some(HEAD_TIMEOUT * 3)).unwrap();
    let mut answer = Vec::new();
    half.read_to_end(&mut answer).unwrap();
    assert!(
        answer.is_empty() || answer.starts_with(b"HTTP/1.1 408"),
        "{}",
        String::from_utf8_lossy(&answer)
    );
}

#[test]
fn requests_to_a_loop_that_ended_are_503() {
    let (send, receive) = mpsc::sync_channel(1);
    drop(receive);
    let shared = Shared::new(view(&[]), send);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let answer = runtime.block_on(shared.ask(|reply| Request::Pause {
        stop: true,
        peer: Peer(None),
        reply,
    }));
    assert_eq!(answer.unwrap_err().0, 503);
}

#[test]
fn requests_to_a_full_queue_are_503_at_once() {
    let (send, _receive) = mpsc::sync_channel(1);
    let shared = Shared::new(view(&[]), send);
    shared.send(Request::Reload);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let answer = runtime.block_on(shared.ask(|reply| Request::Pause {
        stop: true,
        peer: Peer(None),
        reply,
    }));
    assert_eq!(
        answer.unwrap_err(),
        (503, error("the daemon is busy; try again"))
    );
}

#[test]
fn the_read_socket_answers_get_requests() {
    let s = Served::read_only();
    let c = s.client();
    assert_eq!(c.get::<VmList>("/vms").unwrap().vms.len(), 2);
    assert_eq!(c.get::<VmReport>("/vms/web").unwrap().id, "uml:web");
    assert_eq!(c.get::<Status>("/status").unwrap().pid, std::process::id());
    assert!(c.get::<Check>("/check").unwrap().advice.is_empty());
    for path in ["/events", "/vread", "/pipes", "/lanes"] {
        assert!(c.get::<serde_json::Value>(path).is_ok(), "{path}");
    }
    let metrics = s.raw(b"GET /metrics HTTP/1.0\r\n\r\n");
    assert!(metrics.contains("viola_domain_info"), "{metrics}");
    assert_eq!(refused(c.get::<Status>("/nothing")).0, 404);
    assert_eq!(refused(c.get::<VmReport>("/vms/nobody")).0, 404);
    let head = s.raw(b"HEAD /v1/status HTTP/1.0\r\n\r\n");
    assert!(head.starts_with("HTTP/1.0 200"), "{head}");
}

#[test]
fn the_read_socket_refuses_every_change_and_names_the_control_socket() {
    let s = Served::read_only();
    let c = s.client();
    let sentence =
        "this socket only answers GET requests; send changes to the control socket, /run/v.sock";
    let change = Change {
        class: Some(ClassSetting::Ls),
        ..Change::default()
    };
    let refusals = [
        refused(c.patch::<VmReport>("/vms/db01", &change)),
        refused(c.patch::<VmReport>("/lanes/db01", &serde_json::json!({"lane": "never"}))),
        refused(c.patch::<VmReport>("/vms/db01", &serde_json::json!("9".repeat(100_000)))),
        refused(c.post::<Done>("/stop")),
        refused(c.post::<Done>("/start")),
        refused(c.post::<Done>("/status")),
        refused(c.post::<Done>("/of-a-later-version")),
    ];
    for refusal in refusals {
        assert_eq!(refusal, (403, error(sentence)));
    }
    for method in ["PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "X"] {
        for path in ["/v1/vms/db01", "/v1/stop", "/metrics"] {
            let text = s.raw(format!("{method} {path} HTTP/1.0\r\n\r\n").as_bytes());
            assert!(
                text.starts_with("HTTP/1.0 403") && text.contains(sentence),
                "{method} {path}: {text}"
            );
        }
    }
}

#[test]
fn silent_clients_of_the_read_socket_keep_no_place() {
    let s = Served::read_only();
    let silent: Vec<UnixStream> = (0..MAX_CONNECTIONS * 3)
        .map(|_| UnixStream::connect(&s.socket).unwrap())
        .collect();
    assert!(s.client().get::<Status>("/status").is_ok());
    drop(silent);
}

#[test]
fn a_view_is_built_for_a_client_and_not_without_one() {
    let (send, receive) = mpsc::sync_channel(4);
    let shared = Arc::new(Shared::new(view(&["old"]), send));
    let control_loop = shared.clone();
    let built = std::thread::spawn(move || {
        let mut built = 0;
        for request in receive {
            match request {
                Request::Publish { reply } => {
                    if !control_loop.is_fresh() {
                        control_loop.publish(view(&["new"]));
                        built += 1;
                    }
                    reply.send(Ok(())).unwrap();
                }
                Request::Quit(_) => return built,
                other => panic!("{other:?}"),
            }
        }
        unreachable!("the test says when it is over")
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let name = || runtime.block_on(shared.view()).vms.vms[0].name.clone();
    assert!(!shared.is_fresh(), "nothing was measured yet");
    for _ in 0..3 {
        assert_eq!(name(), "new");
    }
    shared.send(Request::Quit("test"));
    let built = built.join().unwrap();
    // One, or more on a machine that takes half a second between two requests.
    assert!((1..=3).contains(&built), "{built}");

    // A loop that is busy or gone holds up nobody for long, and the last view is there.
    std::thread::sleep(MAX_VIEW_AGE);
    assert_eq!(name(), "new");
}
