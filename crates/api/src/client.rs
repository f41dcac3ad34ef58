//! Calls to an agent: over its unix socket, or over mutual TLS to a peer.

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

/// Why a call failed. Every variant names the agent that was called.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// Nobody answered there.
    #[error("no agent answers at {agent}: {why}")]
    Unreachable {
        /// Where it was looked for.
        agent: String,
        /// What happened instead.
        why: String,
    },
    /// This user may not ask it.
    #[error("only root may ask the agent at {agent}: {why}")]
    Denied {
        /// Which agent.
        agent: String,
        /// What the system said.
        why: String,
    },
    /// One of the two does not trust the certificate of the other.
    #[error("the agent at {agent} and this host do not trust each other's certificates: {why}")]
    Untrusted {
        /// The agent.
        agent: String,
        /// Whose certificate is not trusted, and why.
        why: String,
    },
    /// The agent took longer than the caller wanted to wait.
    #[error("the agent at {agent} did not answer '{order}' within {} s", after.as_secs_f32())]
    TimedOut {
        /// Which agent.
        agent: String,
        /// What it was asked, as in `GET /v1/status`.
        order: String,
        /// How long it was given.
        after: Duration,
    },
    /// The agent answered that it will not or cannot.
    #[error("{}", problem.error)]
    Refused {
        /// The HTTP status.
        status: StatusCode,
        /// What it said.
        problem: Problem,
    },
    /// The answer was not what the API promises.
    #[error("the agent at {agent} gave an answer that is not part of the API: {why}")]
    Malformed {
        /// Which agent.
        agent: String,
        /// What is wrong with it.
        why: String,
    },
}

impl CallError {
    /// What the operator can do about it, where there is something.
    pub fn help(&self) -> Option<String> {
        match self {
            Self::Refused { problem, .. } => problem.help.clone(),
            Self::Unreachable { agent, .. } if agent.starts_with("unix:") => Some(
                "start one with `aquifer agent --config FILE`, or name its socket with --socket".to_owned(),
            ),
            Self::Denied { .. } => Some("run this as root, for example with sudo".to_owned()),
            Self::Untrusted { .. } => Some(
                "give both hosts certificates of one authority, by 'aquifer init' in the directory that has its key, and \
                 compare the files ca.pem of both"
                    .to_owned(),
            ),
            _ => None,
        }
    }
}

/// Whose certificate is not trusted, if that is what went wrong.
fn distrust(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    use rustls::{AlertDescription as Alert, Error};
    let inner = error.downcast_ref::<std::io::Error>().and_then(|error| error.get_ref());
    if let Some(inner) = inner {
        return distrust(inner);
    }
    match error.downcast_ref::<Error>() {
        Some(Error::InvalidCertificate(why)) => {
            Some(format!("this host does not trust the certificate of the other ({why})"))
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
        )) => Some(format!("the other does not trust the certificate of this host ({alert:?})")),
        _ => error.source().and_then(distrust),
    }
}

/// The way to one agent. Every call makes a connection of its own: calls are few, and a peer that was restarted is
/// never met through a dead connection.
#[derive(Clone, Debug)]
pub struct Client {
    route: Route,
    timeout: Duration,
}

#[derive(Clone, Debug)]
enum Route {
    Unix(PathBuf),
    Tls { address: String, host: HostName, config: Arc<ClientConfig> },
}

impl Client {
    /// The agent of this host, by its unix socket.
    pub fn local(socket: &Path) -> Self {
        Self { route: Route::Unix(socket.to_owned()), timeout: Duration::from_secs(10) }
    }

    /// The agent of another host at `address` (`HOST:PORT`), which must prove to be `host`.
    pub fn peer(address: &str, host: &HostName, config: Arc<ClientConfig>) -> Self {
        let route = Route::Tls { address: address.to_owned(), host: host.clone(), config };
        Self { route, timeout: Duration::from_secs(3) }
    }

    /// The same with another limit on how long one call may take.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// `GET path`.
    ///
    /// # Errors
    /// See [`CallError`].
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, CallError> {
        self.call(Method::GET, path, Body::new()).await
    }

    /// `POST path` with `body` as JSON.
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
                    let name = ServerName::try_from(host.to_string())
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
            Route::Tls { address, host, .. } => format!("{address} ({host})"),
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
