//! Requests over connections that are kept.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::ServerAddress;

/// How long a connection may take to be made.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long [`Client::get`] waits for a whole answer.
const GET_TIMEOUT: Duration = Duration::from_secs(30);
/// Most bytes of an answer that is kept whole; more are cut off.
const MAX_BODY_BYTES: usize = 256 << 20;

/// Why there was no whole answer.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ClientError {
    #[error("cannot connect to {0}: {1}")]
    Connect(String, std::io::Error),
    #[error("no answer in time")]
    Timeout,
    #[error("the connection broke: {0}")]
    Broken(#[from] hyper::Error),
    #[error("the API key is no text that a header may hold")]
    ApiKey,
    #[error("status {0}: {1}")]
    Status(u16, String),
    #[error("an answer of more than {MAX_BODY_BYTES} bytes")]
    TooLong,
}

/// One server. Connections that are free again serve the next request.
pub struct Client {
    address: ServerAddress,
    authorization: Option<HeaderValue>,
    keeps_alive: bool,
    idle: Mutex<Vec<Connection>>,
}

type Connection = SendRequest<Full<Bytes>>;

/// An answer whose body is still to come.
pub struct Reply {
    /// Status, headers, body.
    pub(crate) response: Response<Incoming>,
    connection: Connection,
}

impl Client {
    /// A client of `address` that asks with `api_key`.
    ///
    /// # Errors
    /// The key cannot be sent.
    pub fn new(address: ServerAddress, api_key: Option<&str>) -> Result<Self, ClientError> {
        let header = |key| HeaderValue::try_from(format!("Bearer {key}"));
        let authorization = api_key.map(header).transpose().map_err(|_| ClientError::ApiKey)?;
        Ok(Self { address, authorization, keeps_alive: true, idle: Mutex::default() })
    }

    /// Whether connections serve more than one request. Default: yes.
    #[must_use]
    pub fn keeping_alive(self, keeps_alive: bool) -> Self {
        Self { keeps_alive, ..self }
    }

    /// The server.
    pub fn address(&self) -> &ServerAddress {
        &self.address
    }

    /// The whole answer to a GET.
    ///
    /// # Errors
    /// None came, or one with a status other than 200.
    pub async fn get(&self, path: &str) -> Result<Bytes, ClientError> {
        let ask = async {
            let reply = self.send(Method::GET, path, Bytes::new()).await?;
            let status = reply.response.status();
            let body = self.read(reply).await?;
            match status.as_u16() {
                200 => Ok(body),
                status => Err(ClientError::Status(status, excerpt(&body))),
            }
        };
        timeout(GET_TIMEOUT, ask).await.map_err(|_| ClientError::Timeout)?
    }

    /// Sends JSON; the answer's body is still to be read.
    ///
    /// # Errors
    /// The server cannot be reached.
    pub async fn post(&self, path: &str, body: Bytes) -> Result<Reply, ClientError> {
        self.send(Method::POST, path, body).await
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Reply, ClientError> {
        let request = || self.request(&method, path, body.clone());
        while let Some(mut connection) = self.take_idle() {
            // A server may close what it kept at any moment: then another connection will do.
            if let Ok(response) = connection.send_request(request()).await {
                return Ok(Reply { response, connection });
            }
        }
        let mut connection = self.connect().await?;
        let response = connection.send_request(request()).await?;
        Ok(Reply { response, connection })
    }

    fn request(&self, method: &Method, path: &str, body: Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method.clone();
        let uri = self.address.path(path).parse();
        *request.uri_mut() = uri.expect("base and path hold no space");
        let headers = request.headers_mut();
        let host = HeaderValue::try_from(self.address.authority());
        headers.insert(HOST, host.expect("a host's name is plain"));
        if *method == Method::POST {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        if !self.keeps_alive {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        if let Some(authorization) = &self.authorization {
            headers.insert(AUTHORIZATION, authorization.clone());
        }
        request
    }

    async fn connect(&self) -> Result<Connection, ClientError> {
        let failed = |error| ClientError::Connect(self.address.to_string(), error);
        let stream = timeout(CONNECT_TIMEOUT, TcpStream::connect(self.address.endpoint()));
        let stream = stream.await.map_err(|_| ClientError::Timeout)?.map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        let (connection, driver) = handshake(TokioIo::new(stream)).await?;
        // Ends with the connection; its errors are those of requests, too.
        tokio::spawn(driver);
        Ok(connection)
    }

    fn take_idle(&self) -> Option<Connection> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|connection| !connection.is_closed());
        let ready = idle.iter().rposition(SendRequest::is_ready)?;
        Some(idle.swap_remove(ready))
    }

    /// A connection whose answer was read to its end may serve again.
    pub(crate) fn give_back(&self, reply: Reply) {
        if self.keeps_alive && !reply.connection.is_closed() {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(reply.connection);
        }
    }

    /// The rest of a body.
    pub(crate) async fn read(&self, mut reply: Reply) -> Result<Bytes, ClientError> {
        let mut whole = Vec::new();
        while let Some(frame) = reply.response.body_mut().frame().await {
            if let Ok(data) = frame?.into_data() {
                if whole.len() + data.len() > MAX_BODY_BYTES {
                    return Err(ClientError::TooLong);
                }
                whole.extend_from_slice(&data);
            }
        }
        self.give_back(reply);
        Ok(whole.into())
    }
}

/// The begin of a body, for messages.
pub(crate) fn excerpt(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(&body[..body.len().min(300)]);
    text.trim().to_owned()
}
