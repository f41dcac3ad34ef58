//! Memory for the swap path when there is none.
//!
//! A page goes to its lender over a socket, and the socket takes memory for it. When memory has run out the kernel makes
//! that wait until some is free, and it becomes free by pages going to lenders: the host stands still for ever. The kernel
//! sets a reserve aside, `vm.min_free_kbytes`; of it, threads of real-time priority may have half without waiting
//! (`gfp_to_alloc_flags` and `__zone_watermark_ok` in its `mm/page_alloc.c`).

use std::fs;
use std::io;

use aquifer_page::Bytes;

use crate::sys;

const MIN_FREE: &str = "/proc/sys/vm/min_free_kbytes";

/// Twice what goes out at a time (a few workers' largest requests, and half as much again for what the kernel keeps
/// with them), and what comes in meanwhile. Hosts with more than half a gigabyte have more by default.
const RESERVE: Bytes = Bytes::mib(8);

/// No more than this part of a small host's memory.
const LARGEST_SHARE: u64 = 16;

/// Lets the calling thread, and those that it starts, have what ordinary threads must wait for.
pub(super) fn enter() -> io::Result<()> {
    sys::real_time_priority().map_err(super::needs("CAP_SYS_NICE"))
}

/// Raises the host's reserve to what the swap path needs; it stays so. One that is larger already is left alone.
pub(crate) fn fill() -> io::Result<()> {
    let host = rustix::system::sysinfo();
    let total = Bytes(host.totalram * u64::from(host.mem_unit));
    let wanted = RESERVE.min(Bytes(total.0 / LARGEST_SHARE)).0 >> 10;
    let now: u64 = fs::read_to_string(MIN_FREE)?.trim().parse().map_err(io::Error::other)?;
    if now >= wanted {
        return Ok(());
    }
    fs::write(MIN_FREE, wanted.to_string()).map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("{error}; set vm.min_free_kbytes from {now} to {wanted}"),
        )
    })
}
