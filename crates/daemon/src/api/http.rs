// SPDX-License-Identifier: Apache-2.0
//! Routes requests, and serves connections on a thread of its own. The server answers GET requests
//! from a view of the control loop's state. A view that is old is replaced when somebody asks, so a daemon that nobody asks
//! builds none. Requests to the control loop pass a bounded queue, so a client cannot delay the loop. The read socket has no
//! route that changes anything.

use std::collections::VecDeque;
use std::path::Path as FilePath;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{DefaultBodyLimit, Extension, Path, State};
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, patch, post};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use viola_proto::lanes::{LaneChange, Nic};
use viola_proto::{Change, Done, Error, VmReport};

use crate::api::metrics;
use crate::api::view::View;
use crate::vms::find;
use viola_cli::log;

/// Largest body of a request.
const MAX_BODY_BYTES: usize = 64 << 10;
/// Largest head of a request.
const MAX_HEAD_BYTES: usize = 16 << 10;
/// A client has to send the head of a request within this time.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// A connection lasts at most this long.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(30);
/// The control loop has to answer within this time. Starting slots takes longest.
const LOOP_REPLY_TIMEOUT: Duration = Duration::from_secs(8);
/// A `GET` is answered from the last view while that is younger than this, so clients cause at most two views a second.
pub(crate) const MAX_VIEW_AGE: Duration = Duration::from_millis(500);
/// A `GET` waits so long for a new view, and gets the last one if the loop is busy for longer.
const VIEW_TIMEOUT: Duration = Duration::from_secs(1);
/// Connections served at a time; see [`make_room`].
const MAX_CONNECTIONS: usize = 64;
/// A connection with a request keeps its place for this time, which is longer than [`LOOP_REPLY_TIMEOUT`].
const MIN_CONNECTION_TIME: Duration = Duration::from_secs(10);

/// The uid of the user who sent a request, by SO_PEERCRED; `None` when it is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer(pub Option<u32>);

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(0) => f.write_str("root"),
            Some(uid) => write!(f, "user {uid}"),
            None => f.write_str("an unknown user"),
        }
    }
}

/// HTTP status and body of a refusal.
pub type Refusal = (u16, Error);

/// Where the control loop sends its answer.
pub type Reply<T> = oneshot::Sender<Result<T, Refusal>>;

/// A request to the control loop.
#[derive(Debug)]
pub enum Request {
    /// Change the settings of a VM.
    Set {
        /// Name or identity.
        name: String,
        /// What to change.
        change: Change,
        /// The client.
        peer: Peer,
        /// Where the answer goes.
        reply: Reply<VmReport>,
    },
    /// Change whether a guest may have a VF.
    Lane {
        /// Name or identity.
        name: String,
        /// What to change.
        change: LaneChange,
        /// The client.
        peer: Peer,
        /// Where the answer goes.
        reply: Reply<Nic>,
    },
    /// Put everything back until a start, or start again.
    Pause {
        /// `true` to put everything back, `false` to start again.
        stop: bool,
        /// The client.
        peer: Peer,
        /// Where the answer goes.
        reply: Reply<Done>,
    },
    /// Publish a new view, unless the last one is young.
    Publish {
        /// Tells that it is there.
        reply: Reply<()>,
    },
    /// Read the configuration again.
    Reload,
    /// Put everything back and exit, for the signal of this name.
    Quit(&'static str),
}

/// What server and control loop share.
#[derive(Debug)]
pub struct Shared {
    /// The last view, and when the control loop published it; `None` for the first one, from before its first turn.
    view: Mutex<(Option<Instant>, Arc<View>)>,
    requests: SyncSender<Request>,
}

impl Shared {
    /// The first view, and the queue of requests.
    pub fn new(view: View, requests: SyncSender<Request>) -> Self {
        Self {
            view: Mutex::new((None, Arc::new(view))),
            requests,
        }
    }

    /// Replaces the view that GET requests are answered from.
    pub fn publish(&self, view: View) {
        *self
            .view
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner) =
            (Some(Instant::now()), Arc::new(view));
    }

    /// The last view, and whether it is younger than [`MAX_VIEW_AGE`].
    fn last_view(&self) -> (bool, Arc<View>) {
        let last = self
            .view
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let is_young = last.0.is_some_and(|at| at.elapsed() < MAX_VIEW_AGE);
        (is_young, last.1.clone())
    }

    /// Whether the last view is young enough for all who ask now.
    pub fn is_fresh(&self) -> bool {
        self.last_view().0
    }

    /// A view for a `GET`: a young one, unless the control loop is busy.
    async fn view(&self) -> Arc<View> {
        let (is_fresh, view) = self.last_view();
        if is_fresh {
            return view;
        }
        let published = self.ask(|reply| Request::Publish { reply });
        // Without an answer the last view is the best there is.
        let _ = tokio::time::timeout(VIEW_TIMEOUT, published).await;
        self.last_view().1
    }

    /// Sends a request to the control loop, and waits while the queue is full.
    pub fn send(&self, request: Request) {
        // The loop ends only just before the process does.
        let _ = self.requests.send(request);
    }

    async fn ask<T>(&self, request: impl FnOnce(Reply<T>) -> Request) -> Result<T, Refusal> {
        let busy = || (503, error("the daemon is busy; try again"));
        let (reply, answer) = oneshot::channel();
        self.requests
            .try_send(request(reply))
            .map_err(|e| match e {
                TrySendError::Full(_) => busy(),
                TrySendError::Disconnected(_) => (503, error("the daemon is about to end")),
            })?;
        match tokio::time::timeout(LOOP_REPLY_TIMEOUT, answer).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err((503, error("the daemon is about to end"))),
            Err(_) => Err(busy()),
        }
    }
}

/// A refusal in one sentence.
pub fn refusal(status: u16, sentence: impl Into<String>) -> Refusal {
    (status, error(sentence))
}

fn error(sentence: impl Into<String>) -> Error {
    Error {
        error: sentence.into(),
        nearest: Vec::new(),
    }
}

/// A value or a refusal, as JSON.
struct Answer<T>(Result<T, Refusal>);

impl<T: Serialize> IntoResponse for Answer<T> {
    fn into_response(self) -> Response {
        let (status, body) = match &self.0 {
            Ok(value) => (200, serde_json::to_vec(value)),
            Err((status, e)) => (*status, serde_json::to_vec(e)),
        };
        match (StatusCode::from_u16(status), body) {
            (Ok(status), Ok(body)) => {
                (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
            }
            _ => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    }
}

type Server = State<Arc<Shared>>;

/// The routes of the control socket: all.
pub fn router(shared: Arc<Shared>) -> Router {
    let changing = Router::new()
        .route(
            "/v1/vms/{name}",
            changes(|name, change, peer, reply| Request::Set {
                name,
                change,
                peer,
                reply,
            }),
        )
        .route(
            "/v1/lanes/{name}",
            changes(|name, change, peer, reply| Request::Lane {
                name,
                change,
                peer,
                reply,
            }),
        )
        .route(
            "/v1/stop",
            post(async |s: Server, Extension(peer): Extension<Peer>| pause(&s, true, peer).await),
        )
        .route(
            "/v1/start",
            post(async |s: Server, Extension(peer): Extension<Peer>| pause(&s, false, peer).await),
        );
    reading()
        .merge(changing)
        .fallback(async || refused(404, NO_SUCH_REQUEST))
        .method_not_allowed_fallback(async || refused(405, "this path does not support the method"))
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(shared)
}

/// The routes of the read socket: those for `GET`. It refuses every other method, and names the control socket.
pub fn read_router(shared: Arc<Shared>, control: &FilePath) -> Router {
    let sentence = format!(
        "this socket only answers GET requests; send changes to the control socket, {}",
        control.display()
    );
    let only_control = async move || refused(403, sentence);
    let unknown = only_control.clone();
    reading()
        .fallback(async move |method: Method| match method {
            Method::GET | Method::HEAD => refused(404, NO_SUCH_REQUEST),
            _ => unknown().await,
        })
        .method_not_allowed_fallback(only_control)
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(shared)
}

const NO_SUCH_REQUEST: &str = "there is no such request; see GET /v1/status, /v1/vms, /v1/events, /v1/vread, /v1/pipes, /v1/lanes, /v1/check";

fn refused(status: u16, sentence: impl Into<String>) -> Answer<()> {
    Answer(Err(refusal(status, sentence)))
}

/// What both sockets answer, from a view of the control loop's state.
fn reading() -> Router<Arc<Shared>> {
    Router::new()
        .route(
            "/v1/check",
            get(async |s: Server| Answer(Ok(s.view().await.check.clone()))),
        )
        .route(
            "/v1/status",
            get(async |s: Server| Answer(Ok(s.view().await.status.clone()))),
        )
        .route("/v1/events", get(async || Answer(Ok(log::recent()))))
        .route(
            "/v1/vread",
            get(async |s: Server| Answer(Ok(s.view().await.vread.clone()))),
        )
        .route(
            "/v1/pipes",
            get(async |s: Server| Answer(Ok(s.view().await.vread.pipes.clone()))),
        )
        .route(
            "/v1/lanes",
            get(async |s: Server| Answer(Ok(s.view().await.lanes.clone()))),
        )
        .route(
            "/v1/vms",
            get(async |s: Server| Answer(Ok(s.view().await.vms.clone()))),
        )
        .route("/v1/vms/{name}", get(show))
        .route(
            "/metrics",
            get(async |s: Server| {
                let text = metrics::text(&*s.view().await);
                ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text)
            }),
        )
}

async fn show(s: Server, name: Result<Path<String>, PathRejection>) -> Answer<VmReport> {
    let view = s.view().await;
    let vms = &view.vms.vms;
    Answer(path(name).and_then(|name| {
        match find::find(
            vms.iter().map(|vm| (vm.name.as_str(), vm.id.as_str())),
            &name,
        ) {
            Ok(i) => Ok(vms[i].clone()),
            Err(e) => Err(e.answer(&name)),
        }
    }))
}

/// A handler of `PATCH`: sends the change in the body to the control loop.
fn changes<C, T>(request: fn(String, C, Peer, Reply<T>) -> Request) -> MethodRouter<Arc<Shared>>
where
    C: DeserializeOwned + Send + 'static,
    T: Serialize + Send + 'static,
{
    patch(
        async move |s: Server,
                    Extension(peer): Extension<Peer>,
                    name: Result<Path<String>, PathRejection>,
                    body: Result<Bytes, BytesRejection>| {
            match read(name, body) {
                Ok((name, change)) => {
                    Answer(s.ask(|reply| request(name, change, peer, reply)).await)
                }
                Err(refusal) => Answer(Err(refusal)),
            }
        },
    )
}

fn read<T: DeserializeOwned>(
    name: Result<Path<String>, PathRejection>,
    body: Result<Bytes, BytesRejection>,
) -> Result<(String, T), Refusal> {
    let name = path(name)?;
    let body = body.map_err(|e| {
        (
            e.status().as_u16(),
            error(format!("the body cannot be read: {e}")),
        )
    })?;
    // Without this, serde would take an array as well.
    let object =
        serde_json::from_slice::<serde_json::Map<_, _>>(&body).map(serde_json::Value::Object);
    let change = object.and_then(serde_json::from_value);
    Ok((
        name,
        change.map_err(|e| (400, error(format!("the body is no change: {e}"))))?,
    ))
}

async fn pause(s: &Shared, stop: bool, peer: Peer) -> Answer<Done> {
    Answer(s.ask(|reply| Request::Pause { stop, peer, reply }).await)
}

fn path(name: Result<Path<String>, PathRejection>) -> Result<String, Refusal> {
    name.map(|Path(name)| name)
        .map_err(|_| (400, error("the VM's name in the path is not UTF-8")))
}

/// A connection that is served.
struct Client {
    task: AbortHandle,
    /// Whether it sent a request.
    has_asked: Arc<AtomicBool>,
    since: Instant,
}

/// Accepts and serves connections, for ever.
pub async fn serve(listener: UnixListener, router: Router) {
    let mut clients = VecDeque::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(_) => {
                // Usually the process is out of descriptors, until connections close.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        make_room(&mut clients).await;
        let has_asked = Arc::new(AtomicBool::new(false));
        let connection = serve_connection(stream, router.clone(), has_asked.clone());
        let task = tokio::spawn(async move {
            // A broken connection concerns only its client.
            let _ = tokio::time::timeout(CONNECTION_TIMEOUT, connection).await;
        });
        clients.push_back(Client {
            task: task.abort_handle(),
            has_asked,
            since: Instant::now(),
        });
    }
}

/// Closes a connection when there are [`MAX_CONNECTIONS`]: first one without a request, else one older than [`MIN_CONNECTION_TIME`].
/// So idle clients cannot keep others from being served.
async fn make_room(clients: &mut VecDeque<Client>) {
    loop {
        clients.retain(|c| !c.task.is_finished());
        if clients.len() < MAX_CONNECTIONS {
            return;
        }
        // Requests that have arrived are read before a connection counts as silent.
        tokio::task::yield_now().await;
        let silent = clients.iter().position(|c| !c.has_asked.load(Relaxed));
        let slow = clients
            .iter()
            .position(|c| c.since.elapsed() >= MIN_CONNECTION_TIME);
        match silent.or(slow).and_then(|at| clients.remove(at)) {
            Some(client) => client.task.abort(),
            None => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

/// Serves one connection until the client closes it.
pub async fn serve_connection(stream: UnixStream, router: Router, has_asked: Arc<AtomicBool>) {
    let peer = Peer(stream.peer_cred().ok().map(|c| c.uid()));
    let inner = TowerToHyperService::new(router.layer(Extension(peer)));
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        has_asked.store(true, Relaxed);
        inner.call(request)
    });
    let _ = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        // A client that has closed its sending side still gets the answer.
        .half_close(true)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

#[cfg(test)]
mod tests;
