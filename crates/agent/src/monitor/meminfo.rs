//! Memory figures of the whole host, from `/proc/meminfo`.

use std::io;

use aquifer_procfs::memory;

use super::Reading;

pub(super) fn read() -> io::Result<Reading> {
    parse(&aquifer_procfs::read("/proc/meminfo")?)
}

fn parse(text: &str) -> io::Result<Reading> {
    let get = |name| memory(text, name);
    let total = get("MemTotal")?;
    // M_c, "page cache and slabs" ([Ge23], Table 1), less the shared memory that the kernel counts
    // in it.
    let cache = (get("Cached")? + get("SReclaimable")?).saturating_sub(get("Shmem")?);
    let unused = get("MemFree")? + get("Buffers")? + cache;
    let swap_used = get("SwapTotal")?.saturating_sub(get("SwapFree")?);
    Ok(Reading { total, used: total.saturating_sub(unused), swap_used })
}

#[cfg(test)]
mod tests {
    use aquifer_page::Bytes;

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
        let reading = read().unwrap();
        assert!(reading.used > Bytes::ZERO && reading.used < reading.total, "{reading:?}");
    }
}
