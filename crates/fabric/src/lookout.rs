use std::hint;
use std::io;
use std::time::{Duration, Instant};

use rustix::net::RecvFlags;

/// How long to look out: what a peer on the same machine takes to answer, with its own waking up.
const WINDOW: Duration = Duration::from_micros(30);

/// Pauses of the processor between two looks, 1 to 2 us: each look takes the socket's lock away from the peer that wants
/// to put bytes there.
const PAUSES: u32 = 32;

/// Looking out for bytes for a moment instead of going to sleep at once.
///
/// To wake a sleeping thread on another core costs more than all the rest of a small request, and the peer that sends
/// it pays. So after an answer, look again for a moment: the processor is yielded at every look, so that whoever else
/// wants it has it first, the peer above all. It is done only as long as it pays: if nothing came within the window
/// the thread sleeps, and the next time it goes to sleep at once, until bytes come that quickly again. An idle
/// connection so uses no processor at all.
#[derive(Debug, Default)]
pub(crate) struct Lookout {
    pays: bool,
}

impl Lookout {
    /// Receives by `recv`, which is to wait or not as its flags say.
    pub(crate) fn wait(&mut self, mut recv: impl FnMut(RecvFlags) -> io::Result<usize>) -> io::Result<usize> {
        let start = Instant::now();
        while self.pays && start.elapsed() < WINDOW {
            match recv(RecvFlags::DONTWAIT) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    (0..PAUSES).for_each(|_| hint::spin_loop());
                    rustix::thread::sched_yield();
                }
                result => return result,
            }
        }
        let result = recv(RecvFlags::empty());
        self.pays = start.elapsed() < WINDOW;
        result
    }
}
