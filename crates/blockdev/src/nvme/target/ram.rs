//! RAM as a block device: zram or brd.

use std::io;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::{Bytes, PAGE_SIZE};

use super::super::{NvmeError, Root};
use crate::backend::exclusive;

const ZRAM_CONTROL: &str = "/sys/class/zram-control";

/// Time for which another process, such as udev probing new devices, may hold a device that is to
/// be removed.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A RAM disk of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ram {
    /// `/dev/zramN`, hot-added for a target. It stores its pages compressed and frees them when
    /// they are discarded.
    Zram(u32),
    /// `/dev/ramN`, created when the module was loaded. Pages once written keep their RAM.
    Brd(u32),
}

impl Ram {
    /// Hot-adds a zram device, still without a size. Without zram, returns an unused brd disk of at
    /// least `capacity`.
    pub(super) fn add(root: &Root, capacity: Bytes) -> Result<Self, NvmeError> {
        match root.read(format!("{ZRAM_CONTROL}/hot_add")) {
            Some(number) => {
                let bad = |_| NvmeError::new(format!("zram returned no device number: '{number}'"));
                Ok(Self::Zram(number.parse().map_err(bad)?))
            }
            None => Self::of_brd(root, capacity),
        }
    }

    fn of_brd(root: &Root, capacity: Bytes) -> Result<Self, NvmeError> {
        let blocks = root.names("/sys/block").map_err(NvmeError::io("cannot read /sys/block"))?;
        let disks: Vec<_> =
            blocks.iter().filter_map(|name| number(name, "ram")).map(Self::Brd).collect();
        if disks.is_empty() {
            let why = "neither zram nor brd is loaded, or only root may use them";
            return Err(NvmeError::new(why).help("modprobe zram, as root"));
        }
        let fits = |disk: &Self| {
            disk.size(root) >= capacity && exclusive::open(&root.path(disk.device())).is_ok()
        };
        disks.into_iter().find(fits).ok_or_else(|| {
            NvmeError::new(format!("zram is not loaded, and brd has no free disk of {capacity}"))
                .help(format!(
                    "modprobe zram, or modprobe brd rd_nr=1 rd_size={}",
                    capacity.0 >> 10
                ))
        })
    }

    /// Returns the RAM disk with this device node.
    pub(super) fn of_device(path: &str) -> Option<Self> {
        let name = path.strip_prefix("/dev/")?;
        number(name, "zram").map(Self::Zram).or_else(|| number(name, "ram").map(Self::Brd))
    }

    /// Returns the device node.
    pub(super) fn device(self) -> PathBuf {
        PathBuf::from(format!("/dev/{}", self.name()))
    }

    /// Returns the size that the kernel reports, zero if it is unknown.
    pub(super) fn size(self, root: &Root) -> Bytes {
        let sectors = root.read(format!("/sys/block/{}/size", self.name()));
        Bytes(sectors.and_then(|text| text.parse::<u64>().ok()).unwrap_or(0) * 512)
    }

    /// Returns the RAM that the disk takes: for zram all its memory, for brd its size.
    pub(super) fn stored(self, root: &Root) -> Bytes {
        let Self::Zram(_) = self else { return self.size(root) };
        // The third number of mm_stat is mem_used_total
        // (Documentation/admin-guide/blockdev/zram.rst).
        let counts = root.read(format!("/sys/block/{}/mm_stat", self.name())).unwrap_or_default();
        Bytes(counts.split_whitespace().nth(2).and_then(|count| count.parse().ok()).unwrap_or(0))
    }

    /// Sets a zram device's size, rounded to whole pages, and its RAM limit.
    pub(super) fn set_size(
        self,
        root: &Root,
        capacity: Bytes,
        quota: Option<Bytes>,
    ) -> Result<(), NvmeError> {
        let Self::Zram(_) = self else { return Ok(()) };
        let set = |attribute: &str, value: Bytes| {
            let written =
                root.write(format!("/sys/block/{}/{attribute}", self.name()), &value.0.to_string());
            written.map_err(NvmeError::io(format_args!(
                "cannot set the {attribute} of {}",
                self.device().display()
            )))
        };
        set("disksize", Bytes(capacity.pages() * PAGE_SIZE as u64))?;
        quota.map_or(Ok(()), |quota| set("mem_limit", quota))
    }

    /// Removes a zram device with its content. A brd disk stays, with its RAM.
    pub(super) fn remove(self, root: &Root) -> Result<(), NvmeError> {
        let Self::Zram(number) = self else { return Ok(()) };
        let reset = format!("/sys/block/{}/reset", self.name());
        let removed = once_idle(|| root.write(&reset, "1")).and_then(|()| {
            once_idle(|| root.write(format!("{ZRAM_CONTROL}/hot_remove"), &number.to_string()))
        });
        match removed {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed
                .map_err(NvmeError::io(format_args!("cannot remove {}", self.device().display()))),
        }
    }

    fn name(self) -> String {
        match self {
            Self::Zram(number) => format!("zram{number}"),
            Self::Brd(number) => format!("ram{number}"),
        }
    }
}

fn number(name: &str, kind: &str) -> Option<u32> {
    name.strip_prefix(kind)?.parse().ok()
}

/// Retries a step while the device is in use, up to the timeout.
fn once_idle(mut step: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match step() {
            Err(error)
                if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline =>
            {
                thread::sleep(Duration::from_millis(20));
            }
            result => return result,
        }
    }
}
