//! Memory for the swap path when no other memory is free.
//!
//! A page goes to its lender over a socket, and the socket takes memory for it. When no memory is
//! free, the kernel makes that wait until a page has gone to a lender: the host hangs. The kernel
//! keeps a reserve, `vm.min_free_kbytes`. Threads of real-time priority may take half of it without
//! waiting, before Linux 6.3 a quarter (`gfp_to_alloc_flags` and `__zone_watermark_ok` in
//! `mm/page_alloc.c`).
//!
//! When the kernel mixes pages of different mobility, it raises the reserve for a while
//! (`boost_watermark`), and with it the part that these threads may not touch. The kernel lowers it
//! again when it has freed memory, so never while it waits for these threads. A guest of Linux 6.1
//! hung like this with twelve megabytes free. Without the boost (`vm.watermark_boost_factor` = 0)
//! the kernel keeps its pages less well apart and is otherwise as it was before Linux 5.0.

use std::fs;
use std::io;

use aquifer_page::Bytes;
use aquifer_procfs::number;

use crate::sys;

const MIN_FREE: &str = "/proc/sys/vm/min_free_kbytes";

const BOOST_FACTOR: &str = "/proc/sys/vm/watermark_boost_factor";

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
    let now = number(MIN_FREE)?;
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

/// Stops the kernel from raising the reserve. The setting stays after the process has ended.
///
/// # Errors
/// Fails if the setting cannot be read or written. A kernel without it is no error.
pub(super) fn hold() -> io::Result<()> {
    match fs::read_to_string(BOOST_FACTOR) {
        // Linux 5.0 was the first to have it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Ok(factor) if factor.trim() == "0" => Ok(()),
        read => read.and_then(|_| fs::write(BOOST_FACTOR, "0")).map_err(|error| {
            io::Error::new(error.kind(), format!("{error}; set vm.watermark_boost_factor to 0"))
        }),
    }
}
