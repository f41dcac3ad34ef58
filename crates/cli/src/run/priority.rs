//! The swap priority of a run: above all other swap of this host, so that its pages go nowhere
//! else.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_blockdev::swap::{MAX_PRIORITY, Swap, swaps};

use crate::failure::{Failure, OrFail, Result};
use crate::volumes::PRIORITY;

/// How long another run may take from its choice to swapon: its agent asks lenders in turn.
const LIMIT: Duration = Duration::from_secs(150);

const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A priority that no other run chooses while this value lives.
#[derive(Debug)]
pub struct Choice {
    /// The priority, from 0 to 32767.
    pub priority: u16,
    /// Held until the swap is on, so that the next run sees it.
    _lock: Option<File>,
}

impl Choice {
    /// Takes `wished`, or else the lowest priority above all swap of this host. Runs with the same
    /// run directory wait for each other.
    ///
    /// # Errors
    /// If other swap has the kernel's highest priority, or if another run holds the lock for too
    /// long.
    pub fn make(run_dir: &Path, wished: Option<u16>) -> Result<Self> {
        if let Some(priority) = wished {
            return Ok(Self { priority, _lock: None });
        }
        let what = || "choosing a swap priority for the command";
        let lock = lock(&run_dir.join("priority.lock"))?;
        let priority = above(&swaps().or_fail(what)?).map_err(|highest| {
            let device = highest.path.display();
            let why = format!(
                "{device} has the highest possible priority, {MAX_PRIORITY}: pages of the command \
                 would go there too, and it would die with {device}"
            );
            let help = format!(
                "turn that swap off ('swapoff {device}'), or accept the risk with --priority N"
            );
            Failure::new(what(), why).help(help)
        })?;
        Ok(Self { priority, _lock: Some(lock) })
    }
}

/// Returns the lowest priority above these and above the default of agents and 'aquifer volume
/// attach'. If there is none, returns the swap with the highest.
fn above(swaps: &[Swap]) -> Result<u16, &Swap> {
    let Some(highest) = swaps.iter().max_by_key(|swap| swap.priority) else {
        return Ok(PRIORITY + 1);
    };
    let above = highest.priority.max(PRIORITY.into()) + 1;
    u16::try_from(above).ok().filter(|above| *above <= MAX_PRIORITY).ok_or(highest)
}

fn lock(path: &Path) -> Result<File> {
    let what = || format!("locking {}", path.display());
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).or_fail(what)?;
    }
    let mut options = OpenOptions::new();
    let file =
        options.write(true).create(true).truncate(false).mode(0o600).open(path).or_fail(what)?;
    let deadline = Instant::now() + LIMIT;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                thread::sleep(LOCK_POLL_INTERVAL)
            }
            Err(TryLockError::WouldBlock) => {
                let why = "another 'aquifer run' holds the lock and still waits for its memory";
                let help = "end that run, or choose a swap priority with --priority N";
                return Err(Failure::new(what(), why).help(help));
            }
            Err(TryLockError::Error(error)) => return Err(error).or_fail(what),
        }
    }
}

#[cfg(test)]
mod tests {
    use aquifer_page::Bytes;

    use super::*;

    fn swap(priority: i32) -> Swap {
        let path = format!("/dev/{priority}").into();
        Swap { path, size: Bytes::mib(1), used: Bytes::ZERO, priority }
    }

    #[test]
    fn a_run_comes_before_all_swap_and_before_defaults() {
        for (others, own) in [
            (&[][..], 101),
            (&[-2], 101),
            (&[100, 5], 101),
            (&[5, 300, -2], 301),
            (&[32_766], 32_767),
        ] {
            let swaps: Vec<_> = others.iter().copied().map(swap).collect();
            assert_eq!(above(&swaps), Ok(own), "{others:?}");
        }
        let full = [swap(3), swap(32_767)];
        assert_eq!(above(&full), Err(&full[1]));
    }
}
