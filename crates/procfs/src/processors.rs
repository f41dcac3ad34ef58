//! Use of all processors together.

/// Time of all processors since boot, in clock ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessorTimes {
    /// The time in use.
    pub busy: u64,
    /// All time.
    pub total: u64,
}

/// Returns the times in the text of `/proc/stat` (proc_stat(5)).
pub fn processor_times(text: &str) -> Option<ProcessorTimes> {
    let figures = text.lines().next()?.strip_prefix("cpu ")?;
    // user nice system idle iowait irq softirq steal; user contains the guests' time.
    let times: Vec<u64> =
        figures.split_whitespace().take(8).filter_map(|time| time.parse().ok()).collect();
    let idle = times.get(3)? + times.get(4)?;
    let total: u64 = times.iter().sum();
    Some(ProcessorTimes { busy: total.saturating_sub(idle), total })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_for_a_disk_is_not_use() {
        let text = "cpu  10 1 5 80 4 2 3 5 7 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n";
        assert_eq!(processor_times(text), Some(ProcessorTimes { busy: 26, total: 110 }));
        assert_eq!(processor_times("intr 5"), None);
    }

    #[test]
    fn this_host_has_used_its_processors() {
        let times = processor_times(&crate::read("/proc/stat").unwrap()).unwrap();
        assert!(times.busy > 0 && times.busy <= times.total);
    }
}
