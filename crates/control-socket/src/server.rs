//! The server of a control socket.

use std::fs::{self, Permissions};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use aquifer_transport::accepting;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

/// Largest request, in bytes; longer input is garbage.
const MAX_REQUEST: u64 = 64 << 10;

/// A control socket that only its owner may connect to. Clients wait until it is served.
#[derive(Debug)]
pub struct ControlSocket(UnixListener);

/// A client whose request has arrived.
#[derive(Debug)]
pub struct Client(UnixStream);

/// The thread that serves a control socket. Dropping it ends the thread.
#[derive(Debug)]
pub struct Serving {
    listener: UnixListener,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl ControlSocket {
    /// Binds the socket and replaces a stale one. The caller holds a lock that keeps other
    /// processes from this socket.
    ///
    /// # Errors
    /// The system's.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let _ = fs::remove_file(path);
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, Permissions::from_mode(0o600))?;
        Ok(Self(listener))
    }

    /// Answers each client on a thread of its own, until this process ends. `timeout` bounds each
    /// wait for a client.
    ///
    /// # Errors
    /// If the thread that accepts clients cannot start.
    pub fn serve<R: DeserializeOwned>(
        self,
        timeout: Duration,
        answer: impl Fn(R, &Client) -> io::Result<()> + Send + Sync + 'static,
    ) -> io::Result<()> {
        let answer = Arc::new(answer);
        let begin = move |client: Client| {
            let (answer, answering) = (answer.clone(), thread::Builder::new());
            let converse = move || client.converse(timeout, &*answer);
            answering.name("answer".to_owned()).spawn(converse).map(drop)
        };
        accept(self.0, || false, begin).map(drop)
    }

    /// Answers one client after the other, each within `timeout`, until the returned value drops.
    ///
    /// # Errors
    /// If the thread cannot start.
    pub fn serve_in_turn<R: DeserializeOwned>(
        self,
        timeout: Duration,
        answer: impl Fn(R, &Client) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Serving> {
        let (theirs, ends) = (self.0.try_clone()?, Arc::new(AtomicBool::new(false)));
        let ended = ends.clone();
        let begin = move |client: Client| {
            client.converse(timeout, &answer);
            Ok(())
        };
        let thread = Some(accept(theirs, move || ended.load(Ordering::Acquire), begin)?);
        Ok(Serving { listener: self.0, ends, thread })
    }
}

fn accept(
    listener: UnixListener,
    is_over: impl Fn() -> bool + Send + 'static,
    mut begin: impl FnMut(Client) -> io::Result<()> + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name("control".to_owned()).spawn(move || {
        let begin = |(client, _)| begin(Client(client));
        accepting::each("clients", is_over, || listener.accept(), begin);
    })
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Release);
        // Wakes the thread from accept(2).
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // The panic hook has reported a panic there.
            let _ = thread.join();
        }
    }
}

impl Client {
    fn converse<R: DeserializeOwned>(
        &self,
        timeout: Duration,
        answer: &impl Fn(R, &Self) -> io::Result<()>,
    ) {
        let done = self.request(timeout).and_then(|request| match request {
            Ok(request) => answer(request, self),
            Err(error) => {
                let error = format!("cannot understand the request: {error}");
                self.answer(&json!({ "response": "failed", "error": error }))
            }
        });
        if let Err(error) = done {
            tracing::warn!("a control connection ended early: {error}");
        }
    }

    fn request<R: DeserializeOwned>(&self, timeout: Duration) -> io::Result<serde_json::Result<R>> {
        self.0.set_read_timeout(Some(timeout))?;
        self.0.set_write_timeout(Some(timeout))?;
        let mut line = String::new();
        BufReader::new((&self.0).take(MAX_REQUEST)).read_line(&mut line)?;
        Ok(serde_json::from_str(&line))
    }

    /// Sends an answer.
    ///
    /// # Errors
    /// The system's, also if the client has hung up.
    pub fn answer(&self, answer: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(answer)?;
        line.push(b'\n');
        (&self.0).write_all(&line)
    }

    /// Returns whether the client has hung up.
    pub fn has_gone(&self) -> bool {
        let mut ends = [PollFd::new(&self.0, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut ends, Some(&now)).is_ok_and(|count| count > 0)
    }

    /// Returns the connection, for a request that goes on beyond answers.
    pub fn stream(&self) -> &UnixStream {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use serde_json::Value;

    use super::*;
    use crate::{Answers, CallError};

    const TIMEOUT: Duration = Duration::from_secs(20);

    #[test]
    fn clients_are_answered_until_the_server_drops() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        // A dead process leaves its socket behind.
        drop(ControlSocket::bind(&path).unwrap());
        let socket = ControlSocket::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let serving = socket.serve_in_turn(TIMEOUT, |number: u8, client| {
            client.answer(&json!({ "response": "next", "number": number + 1 }))
        });
        let ask = |request: &Value| Answers::to(&path, request, TIMEOUT)?.receive::<Value>();
        assert_eq!(ask(&json!(7)).unwrap(), json!({ "response": "next", "number": 8 }));
        let failed = ask(&json!("fly")).unwrap();
        assert_eq!(failed["response"], "failed");
        assert!(failed["error"].as_str().unwrap().starts_with("cannot understand the request: "));
        drop(serving.unwrap());
        assert!(matches!(ask(&json!(7)), Err(CallError::Absent(..))));
    }
}
