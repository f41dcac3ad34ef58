//! The requests that a volume process answers on its control socket.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use aquifer_control_socket::{Client, ControlSocket};

use super::ProcessError;
use super::message::{Request, Response};
use super::serving::Serving;

/// Time that a client may take to send a request or to read a response.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Creates the control socket. This process holds the volume's lock, so no other process serves
/// on it.
pub(super) fn bind(serving: &Serving) -> Result<ControlSocket, ProcessError> {
    let path = serving.files().socket();
    ControlSocket::bind(&path)
        .map_err(ProcessError::io(format!("cannot make the control socket {}", path.display())))
}

/// Starts the thread that answers requests. Sends to `finish` once the volume is detached.
pub(super) fn listen(
    socket: ControlSocket,
    serving: Arc<Serving>,
    finish: Sender<()>,
) -> Result<(), ProcessError> {
    socket
        .serve(TIMEOUT, move |request, client| answer(request, &serving, client, &finish))
        .map_err(ProcessError::io("cannot start the control thread"))
}

fn answer(
    request: Request,
    serving: &Serving,
    client: &Client,
    finish: &Sender<()>,
) -> io::Result<()> {
    // A client that disconnects does not cancel its request; it only misses the responses.
    let progress = |response| _ = client.answer(&response);
    let done = |result: Result<(), ProcessError>| match result {
        Ok(()) => Response::Done,
        Err(error) => Response::Failed { error: error.to_string() },
    };
    let is_detach = request == Request::Detach;
    let last = match request {
        Request::Status => Response::Status(Box::new(serving.status())),
        Request::AddLease { lease } => done(serving.add_lease(*lease).map_err(Into::into)),
        Request::AddCopy { of, lease } => done(serving.add_copy(of, *lease).map_err(Into::into)),
        Request::Evacuate { lease, spills } => {
            let progress = |now| progress(Response::Evacuating(now));
            done(serving.evacuate(lease, spills, progress).map_err(Into::into))
        }
        Request::Detach => done(serving.detach(|now| progress(Response::SwapOff(now)))),
    };
    let answered = client.answer(&last);
    if is_detach && last == Response::Done {
        // The receiver is gone if a signal detached the volume at the same time.
        let _ = finish.send(());
    }
    answered
}
