//! The check that swapoff can succeed.

use std::io;
use std::path::Path;

use aquifer_page::Bytes;

use super::{SwapError, swaps};

/// Returns the bytes swapped out to the device. Fails if they do not fit into available memory and
/// other swap, as swapoff would then fail after a long time.
pub(crate) fn check_room(device: &Path) -> Result<Bytes, SwapError> {
    let fail = |source| SwapError::Off {
        device: device.to_owned(),
        source,
        help: "check /proc/swaps and /proc/meminfo",
    };
    let swaps = swaps().map_err(fail)?;
    let used = swaps.iter().find(|swap| swap.path == device).map_or(Bytes::ZERO, |swap| swap.used);
    let others: Bytes =
        swaps.iter().filter(|swap| swap.path != device).map(|swap| swap.size - swap.used).sum();
    if used > available_memory().map_err(fail)? + others {
        return Err(SwapError::NoRoom { device: device.to_owned(), used });
    }
    Ok(used)
}

/// Returns the kernel's estimate of available memory.
fn available_memory() -> io::Result<Bytes> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    text.lines()
        .find_map(|line| {
            line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim().parse().ok()
        })
        .map(Bytes::kib)
        .ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "/proc/meminfo has no MemAvailable")
        })
}
