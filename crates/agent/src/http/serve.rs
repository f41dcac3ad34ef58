//! Accepting connections and learning who is at the other end.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::tls;
use axum::{Extension, Router};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::{Caller, router};
use crate::driver::Handle;

/// A caller that has not said who it is, or what it wants, by then is hung up on.
const PATIENCE: Duration = Duration::from_secs(10);

/// Connections from other hosts at a time; more wait in the kernel's queue.
const CONNECTIONS: usize = 256;

/// The two places at which the API is reached. Dropping it removes the unix socket.
#[derive(Debug)]
pub struct Endpoints {
    unix: UnixListener,
    socket: PathBuf,
    tcp: TcpListener,
    tls: Arc<ServerConfig>,
}

/// Binds both.
///
/// # Errors
/// Names the address or the socket, and says when another agent is at it.
pub async fn bind(socket: &Path, listen: SocketAddr, tls: Arc<ServerConfig>) -> io::Result<Endpoints> {
    let named =
        |what: String| move |error: io::Error| io::Error::new(error.kind(), format!("{what}: {error}"));
    let tcp = TcpListener::bind(listen).await.map_err(named(format!("cannot listen on {listen}")))?;
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
    std::fs::set_permissions(socket, PermissionsExt::from_mode(0o600)).map_err(named(cannot))?;
    Ok(Endpoints { unix, socket: socket.to_owned(), tcp, tls })
}

impl Endpoints {
    /// Answers until the future is dropped.
    pub async fn serve(self, handle: Handle) {
        let router = router(handle);
        let mut connections = JoinSet::new();
        let places = Arc::new(Semaphore::new(CONNECTIONS));
        loop {
            tokio::select! {
                Ok((stream, _)) = self.unix.accept() => {
                    connections.spawn(converse(stream, router.clone(), Caller::Local));
                }
                (place, Ok((stream, from))) = async {
                    let place = places.clone().acquire_owned().await;
                    (place, self.tcp.accept().await)
                } => {
                    let (router, tls) = (router.clone(), self.tls.clone());
                    connections.spawn(async move {
                        welcome(stream, from, router, tls).await;
                        drop(place);
                    });
                }
                Some(_) = connections.join_next() => {}
            }
        }
    }
}

impl Drop for Endpoints {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// Lets a host in that proves to be one of the cluster.
async fn welcome(stream: TcpStream, from: SocketAddr, router: Router, tls: Arc<ServerConfig>) {
    let _ = stream.set_nodelay(true);
    let stream = match tokio::time::timeout(PATIENCE, TlsAcceptor::from(tls).accept(stream)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            return tracing::warn!(%from, "turned away a caller that is not of this cluster: {error}");
        }
        Err(_) => return tracing::warn!(%from, "hung up on a caller that did not say who it is"),
    };
    let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
    match certificate.map(tls::host_name) {
        Some(Ok(host)) => converse(stream, router, Caller::Peer(host)).await,
        _ => tracing::warn!(%from, "turned away a caller whose certificate names no host"),
    }
}

async fn converse(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    router: Router,
    caller: Caller,
) {
    let service = TowerToHyperService::new(router.layer(Extension(caller)));
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = connection.await {
        tracing::debug!("a connection ended early: {error}");
    }
}
