//! The server side of a volume process's control socket.

use std::fs::{self, Permissions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use aquifer_transport::accepting;

use super::ProcessError;
use super::message::{Request, Response};
use super::serving::Serving;

/// Longest request in bytes; longer input is garbage.
const MAX_REQUEST: u64 = 64 << 10;

/// Time that a client may take to send a request or to read a response.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The control socket of a volume process.
pub(super) struct Control {
    listener: UnixListener,
    serving: Arc<Serving>,
    finish: Sender<()>,
}

impl Control {
    /// Creates the socket, replacing one that a dead process left. Sends to `finish` once the
    /// volume is detached.
    pub(super) fn bind(serving: &Arc<Serving>, finish: Sender<()>) -> Result<Self, ProcessError> {
        let path = serving.files().socket();
        // This process holds the volume's lock, so no other process serves on this socket.
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path)
            .and_then(|listener| {
                fs::set_permissions(&path, Permissions::from_mode(0o600)).map(|()| listener)
            })
            .map_err(ProcessError::io(format!(
                "cannot make the control socket {}",
                path.display()
            )))?;
        Ok(Self { listener, serving: serving.clone(), finish })
    }

    /// Starts the thread that answers requests.
    pub(super) fn listen(self) -> Result<(), ProcessError> {
        thread::Builder::new()
            .name("control".to_owned())
            .spawn(move || {
                let Self { listener, serving, finish } = self;
                accepting::each(
                    "clients",
                    || false,
                    || listener.accept(),
                    |(client, _)| {
                        let (serving, finish) = (serving.clone(), finish.clone());
                        let conversation = move || {
                            if let Err(error) = converse(&serving, &client, &finish) {
                                tracing::warn!("a control connection ended early: {error}");
                            }
                        };
                        let answering = thread::Builder::new().name("control-client".to_owned());
                        answering.spawn(conversation).map(drop)
                    },
                );
            })
            .map_err(ProcessError::io("cannot start the control thread"))?;
        Ok(())
    }
}

/// Reads one request and answers it.
fn converse(serving: &Serving, client: &UnixStream, finish: &Sender<()>) -> io::Result<()> {
    client.set_read_timeout(Some(TIMEOUT))?;
    client.set_write_timeout(Some(TIMEOUT))?;
    let mut line = String::new();
    BufReader::new(client.take(MAX_REQUEST)).read_line(&mut line)?;
    // A client that disconnects does not cancel its request; it only misses the responses.
    let progress = |response| _ = answer(client, &response);
    let failed = |error: String| Response::Failed { error };
    let mut detached = false;
    let last = match serde_json::from_str(&line) {
        Ok(Request::Status) => Response::Status(Box::new(serving.status())),
        Ok(Request::AddLease { lease }) => serving
            .add_lease(*lease)
            .map_or_else(|error| failed(error.to_string()), |()| Response::Done),
        Ok(Request::Evacuate { lease }) => serving
            .evacuate(lease, |now| progress(Response::Evacuating(now)))
            .map_or_else(|error| failed(error.to_string()), |()| Response::Done),
        Ok(Request::Detach) => match serving.detach(|now| progress(Response::SwapOff(now))) {
            Ok(()) => {
                detached = true;
                Response::Done
            }
            Err(error) => failed(error.to_string()),
        },
        Err(error) => failed(format!("cannot understand the request: {error}")),
    };
    let answered = answer(client, &last);
    if detached {
        // The receiver is gone if a signal detached the volume at the same time.
        let _ = finish.send(());
    }
    answered
}

fn answer(mut client: &UnixStream, response: &Response) -> io::Result<()> {
    let mut line = serde_json::to_vec(response)?;
    line.push(b'\n');
    client.write_all(&line)
}
