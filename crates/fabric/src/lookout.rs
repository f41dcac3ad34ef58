use std::hint;
use std::io;
use std::num::NonZero;
use std::os::fd::BorrowedFd;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::sleep::going_to_sleep;

/// How long to look out: what a peer on the same machine takes to answer, with its own waking up, and what a kernel that
/// swaps to it takes from one page fault to the next.
const WINDOW: Duration = Duration::from_micros(100);

/// Pauses of the processor between two looks, 1 to 2 us: each look takes the socket's lock away from the peer that wants
/// to put bytes there.
const PAUSES: u32 = 32;

/// How many threads of this process are looking out.
static LOOKING: AtomicUsize = AtomicUsize::new(0);

/// How many may: half of the processors, so that those they wait for have one to run on.
static MOST: LazyLock<usize> =
    LazyLock::new(|| thread::available_parallelism().map_or(1, NonZero::get).div_ceil(2));

/// Looking out for bytes for a moment instead of going to sleep at once.
///
/// To wake a sleeping thread on another core costs more than all the rest of a small request, and the peer that sends
/// it pays. So after an answer, look again for a moment: the processor is yielded at every look, so that whoever else
/// wants it has it first, the peer above all. It is done only as long as it pays: if nothing came within the window
/// the thread sleeps, and the next time it goes to sleep at once, until bytes come that quickly again. An idle
/// connection so uses no processor at all.
#[derive(Debug)]
pub(crate) struct Lookout {
    pays: bool,
}

impl Lookout {
    pub(crate) fn new() -> Self {
        // Found out now, because that takes memory, and the page path must not.
        LazyLock::force(&MOST);
        Self { pays: false }
    }

    /// Receives by `recv`, which is not to wait, as soon as `socket` has something, but not after the deadline: a peer that
    /// always has something to say is given up as well.
    ///
    /// Sleeps in `poll`, not in a receive: a unix socket wakes whoever sleeps in one also when the peer has taken what we
    /// sent, only to find that nothing has come.
    pub(crate) fn wait(
        &mut self,
        socket: BorrowedFd<'_>,
        deadline: Option<Instant>,
        mut recv: impl FnMut() -> io::Result<usize>,
    ) -> io::Result<usize> {
        let start = Instant::now();
        if deadline.is_some_and(|deadline| start >= deadline) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut looking = None;
        loop {
            let result = recv();
            let waited = start.elapsed();
            if !result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
                self.pays = waited < WINDOW;
                return result;
            }
            looking = looking.or_else(|| Looking::begin(self.pays)).filter(|_| waited < WINDOW);
            if looking.is_some() {
                (0..PAUSES).for_each(|_| hint::spin_loop());
                rustix::thread::sched_yield();
            } else {
                going_to_sleep();
                sleep(socket, PollFlags::IN, deadline)?;
            }
        }
    }
}

/// One of those that look out, until dropped.
struct Looking;

impl Looking {
    fn begin(pays: bool) -> Option<Self> {
        if !pays {
            return None;
        }
        let looking = Self;
        (LOOKING.fetch_add(1, Ordering::Relaxed) < *MOST).then_some(looking)
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        LOOKING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Sleeps until the socket is ready, or until the deadline, which is the error `WouldBlock`.
pub(crate) fn sleep(
    socket: BorrowedFd<'_>,
    ready: PollFlags,
    deadline: Option<Instant>,
) -> io::Result<()> {
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    let left = left.map(|left| Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    });
    match poll(&mut [PollFd::from_borrowed_fd(socket, ready)], left.as_ref()) {
        Ok(0) => Err(io::ErrorKind::WouldBlock.into()),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
