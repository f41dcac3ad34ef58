//! A guest's figures, as its kernel has them.

mod blocks;
mod parse;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use aquifer_page::Bytes;

pub use blocks::Online;
pub(crate) use blocks::{Blocks, Count};

use crate::message::Report;

/// More than any of the files has.
const ROOM: usize = 64 << 10;

/// After how long blocks are counted again, if there are as many and the kernel's memory is the same: there is a file for each.
const COUNTED: Duration = Duration::from_secs(10);

/// Blocks as they were counted.
#[derive(Debug)]
struct Counted {
    count: Count,
    at: Instant,
    /// The kernel's memory, which changes with what comes online or goes.
    total: Bytes,
    /// [`Blocks::links`], which changes with what is added or removed.
    links: u64,
}

/// Reads a guest's figures, from files that it keeps open: near out-of-memory, to look for them may take long.
#[derive(Debug)]
pub(crate) struct Figures {
    meminfo: File,
    vmstat: File,
    /// There is none in a kernel without PSI.
    pressure: Option<File>,
    blocks: Blocks,
    counted: Option<Counted>,
    buffer: Vec<u8>,
    page: u64,
}

impl Figures {
    /// Those of the kernel whose root directory is `root`.
    ///
    /// # Errors
    /// If there is no `/proc`.
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

    /// What memory there is and how much of it is available; all else is left as it was. Cheap.
    ///
    /// # Errors
    /// If the kernel does not say.
    pub(crate) fn sample(&mut self, report: &mut Report) -> io::Result<()> {
        parse::meminfo(read(&self.meminfo, &mut self.buffer)?, report);
        Ok(())
    }

    /// All of them; memory blocks as they were counted some seconds ago, if the kernel has as much memory as then.
    ///
    /// # Errors
    /// If the kernel does not say.
    pub(crate) fn read(&mut self) -> io::Result<Report> {
        let mut report = Report::default();
        self.sample(&mut report)?;
        parse::vmstat(read(&self.vmstat, &mut self.buffer)?, self.page, &mut report);
        if let Some(pressure) = &self.pressure
            && let Ok(text) = read(pressure, &mut self.buffer)
        {
            parse::pressure(text, &mut report);
        }
        let count = self.count(report.total);
        Ok(Report { online: count.online, offline: count.offline, block: count.block, ..report })
    }

    fn count(&mut self, total: Bytes) -> Count {
        let links = self.blocks.links();
        if let Some(counted) = &self.counted
            && (counted.total, counted.links) == (total, links)
            && counted.at.elapsed() < COUNTED
            // What is offline is so for a moment only, or will be brought online by somebody.
            && counted.count.offline == Bytes::ZERO
        {
            return counted.count;
        }
        let count = self.blocks.count();
        self.counted = Some(Counted { count, at: Instant::now(), total, links });
        count
    }

    /// All of them, after what memory is there was brought online.
    ///
    /// # Errors
    /// If the kernel does not say.
    pub(crate) fn check(&mut self, online: Online) -> io::Result<Report> {
        let left = self.blocks.bring_online(online);
        if left > 0 {
            eprintln!(
                "aquifer-guest: {left} memory blocks cannot be brought online: the kernel's log says why"
            );
        }
        self.counted = None;
        self.read()
    }
}

fn read<'a>(file: &File, buffer: &'a mut [u8]) -> io::Result<&'a str> {
    let mut len = 0;
    // Such files may give a page at a time.
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
    fn a_block_that_is_added_is_counted_at_once_though_it_is_of_no_use_yet() {
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
        assert_eq!(figures.read().unwrap().offline, Bytes::ZERO);
        fs::create_dir(blocks.join("memory1")).unwrap();
        fs::write(blocks.join("memory1/state"), "offline\n").unwrap();
        let report = figures.read().unwrap();
        assert_eq!((report.online, report.offline), (Bytes::mib(128), Bytes::mib(128)));
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
