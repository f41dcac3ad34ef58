//! The listeners of the API, and the identification of callers.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use aquifer_page::HostName;
use aquifer_transport::{accepting, tls};
use axum::{Extension, Router};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::people::People;
use super::{Caller, Served, router};
use crate::access::{Access, Credentials};
use crate::cluster::Certified;
use crate::config::AccessConfig;
use crate::sys::{group_number, peer_groups};

/// Timeout of a TLS handshake, of a request's headers and of its body, and of all that a stranger
/// does; then the agent closes the connection.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);

/// Connections of peers at which the agent stops accepting TCP; more wait in the kernel's queue.
const CONNECTIONS: usize = 256;

/// Most callers at a time without a certificate, or with a TLS handshake in progress.
const STRANGERS: usize = 128;

/// The API's two listeners. Dropping them removes the unix socket.
#[derive(Debug)]
pub struct Endpoints {
    access: Arc<Access>,
    unix: UnixListener,
    socket: PathBuf,
    tcp: TcpListener,
    tls: Arc<ServerConfig>,
}

/// Binds the TCP address and the unix socket.
///
/// # Errors
/// Names the address or the socket that cannot be bound, and says if another agent uses the socket.
pub async fn bind(
    (socket, people): (&Path, &AccessConfig),
    listen: SocketAddr,
    tls: Arc<ServerConfig>,
) -> io::Result<Endpoints> {
    let named = |what: String| {
        move |error: io::Error| io::Error::new(error.kind(), format!("{what}: {error}"))
    };
    let tcp =
        TcpListener::bind(listen).await.map_err(named(format!("cannot listen on {listen}")))?;
    if UnixStream::connect(socket).await.is_ok() {
        let why = format!(
            "another agent answers at {}: stop it, or give this one another socket",
            socket.display()
        );
        return Err(io::Error::new(io::ErrorKind::AddrInUse, why));
    }
    let cannot = format!("cannot listen on {}", socket.display());
    if let Some(dir) = socket.parent() {
        std::fs::create_dir_all(dir).map_err(named(cannot.clone()))?;
    }
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(named(cannot)(error)),
        _ => {}
    }
    let unix = UnixListener::bind(socket).map_err(named(cannot.clone()))?;
    // With roles, the kernel names each caller; without, nobody but root can connect.
    let mode = if people.is_open() { 0o666 } else { 0o600 };
    std::fs::set_permissions(socket, PermissionsExt::from_mode(mode)).map_err(named(cannot))?;
    if let Some(dir) = socket.parent().filter(|_| people.is_open()) {
        let_others_reach(dir);
    }
    let own = rustix::process::geteuid().as_raw();
    let access = Arc::new(Access::new(people, own, group_number));
    Ok(Endpoints { access, unix, socket: socket.to_owned(), tcp, tls })
}

/// Lets others than root look up the socket in its directory: other processes of this host may have
/// made the directory, for root alone.
fn let_others_reach(dir: &Path) {
    // For a socket without a directory, the empty path.
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let opened = std::fs::metadata(dir).and_then(|found| {
        let mode = found.permissions().mode() & 0o7777;
        if mode & 0o001 != 0 {
            return Ok(());
        }
        tracing::info!("lets other users look up the socket in {}", dir.display());
        std::fs::set_permissions(dir, PermissionsExt::from_mode(mode | 0o001))
    });
    if let Err(error) = opened {
        let dir = dir.display();
        tracing::warn!("others than root may not reach the socket in {dir}: {error}");
    }
}

impl Endpoints {
    /// Serves requests until the caller drops the future.
    pub async fn serve(self, served: Served) {
        let revoking = served.revoking.clone();
        let router = router(served);
        let mut people = People::new(self.access.clone(), router.clone());
        let mut connections = JoinSet::new();
        let mut strangers = Strangers::new(STRANGERS);
        loop {
            tokio::select! {
                (stream, _) = accepted(|| self.unix.accept()) => {
                    match credentials(&stream) {
                        Ok(caller) => people.welcome(stream, &caller),
                        Err(error) => tracing::warn!("cannot tell who calls: {error}"),
                    }
                }
                (stream, from) = accepted(|| self.tcp.accept()),
                    if connections.len() < CONNECTIONS =>
                {
                    strangers.add(welcome(stream, from, self.tls.clone(), router.clone()));
                }
                Some((stream, host, certificate)) = strangers.next() => {
                    let validity = certificate.validity;
                    let router = router.clone().layer(Extension(certificate));
                    let router = router.layer(Extension(revoking.clone()));
                    let revoking = revoking.clone();
                    connections.spawn(async move {
                        let revoked = async { revoking.revoked(&host, &validity).await };
                        let caller = Caller::Peer(host.clone());
                        converse_until(stream, router, caller, revoked).await;
                    });
                }
                Some(_) = connections.join_next() => {}
                () = people.ended() => {}
            }
        }
    }
}

/// Returns the user and the groups of the process at the other end, from the kernel.
fn credentials(stream: &UnixStream) -> io::Result<Credentials> {
    let peer = stream.peer_cred()?;
    // An old kernel, or a sandbox, tells the first group only.
    let mut gids = peer_groups(stream.as_fd()).unwrap_or_default();
    gids.push(peer.gid());
    Ok(Credentials { uid: peer.uid(), gids })
}

/// Accepts the next connection. Failures, mostly a lack of descriptors, lead to a pause and a
/// retry; the log shows the first of a row.
async fn accepted<T, F: Future<Output = io::Result<T>>>(mut accept: impl FnMut() -> F) -> T {
    let mut fails = false;
    loop {
        match accept().await {
            Ok(connection) => return connection,
            Err(error) => {
                if !std::mem::replace(&mut fails, true) {
                    tracing::error!("cannot accept connections: {error}; trying again");
                }
                tokio::time::sleep(accepting::PAUSE).await;
            }
        }
    }
}

/// A host of the cluster, its name and its certificate.
pub(super) type Welcomed = (TlsStream<TcpStream>, HostName, Certified);

/// Callers that get little time: those with a TLS handshake in progress, without a certificate, or
/// without a role. The oldest makes room for a new one, so that no number of them keeps a peer out.
#[derive(Debug)]
pub(super) struct Strangers {
    most: usize,
    callers: JoinSet<Option<Welcomed>>,
    /// Oldest first.
    waiting: VecDeque<AbortHandle>,
}

impl Strangers {
    /// Returns room for at most so many at a time.
    pub(super) fn new(most: usize) -> Self {
        Self { most, callers: JoinSet::new(), waiting: VecDeque::new() }
    }

    /// Serves one more.
    pub(super) fn add(&mut self, caller: impl Future<Output = Option<Welcomed>> + Send + 'static) {
        self.waiting.retain(|caller| !caller.is_finished());
        if self.waiting.len() == self.most
            && let Some(oldest) = self.waiting.pop_front()
        {
            oldest.abort();
        }
        self.waiting.push_back(self.callers.spawn(caller));
    }

    /// Returns the next caller that proved to be a host of the cluster; pending if there is none.
    pub(super) async fn next(&mut self) -> Option<Welcomed> {
        loop {
            match self.callers.join_next().await {
                Some(Ok(Some(host))) => return Some(host),
                Some(_) => {}
                None => std::future::pending().await,
            }
        }
    }
}

impl Drop for Endpoints {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// Completes the TLS handshake; returns a host of the cluster. Serves a caller without a
/// certificate here, if it may call, and one whose certificate has lapsed.
async fn welcome(
    stream: TcpStream,
    from: SocketAddr,
    config: Arc<ServerConfig>,
    router: Router,
) -> Option<Welcomed> {
    let _ = stream.set_nodelay(true);
    let stream = match tokio::time::timeout(TIMEOUT, TlsAcceptor::from(config).accept(stream)).await
    {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            tracing::warn!(%from, "rejected a caller outside this cluster: {error}");
            return None;
        }
        Err(_) => {
            tracing::warn!(%from, "rejected a caller that did not finish the TLS handshake");
            return None;
        }
    };
    let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
    let Some(certificate) = certificate.cloned() else {
        let _ = tokio::time::timeout(TIMEOUT, converse(stream, router, Caller::Stranger)).await;
        return None;
    };
    let named = tls::host_name(&certificate).and_then(|host| {
        let validity = tls::Validity::of(&certificate)?;
        Ok((host, Certified { certificate, validity }))
    });
    match named {
        Ok((host, certified)) if !certified.is_lapsed() => Some((stream, host, certified)),
        Ok((host, certified)) => {
            tracing::info!(%from, %host, "the certificate of a caller has lapsed");
            let router = router.layer(Extension(certified));
            let lapsed = converse(stream, router, Caller::Lapsed(host));
            let _ = tokio::time::timeout(TIMEOUT, lapsed).await;
            None
        }
        Err(_) => {
            tracing::warn!(%from, "rejected a caller whose certificate names no host");
            None
        }
    }
}

pub(super) async fn converse(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    router: Router,
    caller: Caller,
) {
    converse_until(stream, router, caller, std::future::pending()).await;
}

/// Answers requests until the caller ends the connection or is revoked. A host that leaves is
/// revoked by its own request: it gets the answer, and none to another request.
async fn converse_until(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    router: Router,
    caller: Caller,
    revoked: impl Future<Output = ()>,
) {
    let host = match &caller {
        Caller::Peer(host) => Some(host.clone()),
        _ => None,
    };
    let service = TowerToHyperService::new(router.layer(Extension(caller)));
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = revoked => {
            tracing::warn!(?host, "ends the connection of a revoked host");
            connection.as_mut().graceful_shutdown();
            tokio::time::timeout(TIMEOUT, connection).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        tracing::debug!("a connection ended early: {error}");
    }
}

#[cfg(test)]
mod tests {
    use std::future;

    use super::*;

    #[test]
    fn others_can_look_up_the_socket_and_list_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mode = || std::fs::metadata(dir.path()).unwrap().permissions().mode() & 0o777;
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o700)).unwrap();
        for _ in 0..2 {
            let_others_reach(dir.path());
            assert_eq!(mode(), 0o701);
        }
    }

    #[tokio::test]
    async fn a_failure_to_accept_is_waited_over() {
        let mut results = [Err(io::ErrorKind::OutOfMemory.into()), Ok(7)].into_iter();
        let accept = || future::ready(results.next().expect("no call after it succeeds"));
        assert_eq!(accepted(accept).await, 7);
    }
}
