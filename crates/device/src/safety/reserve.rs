//! Memory for the swap path when no other memory is free.
//!
//! A page goes to its lender over a socket, and the socket allocates memory for it. When memory has
//! run out, the kernel lets that allocation wait for free memory. But memory is freed only when
//! pages reach lenders, so the host would hang. The kernel keeps a reserve, `vm.min_free_kbytes`.
//! Real-time threads may use up to half of it without waiting (`gfp_to_alloc_flags` and
//! `__zone_watermark_ok` in `mm/page_alloc.c`).

use std::fs;
use std::io;

use aquifer_page::Bytes;

use crate::sys;

const MIN_FREE: &str = "/proc/sys/vm/min_free_kbytes";

/// Reserve for the data in flight. Outgoing data is the largest requests of a few workers, plus
/// half as much for the kernel's overhead. The reserve is twice that, plus incoming data. Hosts
/// with more than half a gigabyte have more by default.
const RESERVE: Bytes = Bytes::mib(8);

/// Largest part of a small host's memory: one 16th.
const LARGEST_SHARE: u64 = 16;

/// Lets the calling thread, and the threads that it starts, use the reserve.
pub(super) fn enter() -> io::Result<()> {
    sys::real_time_priority().map_err(super::needs("CAP_SYS_NICE"))
}

/// Raises the host's reserve to the size that the swap path needs, and never lowers it. The value
/// stays after the process has ended.
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
