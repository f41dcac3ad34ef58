//! A wire between hosts and a lender, which the test can hold while a VM writes its pages back.

use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

/// Bytes that pass a held wire: enough to connect, and too few for the pages of a VM.
const GREETINGS: u64 = 64 << 10;

/// A unix socket that forwards connections to another one.
pub struct Wire {
    socket: PathBuf,
    gate: Arc<Gate>,
}

/// How many bytes may still pass to the lender.
struct Gate {
    left: Mutex<u64>,
    opened: Condvar,
}

impl Gate {
    /// Waits until these bytes may pass.
    fn pass(&self, bytes: u64) {
        let left = self.left.lock().unwrap();
        let mut left = self.opened.wait_while(left, |left| *left < bytes).unwrap();
        *left -= bytes;
    }

    fn set(&self, left: u64) {
        *self.left.lock().unwrap() = left;
        self.opened.notify_all();
    }
}

impl Wire {
    /// Starts an open wire at `socket` to the lender at `lender`.
    pub fn new(socket: &Path, lender: &Path) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        let gate = Arc::new(Gate { left: Mutex::new(u64::MAX), opened: Condvar::new() });
        let (lender, forwards) = (lender.to_owned(), gate.clone());
        thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(server)) = (client, UnixStream::connect(&lender)) else {
                    return;
                };
                forward(&client, &server, Some(forwards.clone()));
                forward(&server, &client, None);
            }
        });
        Self { socket: socket.to_owned(), gate }
    }

    /// Returns the URI of the lender behind the wire.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }

    /// Holds all writes from now on, except for greetings.
    pub fn hold(&self) {
        self.gate.set(GREETINGS);
    }

    /// Lets everything pass again.
    pub fn open(&self) {
        self.gate.set(u64::MAX);
    }
}

/// Copies one direction of a connection on a thread of its own, until either end closes.
fn forward(from: &UnixStream, to: &UnixStream, gate: Option<Arc<Gate>>) {
    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
    thread::spawn(move || -> io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(read @ 1..) = from.read(&mut buffer) {
            if let Some(gate) = &gate {
                gate.pass(read as u64);
            }
            if to.write_all(&buffer[..read]).is_err() {
                break;
            }
        }
        // The other direction ends as well.
        let _ = from.shutdown(Shutdown::Both);
        to.shutdown(Shutdown::Both)
    });
}
