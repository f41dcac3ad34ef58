//! Client of an agent: over the agent's unix socket, or over mutual TLS to a peer.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aquifer_page::{HostName, lock};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes as Body;
use hyper::client::conn::http1::{SendRequest, handshake};
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

/// The largest answer that a client takes in: an agent that lies must not fill this host's memory.
const LARGEST_ANSWER: usize = 64 << 20;

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
    /// The certificate of one of the two hosts has ended, or does not hold yet.
    #[error("the agent at {agent} and this host do not trust each other now: {why}")]
    Lapsed {
        /// Address of the agent.
        agent: String,
        /// Host whose certificate it is, and the host by whose clock.
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
            Self::Denied { .. } => Some(
                "run this as root, for example with sudo, or name a group under [access] in the \
                 agent's configuration"
                    .to_owned(),
            ),
            Self::Untrusted { .. } => Some(
                "join both hosts to one cluster with 'aquifer cluster join': the file ca.pem of \
                 both must be the same"
                    .to_owned(),
            ),
            Self::Lapsed { .. } => Some(
                "set the clocks of both hosts; if they are right, start the agent of the signer, \
                 which renews certificates"
                    .to_owned(),
            ),
            _ => None,
        }
    }
}

/// Why one host does not trust the other's certificate.
enum Distrust {
    /// It is of another cluster, revoked, or damaged.
    Always(String),
    /// It has ended, or does not hold yet.
    Now(&'static str),
}

/// Returns why one host does not trust the other, if that caused `error`.
fn distrust(error: &(dyn std::error::Error + 'static)) -> Option<Distrust> {
    use rustls::{AlertDescription as Alert, CertificateError as Why, Error};
    let inner = error.downcast_ref::<std::io::Error>().and_then(|error| error.get_ref());
    if let Some(inner) = inner {
        return distrust(inner);
    }
    match error.downcast_ref::<Error>() {
        Some(Error::InvalidCertificate(Why::Expired | Why::ExpiredContext { .. })) => {
            Some(Distrust::Now("the other's certificate has ended, by the clock of this host"))
        }
        Some(Error::InvalidCertificate(Why::NotValidYet | Why::NotValidYetContext { .. })) => Some(
            Distrust::Now("the other's certificate does not hold yet, by the clock of this host"),
        ),
        Some(Error::AlertReceived(Alert::CertificateExpired)) => Some(Distrust::Now(
            "this host's certificate has ended, or does not hold yet, by the clock of the other",
        )),
        Some(Error::InvalidCertificate(why)) => Some(Distrust::Always(format!(
            "this host does not trust the other's certificate ({why})"
        ))),
        Some(Error::AlertReceived(
            alert @ (Alert::UnknownCA
            | Alert::BadCertificate
            | Alert::CertificateUnknown
            | Alert::CertificateRevoked
            | Alert::CertificateRequired
            | Alert::UnsupportedCertificate
            | Alert::DecryptError
            | Alert::AccessDenied),
        )) => Some(Distrust::Always(format!(
            "the other does not trust this host's certificate ({alert:?})"
        ))),
        _ => error.source().and_then(distrust),
    }
}

/// Client of one agent. Every call opens a new connection: calls are few, and a new connection
/// reaches a restarted peer. [`Client::keeping`] makes an exception.
#[derive(Clone, Debug)]
pub struct Client {
    route: Route,
    timeout: Duration,
    /// The largest answer, in bytes.
    largest: usize,
    kept: Option<Kept>,
}

/// A connection between two calls; all clones of a client share it. The agent at its other end
/// closes it when it is idle for long.
type Kept = Arc<Mutex<Option<Connection>>>;

type Connection = SendRequest<Full<Body>>;

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
        Self::new(Route::Unix(socket.to_owned()), Duration::from_secs(10))
    }

    /// Returns a client of the agent at `address` (`HOST:PORT`), with a timeout of 3 s. The agent's
    /// certificate must name `host`.
    pub fn peer(address: &str, host: &HostName, config: Arc<ClientConfig>) -> Self {
        let route = Route::Tls { address: address.to_owned(), host: Some(host.clone()), config };
        Self::new(route, Duration::from_secs(3))
    }

    /// Returns a client of the agent at `address` (`HOST:PORT`), whatever its host, with a timeout
    /// of 10 s. Only `config` decides whether to trust it.
    pub fn of_any_host(address: &str, config: Arc<ClientConfig>) -> Self {
        let route = Route::Tls { address: address.to_owned(), host: None, config };
        Self::new(route, Duration::from_secs(10))
    }

    fn new(route: Route, timeout: Duration) -> Self {
        Self { route, timeout, largest: LARGEST_ANSWER, kept: None }
    }

    /// Returns the client with another timeout for each call.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Returns the client with another limit of an answer's size, in bytes.
    pub fn with_largest(mut self, largest: usize) -> Self {
        self.largest = largest;
        self
    }

    /// Returns the client with connections that `get` keeps for the next call. If a kept connection
    /// turns out to be closed, the call goes over a new one.
    pub fn keeping(mut self) -> Self {
        self.kept = Some(Kept::default());
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
            let request = Request::builder()
                .method(method)
                .uri(path)
                .header(HOST, "aquifer")
                .header(CONTENT_TYPE, "application/json")
                .body(Full::new(body))
                .map_err(|error| self.malformed(error))?;
            self.exchange(request).await
        };
        let timed_out = || CallError::TimedOut { agent: self.agent(), order, after: self.timeout };
        let (status, body) =
            tokio::time::timeout(self.timeout, call).await.map_err(|_| timed_out())??;
        self.understand(status, &body)
    }

    /// Sends a request over the kept connection if there is one, else over a new one.
    async fn exchange(
        &self,
        request: Request<Full<Body>>,
    ) -> Result<(StatusCode, Body), CallError> {
        let keeps = self.kept.as_ref().filter(|_| request.method() == Method::GET);
        // A second call at the same time opens its own connection.
        if let Some(mut connection) = keeps.and_then(|kept| lock(kept).take())
            && let Ok(answer) = self.send(&mut connection, request.clone()).await
        {
            keeps.inspect(|kept| *lock(kept) = Some(connection));
            return Ok(answer);
        }
        let mut connection = self.connect().await?;
        let answer = self.send(&mut connection, request).await?;
        keeps.inspect(|kept| *lock(kept) = Some(connection));
        Ok(answer)
    }

    async fn connect(&self) -> Result<Connection, CallError> {
        match &self.route {
            Route::Unix(socket) => {
                let stream =
                    UnixStream::connect(socket).await.map_err(|error| match error.kind() {
                        ErrorKind::PermissionDenied => self.denied(error),
                        _ => self.unreachable(&error),
                    })?;
                self.begin(stream).await
            }
            Route::Tls { address, host, config } => {
                let stream =
                    TcpStream::connect(address).await.map_err(|error| self.unreachable(&error))?;
                let host = host.as_ref().map_or("aquifer", HostName::as_str);
                let name = ServerName::try_from(host.to_owned())
                    .map_err(|error| self.unreachable(&error))?;
                let stream = TlsConnector::from(config.clone()).connect(name, stream).await;
                self.begin(stream.map_err(|error| self.unreachable(&error))?).await
            }
        }
    }

    /// Begins to speak HTTP on a stream. The task that moves the bytes ends with the connection.
    async fn begin<S>(&self, stream: S) -> Result<Connection, CallError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let handshake = handshake(TokioIo::new(stream)).await;
        let (sender, connection) = handshake.map_err(|error| self.unreachable(&error))?;
        tokio::spawn(connection);
        Ok(sender)
    }

    async fn send(
        &self,
        connection: &mut Connection,
        request: Request<Full<Body>>,
    ) -> Result<(StatusCode, Body), CallError> {
        connection.ready().await.map_err(|error| self.unreachable(&error))?;
        let response =
            connection.send_request(request).await.map_err(|error| self.unreachable(&error))?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, self.largest).collect().await;
        Ok((head.status, body.map_err(|error| self.unreachable(&*error))?.to_bytes()))
    }

    fn understand<T: DeserializeOwned>(
        &self,
        status: StatusCode,
        body: &Body,
    ) -> Result<T, CallError> {
        if status.is_success() {
            return serde_json::from_slice(body).map_err(|error| self.malformed(error));
        }
        let problem = serde_json::from_slice(body).unwrap_or_else(|_| Problem {
            error: format!("{} answered {status}: {}", self.agent(), String::from_utf8_lossy(body)),
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

    fn unreachable(&self, error: &(dyn std::error::Error + 'static)) -> CallError {
        match distrust(error) {
            Some(Distrust::Always(why)) => {
                return CallError::Untrusted { agent: self.agent(), why };
            }
            Some(Distrust::Now(why)) => {
                return CallError::Lapsed { agent: self.agent(), why: why.to_owned() };
            }
            None => {}
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixListener;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Answers on each connection as many requests as `answers` has, and then closes it. Returns
    /// how many connections there were.
    fn serve(socket: &Path, answers: &'static [&'static str]) -> Arc<AtomicUsize> {
        let (listener, count) =
            (UnixListener::bind(socket).unwrap(), Arc::<AtomicUsize>::default());
        let counted = count.clone();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                counted.fetch_add(1, Ordering::SeqCst);
                for answer in answers {
                    let mut heard = Vec::new();
                    let mut byte = [0];
                    while !heard.ends_with(b"\r\n\r\n") && matches!(stream.read(&mut byte), Ok(1)) {
                        heard.push(byte[0]);
                    }
                    // The client may be gone.
                    let _ = stream.write_all(answer.as_bytes());
                }
            }
        });
        count
    }

    const SEVEN: &str = "HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n7";
    const HALF: &str = "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"host\":";

    #[test]
    fn a_certificate_that_ended_is_no_foreign_one() {
        use rustls::{AlertDescription, CertificateError, Error};
        let client = Client::local(Path::new("/socket"));
        let error = |of: Error| client.unreachable(&std::io::Error::other(of));
        for of in [
            Error::InvalidCertificate(CertificateError::Expired),
            Error::InvalidCertificate(CertificateError::NotValidYet),
            Error::AlertReceived(AlertDescription::CertificateExpired),
        ] {
            let error = error(of);
            assert!(matches!(error, CallError::Lapsed { .. }), "{error}");
            let help = error.help().unwrap();
            assert!(help.contains("clocks") && !help.contains("join"), "{help}");
        }
        for of in [
            Error::InvalidCertificate(CertificateError::UnknownIssuer),
            Error::AlertReceived(AlertDescription::UnknownCA),
        ] {
            let error = error(of);
            assert!(matches!(error, CallError::Untrusted { .. }), "{error}");
            assert!(error.help().unwrap().contains("cluster join"));
        }
    }

    #[tokio::test]
    async fn a_kept_connection_serves_until_it_closes() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let count = serve(&socket, &[SEVEN, SEVEN]);
        let client = Client::local(&socket).keeping();
        for connections in [1, 1, 2, 2, 3] {
            assert_eq!(client.clone().get::<u32>("/").await.unwrap(), 7);
            assert_eq!(count.load(Ordering::SeqCst), connections);
        }
        drop(client);
        let once = Client::local(&socket);
        for connections in [4, 5] {
            assert_eq!(once.get::<u32>("/").await.unwrap(), 7);
            assert_eq!(count.load(Ordering::SeqCst), connections);
        }
    }

    #[tokio::test]
    async fn half_an_answer_is_none_and_is_not_kept() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let count = serve(&socket, &[HALF]);
        let client = Client::local(&socket).keeping();
        for connections in [1, 2] {
            let error = client.get::<u32>("/").await.unwrap_err();
            assert!(matches!(error, CallError::Unreachable { .. }), "{error}");
            assert_eq!(count.load(Ordering::SeqCst), connections);
        }
    }

    #[tokio::test]
    async fn an_answer_without_end_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, client) =
            (dir.path().join("socket"), Client::local(&dir.path().join("socket")));
        let listener = UnixListener::bind(socket).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            // An answer before its request would be another error.
            assert!(stream.read(&mut [0; 1024]).unwrap() > 0);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
            while stream.write_all(&[b'0'; 1 << 16]).is_ok() {}
        });
        let error =
            client.with_timeout(Duration::from_secs(600)).get::<u32>("/").await.unwrap_err();
        assert!(error.to_string().contains("length limit exceeded"), "{error}");
    }
}
