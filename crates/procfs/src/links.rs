//! Traffic and speed of network interfaces.

use aquifer_page::Bytes;

/// What an interface carried since it exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkTraffic {
    /// Bytes that it received.
    pub received: Bytes,
    /// Bytes that it sent.
    pub sent: Bytes,
}

/// Returns an interface's traffic in the text of `/proc/net/dev` (proc_pid_net(5)).
pub fn link_traffic(text: &str, interface: &str) -> Option<LinkTraffic> {
    let is_it = |line: &&str| line.trim_start().starts_with(&format!("{interface}:"));
    let (_, figures) = text.lines().find(is_it)?.split_once(':')?;
    let mut figures = figures.split_whitespace().map(str::parse);
    let (received, sent) = (figures.next()?.ok()?, figures.nth(7)?.ok()?);
    Some(LinkTraffic { received: Bytes(received), sent: Bytes(sent) })
}

/// Returns the speed in the text of `/sys/class/net/INTERFACE/speed`, in bytes a second and one
/// direction. `None` if the driver does not know it, as with most virtual interfaces.
pub fn link_speed(text: &str) -> Option<Bytes> {
    let megabits: u64 = text.trim().parse().ok().filter(|megabits| *megabits > 0)?;
    // Some drivers write -1 as an unsigned number.
    (megabits < u64::from(u32::MAX)).then(|| Bytes(megabits * 125_000))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEV: &str = "\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo
    lo: 100 1 0 0 0 0 0 0 100 1 0 0 0 0 0 0
  eth0:2000 9 0 0 0 0 0 0 3000 8 0 0 0 0 0 0
eth0.5: 7 1 0 0 0 0 0 0 8 1 0 0 0 0 0 0
";

    #[test]
    fn an_interface_is_found_by_its_whole_name() {
        let of = |received, sent| LinkTraffic { received: Bytes(received), sent: Bytes(sent) };
        assert_eq!(link_traffic(DEV, "eth0"), Some(of(2000, 3000)));
        assert_eq!(link_traffic(DEV, "eth0.5"), Some(of(7, 8)));
        assert_eq!(link_traffic(DEV, "eth"), None);
    }

    #[test]
    fn a_speed_is_known_only_if_the_driver_knows_it() {
        assert_eq!(link_speed("10000\n"), Some(Bytes(1_250_000_000)));
        for unknown in ["-1\n", "4294967295", "0", ""] {
            assert_eq!(link_speed(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn this_host_has_a_loopback_interface() {
        assert!(link_traffic(&crate::read("/proc/self/net/dev").unwrap(), "lo").is_some());
    }
}
