//! Memory figures of the whole host, from `/proc/meminfo`.

use std::io;
use std::path::Path;

use aquifer_page::Bytes;

use super::{Reading, field, read_file};

/// `/proc/meminfo`, see proc_meminfo(5).
#[derive(Clone, Copy, Debug)]
pub struct Meminfo;

impl Meminfo {
    pub(super) fn read(self) -> io::Result<Reading> {
        parse(&read_file(Path::new("/proc/meminfo"))?)
    }
}

fn parse(text: &str) -> io::Result<Reading> {
    let kib = |key: &str| {
        let missing = || {
            io::Error::new(io::ErrorKind::InvalidData, format!("/proc/meminfo has no line '{key}'"))
        };
        field(text, key).map(Bytes::kib).ok_or_else(missing)
    };
    let total = kib("MemTotal")?;
    // M_c, "page cache and slabs" ([Ge23], Table 1), less the shared memory that the kernel counts
    // in it.
    let cache = (kib("Cached")? + kib("SReclaimable")?).saturating_sub(kib("Shmem")?);
    let unused = kib("MemFree")? + kib("Buffers")? + cache;
    let swap_used = kib("SwapTotal")?.saturating_sub(kib("SwapFree")?);
    Ok(Reading { total, used: total.saturating_sub(unused), swap_used })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn used_leaves_out_cache_and_slabs_but_not_shared_memory() {
        let text = "MemTotal: 1000 kB\nMemFree: 300 kB\nBuffers: 50 kB\nCached: 250 kB\n\
                    Shmem: 100 kB\nSReclaimable: 20 kB\nSUnreclaim: 30 kB\nSwapTotal: 64 kB\n\
                    SwapFree: 4 kB\n";
        let reading = parse(text).unwrap();
        assert_eq!(reading.total, Bytes::kib(1000));
        assert_eq!(reading.used, Bytes::kib(1000 - 300 - 50 - (250 - 100) - 20));
        assert_eq!(reading.swap_used, Bytes::kib(60));
    }

    #[test]
    fn a_missing_line_is_named() {
        assert!(parse("MemTotal: 1 kB\n").unwrap_err().to_string().contains("'Cached'"));
    }

    #[test]
    fn this_host_can_be_read() {
        let reading = Meminfo.read().unwrap();
        assert!(reading.used > Bytes::ZERO && reading.used < reading.total, "{reading:?}");
    }
}
