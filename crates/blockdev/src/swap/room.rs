//! The check that swapoff can succeed.

use std::path::Path;

use aquifer_page::Bytes;
use aquifer_procfs::available_memory;

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
