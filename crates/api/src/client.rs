//! Client of an agent: over the agent's unix socket, or over mutual TLS to a peer.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aquifer_page::HostName;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes as Body;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

use crate::Problem;

/// Reason that a call failed. Every variant names the called agent.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The connection failed, or ended before the answer.
    #[error("no agent answers at {agent}: {why}")]
    Unreachable {
        /// Address of the agent: `unix:PATH`, or `HOST:PORT (NAME)`.
        agent: String,
        /// Error of the system, TLS or HTTP, with its sources.
        why: String,
    },
    /// The operating system denies this user access to the agent's socket.
    #[error("only root may use the agent at {agent}: {why}")]
    Denied {
        /// Address of the agent.
        agent: String,
        /// Error of the operating system.
        why: String,
    },
    /// One of the two hosts does not trust the other's certificate.
    #[error("the agent at {agent} and this host do not trust each other's certificates: {why}")]
    Untrusted {
        /// Address of the agent.
        agent: String,
        /// Host that does not trust, and its reason.
        why: String,
    },
    /// The agent did not answer within the client's timeout.
    #[error("the agent at {agent} did not answer '{order}' within {} s", after.as_secs_f32())]
    TimedOut {
        /// Address of the agent.
        agent: String,
        /// Method and path of the call, as in `GET /v1/status`.
        order: String,
        /// Timeout of the call.
        after: Duration,
    },
    /// The agent answered with an HTTP status other than success.
    #[error("{}", problem.error)]
    Refused {
        /// HTTP status of the answer.
        status: StatusCode,
        /// Problem that the agent reports, or the text of an answer that is no [`Problem`].
        problem: Problem,
    },
    /// The answer, or the request, does not fit the API.
    #[error("the agent at {agent} sent an answer that does not fit the API: {why}")]
    Malformed {
        /// Address of the agent.
        agent: String,
        /// Error of the JSON or HTTP library.
        why: String,
    },
}

impl CallError {
    /// Returns an action that the operator can take, if there is one.
    pub fn help(&self) -> Option<String> {
        match self {
            Self::Refused { problem, .. } => problem.help.clone(),
            Self::Unreachable { agent, .. } if agent.starts_with("unix:") => Some(
                "start one with 'aquifer serve agent --config FILE', or name its socket with \
                 --socket"
                    .to_owned(),
            ),
            Self::Denied { .. } => Some("run this as root, for example with sudo".to_owned()),
            Self::Untrusted { .. } => Some(
                "join both hosts to one cluster with 'aquifer cluster join': the file ca.pem of \
                 both must be the same"
                    .to_owned(),
            ),
            _ => None,
        }
    }
}

/// Returns the host that does not trust a certificate, if that caused `error`.
fn distrust(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    use rustls::{AlertDescription as Alert, Error};
    let inner = error.downcast_ref::<std::io::Error>().and_then(|error| error.get_ref());
    if let Some(inner) = inner {
        return distrust(inner);
    }
    match error.downcast_ref::<Error>() {
        Some(Error::InvalidCertificate(why)) => {
            Some(format!("this host does not trust the other's certificate ({why})"))
        }
        Some(Error::AlertReceived(
            alert @ (Alert::UnknownCA
            | Alert::BadCertificate
            | Alert::CertificateUnknown
            | Alert::CertificateExpired
            | Alert::CertificateRevoked
            | Alert::CertificateRequired
            | Alert::UnsupportedCertificate
            | Alert::DecryptError
            | Alert::AccessDenied),
        )) => Some(format!("the other does not trust this host's certificate ({alert:?})")),
        _ => error.source().and_then(distrust),
    }
}

/// Client of one agent. Every call opens a new connection: calls are few, and a new connection
/// reaches a restarted peer.
#[derive(Clone, Debug)]
pub struct Client {
    route: Route,
    timeout: Duration,
}

#[derive(Clone, Debug)]
enum Route {
    Unix(PathBuf),
    /// Without a host, the configuration alone decides whom it trusts.
    Tls {
        address: String,
        host: Option<HostName>,
        config: Arc<ClientConfig>,
    },
}

impl Client {
    /// Returns a client of this host's agent at its unix socket, with a timeout of 10 s.
    pub fn local(socket: &Path) -> Self {
        Self { route: Route::Unix(socket.to_owned()), timeout: Duration::from_secs(10) }
    }

    /// Returns a client of the agent at `address` (`HOST:PORT`), with a timeout of 3 s. The agent's
    /// certificate must name `host`.
    pub fn peer(address: &str, host: &HostName, config: Arc<ClientConfig>) -> Self {
        let route = Route::Tls { address: address.to_owned(), host: Some(host.clone()), config };
        Self { route, timeout: Duration::from_secs(3) }
    }

    /// Returns a client of the agent at `address` (`HOST:PORT`), whatever its host, with a timeout
    /// of 10 s. Only `config` decides whether to trust it.
    pub fn of_any_host(address: &str, config: Arc<ClientConfig>) -> Self {
        let route = Route::Tls { address: address.to_owned(), host: None, config };
        Self { route, timeout: Duration::from_secs(10) }
    }

    /// Returns the client with another timeout for each call.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sends `GET path` and returns the answer.
    ///
    /// # Errors
    /// See [`CallError`].
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, CallError> {
        self.call(Method::GET, path, Body::new()).await
    }

    /// Sends `POST path` with `body` as JSON and returns the answer.
    ///
    /// # Errors
    /// See [`CallError`].
    pub async fn post<B: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        body: &B,
    ) -> Result<T, CallError> {
        let body = serde_json::to_vec(body).map_err(|error| self.malformed(error))?;
        self.call(Method::POST, path, body.into()).await
    }

    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Body,
    ) -> Result<T, CallError> {
        let order = format!("{method} {path}");
        let call = async {
            match &self.route {
                Route::Unix(socket) => {
                    let stream =
                        UnixStream::connect(socket).await.map_err(|error| match error.kind() {
                            ErrorKind::PermissionDenied => self.denied(error),
                            _ => self.unreachable(error),
                        })?;
                    self.exchange(stream, method, path, body).await
                }
                Route::Tls { address, host, config } => {
                    let stream = TcpStream::connect(address)
                        .await
                        .map_err(|error| self.unreachable(error))?;
                    let host = host.as_ref().map_or("aquifer", HostName::as_str);
                    let name = ServerName::try_from(host.to_owned())
                        .map_err(|error| self.unreachable(error))?;
                    let stream = TlsConnector::from(config.clone()).connect(name, stream).await;
                    self.exchange(
                        stream.map_err(|error| self.unreachable(error))?,
                        method,
                        path,
                        body,
                    )
                    .await
                }
            }
        };
        let timed_out = || CallError::TimedOut { agent: self.agent(), order, after: self.timeout };
        tokio::time::timeout(self.timeout, call).await.map_err(|_| timed_out())?
    }

    async fn exchange<S, T>(
        &self,
        stream: S,
        method: Method,
        path: &str,
        body: Body,
    ) -> Result<T, CallError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
        T: DeserializeOwned,
    {
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|error| self.unreachable(error))?;
        let driver = tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, "aquifer")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| self.malformed(error))?;
        let response =
            sender.send_request(request).await.map_err(|error| self.unreachable(error))?;
        let status = response.status();
        let body = response
            .into_body()
            .collect()
            .await
            .map_err(|error| self.unreachable(error))?
            .to_bytes();
        driver.abort();
        if status.is_success() {
            return serde_json::from_slice(&body).map_err(|error| self.malformed(error));
        }
        let problem = serde_json::from_slice(&body).unwrap_or_else(|_| Problem {
            error: format!(
                "{} answered {status}: {}",
                self.agent(),
                String::from_utf8_lossy(&body)
            ),
            help: None,
        });
        Err(CallError::Refused { status, problem })
    }

    fn agent(&self) -> String {
        match &self.route {
            Route::Unix(socket) => format!("unix:{}", socket.display()),
            Route::Tls { address, host: Some(host), .. } => format!("{address} ({host})"),
            Route::Tls { address, host: None, .. } => address.clone(),
        }
    }

    fn denied(&self, error: impl std::error::Error) -> CallError {
        CallError::Denied { agent: self.agent(), why: error.to_string() }
    }

    fn unreachable(&self, error: impl std::error::Error + 'static) -> CallError {
        if let Some(why) = distrust(&error) {
            return CallError::Untrusted { agent: self.agent(), why };
        }
        let mut why = error.to_string();
        let mut source = error.source();
        while let Some(error) = source {
            why = format!("{why}: {error}");
            source = error.source();
        }
        CallError::Unreachable { agent: self.agent(), why }
    }

    fn malformed(&self, error: impl std::error::Error) -> CallError {
        CallError::Malformed { agent: self.agent(), why: error.to_string() }
    }
}
