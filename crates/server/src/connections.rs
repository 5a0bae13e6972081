//! Connections: accepted, encrypted if wanted, served one request after the other, ended in order.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderValue, Uri, header};
use axum::response::Response;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use crate::access::ErrorForm;
use crate::error::ApiError;
use crate::state::{Phase, ServerState};
use crate::tls::Tls;

/// Most bytes of a request's head; over it, and over the number of headers, 431.
const MAX_HEAD_BYTES: usize = 64 << 10;
const MAX_HEADERS: usize = 100;
/// Connections over the limit that are told so at once; those beyond are closed unheard.
const MAX_TURNED_AWAY: usize = 64;
/// How long to wait when no connection can be accepted, which is so when files run out.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// What all connections have in common.
pub(crate) struct Connections {
    state: ServerState,
    app: Router,
    tls: Option<Tls>,
    places: Arc<Semaphore>,
    turned_away: Arc<Semaphore>,
}

/// A connection's place, and what it meets there.
struct Place {
    _permit: OwnedSemaphorePermit,
    app: Router,
    stays_open: bool,
}

impl Connections {
    pub(crate) fn new(state: ServerState, app: Router, tls: Option<Tls>) -> Self {
        let places = Arc::new(Semaphore::new(state.config().max_connections));
        Self { state, app, tls, places, turned_away: Arc::new(Semaphore::new(MAX_TURNED_AWAY)) }
    }

    /// Serves until the server begins to shut down, and then until all connections have ended.
    pub(crate) async fn serve(self, listener: TcpListener) {
        let this = Arc::new(self);
        // Every connection holds a sender: none is left when all have ended.
        let (is_open, mut all_ended) = mpsc::channel::<()>(1);
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = this.draining() => break,
            };
            let Some(stream) = take(accepted).await else { continue };
            let Some(place) = this.place() else { continue };
            let (this, is_open) = (Arc::clone(&this), is_open.clone());
            tokio::spawn(async move {
                this.secure(stream, place).await;
                drop(is_open);
            });
        }
        drop((listener, is_open));
        // Nothing is ever sent.
        let _ = all_ended.recv().await;
    }

    async fn draining(&self) {
        // The sender lives in the state, so this ends by the phase alone.
        let _ = self.state.watch_phase().wait_for(|phase| *phase >= Phase::Draining).await;
    }

    /// Where a new connection belongs; `None`: nowhere.
    fn place(&self) -> Option<Place> {
        if let Ok(_permit) = Arc::clone(&self.places).try_acquire_owned() {
            return Some(Place { _permit, app: self.app.clone(), stays_open: true });
        }
        let _permit = Arc::clone(&self.turned_away).try_acquire_owned().ok()?;
        Some(Place { _permit, app: Router::new().fallback(turn_away), stays_open: false })
    }

    async fn secure(&self, stream: TcpStream, place: Place) {
        let Some(tls) = &self.tls else { return self.talk(stream, place).await };
        let handshake = tls.accept(stream);
        match tokio::time::timeout(self.state.config().receive_timeout, handshake).await {
            Ok(Ok(stream)) => self.talk(stream, place).await,
            Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
            Err(_) => tracing::debug!("a TLS handshake took too long"),
        }
    }

    async fn talk(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        place: Place,
    ) {
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.state.config().receive_timeout)
            .max_headers(MAX_HEADERS)
            .max_header_size(MAX_HEAD_BYTES)
            .keep_alive(place.stays_open)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(place.app));
        let mut connection = pin!(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = self.draining() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection ended badly");
        }
    }
}

async fn take(accepted: io::Result<(TcpStream, std::net::SocketAddr)>) -> Option<TcpStream> {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    match accepted {
        Ok((stream, _)) => {
            // A token is a small packet that must not wait for the next one.
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(%error, "cannot set TCP_NODELAY");
            }
            Some(stream)
        }
        // It went away before we looked.
        Err(error)
            if matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset) =>
        {
            None
        }
        Err(error) => {
            tracing::error!(%error, "cannot accept connections");
            tokio::time::sleep(ACCEPT_PAUSE).await;
            None
        }
    }
}

/// What connections over the limit hear.
async fn turn_away(uri: Uri) -> Response {
    let mut response = ErrorForm::of(uri.path()).response(ApiError::TooManyConnections);
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}
