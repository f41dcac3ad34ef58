//! A guest's figures, from its kernel's files.

mod blocks;
mod parse;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use aquifer_page::Bytes;

pub(crate) use blocks::Blocks;
pub use blocks::Online;

use crate::message::{BlockSizes, GuestReport};

/// Size of the buffer, in bytes: more than any of the files holds.
const ROOM: usize = 64 << 10;

/// How long a count of blocks stays valid while their number and the kernel's memory are unchanged.
/// A count reads a file for each block.
const COUNTED: Duration = Duration::from_secs(10);

/// A count of the blocks.
#[derive(Debug)]
struct Counted {
    count: BlockSizes,
    at: Instant,
    /// The kernel's memory at that time, which changes when blocks go online or offline.
    total: Bytes,
    /// [`Blocks::links`] at that time, which changes when blocks are added or removed.
    links: u64,
}

/// A reader of a guest's figures. The reader keeps the files open: near out-of-memory, opening them
/// may take long.
#[derive(Debug)]
pub(crate) struct Figures {
    meminfo: File,
    vmstat: File,
    /// `None` if the kernel has no PSI.
    pressure: Option<File>,
    blocks: Blocks,
    counted: Option<Counted>,
    buffer: Vec<u8>,
    page: u64,
}

impl Figures {
    /// Opens the files under the root directory `root`.
    ///
    /// # Errors
    /// If `proc/meminfo` or `proc/vmstat` cannot be opened.
    pub(crate) fn open(root: &Path) -> io::Result<Self> {
        Ok(Self {
            meminfo: File::open(root.join("proc/meminfo"))?,
            vmstat: File::open(root.join("proc/vmstat"))?,
            pressure: File::open(root.join("proc/pressure/memory")).ok(),
            blocks: Blocks::new(root),
            counted: None,
            buffer: vec![0; ROOM],
            page: rustix::param::page_size() as u64,
        })
    }

    /// Reads only `/proc/meminfo` into `report`, which is cheap.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(crate) fn sample(&mut self, report: &mut GuestReport) -> io::Result<()> {
        parse::meminfo(read(&self.meminfo, &mut self.buffer)?, report);
        Ok(())
    }

    /// Reads all figures. The count of memory blocks may be some seconds old if the kernel's memory
    /// is unchanged.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub(crate) fn read(&mut self) -> io::Result<GuestReport> {
        let mut report = GuestReport::default();
        self.sample(&mut report)?;
        parse::vmstat(read(&self.vmstat, &mut self.buffer)?, self.page, &mut report);
        if let Some(pressure) = &self.pressure
            && let Ok(text) = read(pressure, &mut self.buffer)
        {
            report.stalls = parse::stalls(text);
        }
        report.blocks = self.count(report.total);
        Ok(report)
    }

    fn count(&mut self, total: Bytes) -> BlockSizes {
        let links = self.blocks.links();
        if let Some(counted) = &self.counted
            && (counted.total, counted.links) == (total, links)
            && counted.at.elapsed() < COUNTED
            // Offline blocks are about to change: the agent, the kernel or udev brings them online.
            && counted.count.offline == Bytes::ZERO
        {
            return counted.count;
        }
        let count = self.blocks.count();
        self.counted = Some(Counted { count, at: Instant::now(), total, links });
        count
    }

    /// Brings all blocks online, and then reads all figures.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub(crate) fn check(&mut self, online: Online) -> io::Result<GuestReport> {
        let left = self.blocks.bring_online(online);
        if left > 0 {
            eprintln!(
                "aquifer-guest: cannot bring {left} memory blocks online: see the kernel's log"
            );
        }
        self.counted = None;
        self.read()
    }
}

fn read<'a>(file: &File, buffer: &'a mut [u8]) -> io::Result<&'a str> {
    let mut len = 0;
    // Such files may return a page at a time.
    while len < buffer.len() {
        match file.read_at(&mut buffer[len..], len as u64)? {
            0 => break,
            more => len += more,
        }
    }
    str::from_utf8(&buffer[..len]).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::fs;

    use super::*;

    #[test]
    fn an_added_block_is_counted_at_once_even_while_offline() {
        let root = tempfile::tempdir().unwrap();
        let blocks = root.path().join("sys/devices/system/memory");
        fs::create_dir_all(blocks.join("memory0")).unwrap();
        fs::create_dir(root.path().join("proc")).unwrap();
        for (file, text) in [
            ("proc/meminfo", "MemTotal: 131072 kB\n"),
            ("proc/vmstat", ""),
            ("sys/devices/system/memory/block_size_bytes", "8000000\n"),
            ("sys/devices/system/memory/memory0/state", "online\n"),
        ] {
            fs::write(root.path().join(file), text).unwrap();
        }
        let mut figures = Figures::open(root.path()).unwrap();
        assert_eq!(figures.read().unwrap().blocks.offline, Bytes::ZERO);
        fs::create_dir(blocks.join("memory1")).unwrap();
        fs::write(blocks.join("memory1/state"), "offline\n").unwrap();
        let BlockSizes { online, offline, .. } = figures.read().unwrap().blocks;
        assert_eq!((online, offline), (Bytes::mib(128), Bytes::mib(128)));
        assert_eq!(figures.check(Online::Movable).unwrap().total, Bytes::mib(128));
        assert_eq!(fs::read_to_string(blocks.join("memory1/state")).unwrap(), "online_movable");
    }

    #[test]
    fn this_machine_has_figures() {
        let report = Figures::open(Path::new("/")).unwrap().read().unwrap();
        assert!(report.total > Bytes::mib(1));
        assert!(report.available <= report.total);
    }
}
