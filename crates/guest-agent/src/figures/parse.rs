//! Parsers of the kernel's files in `/proc` and `/sys`.

use aquifer_page::Bytes;
use aquifer_procfs::{fields, pressure};

use crate::message::{GuestReport, Stalls};

/// Reads the text of `/proc/meminfo` (proc_meminfo(5)) into `report`.
pub(crate) fn meminfo(text: &str, report: &mut GuestReport) {
    let mut swap_free = Bytes::ZERO;
    for (name, kib) in fields(text) {
        let field = match name {
            "MemTotal" => &mut report.total,
            "MemFree" => &mut report.free,
            "MemAvailable" => &mut report.available,
            "SwapTotal" => &mut report.swap_total,
            "SwapFree" => &mut swap_free,
            _ => continue,
        };
        *field = Bytes(kib.saturating_mul(1024));
    }
    report.swap_used = report.swap_total.saturating_sub(swap_free);
}

/// Reads the text of `/proc/vmstat` (proc_vmstat(5)) into `report`. `page` is the size of a page in
/// bytes.
pub(crate) fn vmstat(text: &str, page: u64, report: &mut GuestReport) {
    for (name, count) in fields(text) {
        let (field, unit) = match name {
            "pswpin" => (&mut report.swap_in, page),
            "pswpout" => (&mut report.swap_out, page),
            "oom_kill" => (&mut report.oom_kills, 1),
            _ => continue,
        };
        *field = count.saturating_mul(unit);
    }
}

/// Parses the text of `/proc/pressure/memory` (kernel's accounting/psi.rst).
pub(crate) fn stalls(text: &str) -> Stalls {
    Stalls {
        pressure_some: pressure(text, "some", "avg10"),
        pressure_full: pressure(text, "full", "avg10"),
        stalled_us: pressure(text, "some", "total"),
    }
}

/// Parses the number in `block_size_bytes`: hexadecimal, without a prefix.
pub(crate) fn block_size(text: &str) -> Option<Bytes> {
    u64::from_str_radix(text.trim(), 16).ok().filter(|size| *size > 0).map(Bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_the_kernels_files() {
        let mut report = GuestReport::default();
        meminfo(
            "MemTotal:         466804 kB\nMemFree:          391044 kB\n\
             MemAvailable:     383100 kB\nSwapCached:            0 kB\n\
             SwapTotal:         65532 kB\nSwapFree:          61436 kB\nHugePages_Total:       0\n",
            &mut report,
        );
        vmstat(
            "nr_free_pages 97761\npswpin 10\npswpout 1024\noom_kill 2\noom_kill_x 7\n",
            4096,
            &mut report,
        );
        report.stalls = stalls(
            "some avg10=1.53 avg60=0.40 avg300=0.09 total=123456\n\
             full avg10=0.25 avg60=0.10 avg300=0.02 total=65432\n",
        );
        let expected = GuestReport {
            total: Bytes::kib(466_804),
            free: Bytes::kib(391_044),
            available: Bytes::kib(383_100),
            swap_total: Bytes::kib(65_532),
            swap_used: Bytes::kib(4096),
            swap_in: 40_960,
            swap_out: 4 << 20,
            oom_kills: 2,
            stalls: Stalls {
                pressure_some: Some(1.53),
                pressure_full: Some(0.25),
                stalled_us: Some(123_456),
            },
            ..GuestReport::default()
        };
        assert_eq!(report, expected);
    }

    #[test]
    fn figures_that_the_kernel_lacks_are_zero_or_none() {
        let mut report = GuestReport::default();
        meminfo("", &mut report);
        vmstat("oom_kill many\n", 4096, &mut report);
        assert_eq!(stalls(""), Stalls::default());
        assert_eq!(report, GuestReport::default());
    }

    #[test]
    fn a_block_size_is_hexadecimal() {
        assert_eq!(block_size("8000000\n"), Some(Bytes::mib(128)));
        assert_eq!(block_size("0\n"), None);
        assert_eq!(block_size("many\n"), None);
    }
}
