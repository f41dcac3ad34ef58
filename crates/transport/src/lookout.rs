//! Spinning for a moment before sleeping, so that a quick peer need not wake a thread.

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

/// Spin time. It covers the answer of a peer on the same machine, with that peer's wake-up. It also
/// covers the gap between two page faults of a kernel that swaps to this process.
const WINDOW: Duration = Duration::from_micros(100);

/// Spin-loop hints between two receives, 1 to 2 us in all. Each receive takes the socket's lock,
/// which the peer needs to deliver bytes.
const PAUSES: u32 = 32;

/// Threads of this process that spin.
static LOOKING: AtomicUsize = AtomicUsize::new(0);

/// Most threads that may spin: half of the processors, so that the peers that they wait for have
/// one to run on.
static MOST: LazyLock<usize> =
    LazyLock::new(|| thread::available_parallelism().map_or(1, NonZero::get).div_ceil(2));

/// Spinning for bytes before sleeping.
///
/// Waking a sleeping thread on another core costs more than the rest of a small request, and the
/// sending peer pays for it. After an answer the thread therefore keeps polling for a moment. It
/// yields the processor at every look, so that other threads, above all the peer, run first. The
/// thread spins only while that pays: if no byte comes within the window, it sleeps. The next time
/// it sleeps at once, until bytes again come that quickly. An idle connection thus uses no
/// processor time.
#[derive(Debug)]
pub(crate) struct Lookout {
    pays: bool,
}

impl Lookout {
    pub(crate) fn new() -> Self {
        // Computed here because that allocates, and the page path must not.
        LazyLock::force(&MOST);
        Self { pays: false }
    }

    /// Receives with `recv`, which must not block, as soon as `socket` has bytes, but not after the
    /// deadline. The deadline also cuts off a peer that never stops sending.
    ///
    /// Sleeps in poll(2), not in a receive. A unix socket also wakes a receiver when the peer has
    /// read our bytes, and that receiver then finds nothing.
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

/// A spinning thread, counted in [`LOOKING`] until dropped.
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

/// Sleeps until the socket is ready or a signal arrives. Returns the error `WouldBlock` at the
/// deadline.
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
