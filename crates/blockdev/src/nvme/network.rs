//! The check whether swap over a network can hang this host.
//!
//! A page is free only once the reply to its write has arrived. To receive that reply, the network
//! card needs a buffer, which the kernel takes from free memory. If only the reserve
//! (`vm.min_free_kbytes`) is left and is too small for those buffers, no reply arrives. No page is
//! then freed: the host hangs.
//!
//! The size of the buffers follows from the MTU. Between two guests (virtio-net), swap over
//! nvme-tcp hung in every run with an MTU of 9000 bytes. The reserve was 1.7 MB, the default of a
//! small host. With a reserve of 16 MiB, or with an MTU of 1500 bytes, swap never hung.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use aquifer_page::Bytes;

use super::Root;

/// The largest MTU, in bytes, with which swap never hung, whatever the reserve.
pub const ORDINARY_MTU: u32 = 1500;

/// The reserve with which swap never hung, whatever the MTU.
pub const SAFE_RESERVE: Bytes = Bytes::mib(16);

/// A network interface over which swap may hang this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Danger {
    /// The network interface.
    pub interface: String,
    /// The MTU of the interface, in bytes.
    pub mtu: u32,
    /// The kernel's reserve, `vm.min_free_kbytes`.
    pub reserve: Bytes,
}

impl Danger {
    /// Describes the danger.
    pub fn why(&self) -> String {
        let Self { interface, mtu, reserve } = self;
        format!(
            "{interface} has an MTU of {mtu} bytes and vm.min_free_kbytes is {reserve}: \
             swap over it may hang this host when memory runs out"
        )
    }

    /// Returns the remedy.
    pub fn help(&self) -> String {
        let Self { interface, .. } = self;
        format!(
            "sysctl vm.min_free_kbytes={}, or ip link set {interface} mtu {ORDINARY_MTU}",
            SAFE_RESERVE.0 >> 10
        )
    }
}

/// Returns the danger of swapping to `lender` over the interface that leads there. Loopback has
/// none.
pub fn danger(root: &Root, lender: IpAddr) -> Option<Danger> {
    danger_of(root, &interface_to(root, lender)?)
}

/// Returns the danger of each interface, except loopback, that has one.
pub fn dangers(root: &Root) -> Vec<Danger> {
    let interfaces = root.names("/sys/class/net").unwrap_or_default();
    interfaces
        .iter()
        .filter(|name| *name != "lo")
        .filter_map(|name| danger_of(root, name))
        .collect()
}

fn danger_of(root: &Root, interface: &str) -> Option<Danger> {
    let mtu = root.read(format!("/sys/class/net/{interface}/mtu"))?.parse().ok()?;
    let reserve = Bytes::kib(root.read("/proc/sys/vm/min_free_kbytes")?.parse().ok()?);
    let danger = mtu > ORDINARY_MTU && reserve < SAFE_RESERVE;
    danger.then(|| Danger { interface: interface.to_owned(), mtu, reserve })
}

/// Lists the ports of this host's RDMA devices with their state, as `rxe0/1 ACTIVE`.
pub fn rdma_links(root: &Root) -> Vec<String> {
    let class = Path::new("/sys/class/infiniband");
    let devices = root.names(class).unwrap_or_default();
    let links = devices.iter().flat_map(|device| {
        let ports = class.join(device).join("ports");
        let numbers = root.names(&ports).unwrap_or_default();
        numbers.into_iter().map(move |number| {
            let state = root.read(ports.join(&number).join("state")).unwrap_or_default();
            // The file holds, for example, `4: ACTIVE`.
            let state = state.rsplit(' ').next().unwrap_or_default();
            format!("{device}/{number} {state}")
        })
    });
    links.collect()
}

/// Returns the interface through which the main routing table leads to an address, or to the
/// network of one of this host's own. `None` for loopback.
pub fn interface_to(root: &Root, to: IpAddr) -> Option<String> {
    if to.is_loopback() {
        return None;
    }
    let routes: Vec<Route> = match to {
        IpAddr::V4(to) => {
            let table = root.read("/proc/net/route")?;
            table.lines().skip(1).filter_map(|line| route_v4(line, to)).collect()
        }
        IpAddr::V6(to) => {
            let table = root.read("/proc/net/ipv6_route")?;
            table.lines().filter_map(|line| route_v6(line, to)).collect()
        }
    };
    let best = routes.into_iter().max_by_key(|route| (route.prefix, u32::MAX - route.metric));
    best.map(|route| route.interface)
}

/// A route that leads to a given address.
struct Route {
    prefix: u32,
    metric: u32,
    interface: String,
}

const ROUTE_UP: u32 = 1;
const ROUTE_REJECT: u32 = 0x200;

/// Parses `Iface Destination Gateway Flags RefCnt Use Metric Mask …`. Addresses are hexadecimal
/// words in network byte order.
fn route_v4(line: &str, to: Ipv4Addr) -> Option<Route> {
    let fields: Vec<_> = line.split_ascii_whitespace().collect();
    let word = |index: usize| u32::from_str_radix(fields.get(index)?, 16).ok();
    let (destination, flags, mask) = (word(1)?, word(3)?, word(7)?);
    let leads = u32::from_ne_bytes(to.octets()) & mask == destination;
    let metric = fields.get(6)?.parse().ok()?;
    let usable = flags & ROUTE_UP != 0 && flags & ROUTE_REJECT == 0;
    (leads && usable).then(|| Route {
        prefix: mask.count_ones(),
        metric,
        interface: fields[0].to_owned(),
    })
}

/// Parses `destination prefix source prefix next-hop metric refcnt use flags interface`, all
/// numbers hexadecimal.
fn route_v6(line: &str, to: Ipv6Addr) -> Option<Route> {
    let fields: Vec<_> = line.split_ascii_whitespace().collect();
    let word = |index: usize| u32::from_str_radix(fields.get(index)?, 16).ok();
    let (prefix, metric, flags) = (word(1)?, word(5)?, word(8)?);
    let destination = u128::from_str_radix(fields.first()?, 16).ok()?;
    let differs =
        (u128::from(to) ^ destination).checked_shr(128_u32.checked_sub(prefix)?).unwrap_or(0);
    let usable = flags & ROUTE_UP != 0 && flags & ROUTE_REJECT == 0;
    let interface = (*fields.get(9)?).to_owned();
    (differs == 0 && usable && interface != "lo").then_some(Route { prefix, metric, interface })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const ROUTES: &str = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\t\
        Mask\t\tMTU\tWindow\tIRTT\n\
        eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
        fast\t00004D0A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";
    const ROUTES_V6: &str = "\
        00000000000000000000000000000000 00 00000000000000000000000000000000 00 \
        fe800000000000000000000000000001 00000400 00000001 00000000 00000003 eth0\n\
        fd000000000000000000000000000000 40 00000000000000000000000000000000 00 \
        00000000000000000000000000000000 00000100 00000001 00000000 00000001 fast\n\
        fd000000000000000000000000000001 80 00000000000000000000000000000000 00 \
        00000000000000000000000000000000 00000000 00000002 00000000 80200001 lo\n";

    fn host(mtu: u32, min_free_kib: u32) -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        for (path, text) in [
            ("/sys/class/net/eth0/mtu", "1500\n".to_owned()),
            ("/sys/class/net/fast/mtu", format!("{mtu}\n")),
            ("/sys/class/net/lo/mtu", "65536\n".to_owned()),
            ("/proc/sys/vm/min_free_kbytes", format!("{min_free_kib}\n")),
            ("/proc/net/route", ROUTES.to_owned()),
            ("/proc/net/ipv6_route", ROUTES_V6.to_owned()),
        ] {
            let path = root.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        (dir, root)
    }

    fn to(address: &str) -> IpAddr {
        address.parse().unwrap()
    }

    #[test]
    fn the_most_specific_route_tells_the_interface() {
        let (_dir, root) = host(9000, 0);
        for (address, interface) in
            [("10.77.0.2", "fast"), ("10.78.0.2", "eth0"), ("fd00::2", "fast"), ("fd01::2", "eth0")]
        {
            assert_eq!(interface_to(&root, to(address)).as_deref(), Some(interface), "{address}");
        }
    }

    #[test]
    fn only_large_frames_with_a_small_reserve_are_dangerous() {
        for (mtu, min_free, dangerous) in
            [(9000, 1700, true), (9000, 16 << 10, false), (1500, 1700, false)]
        {
            let (_dir, root) = host(mtu, min_free);
            assert_eq!(danger(&root, to("10.77.0.2")).is_some(), dangerous, "{mtu} {min_free}");
            assert_eq!(dangers(&root).len(), usize::from(dangerous));
        }
        let (_dir, root) = host(9000, 1700);
        assert_eq!(danger(&root, to("10.78.0.2")), None, "the way there is another one");
        assert_eq!(danger(&root, to("127.0.0.1")), None);
        assert!(danger(&root, to("fd00::2")).unwrap().help().contains("ip link set fast mtu 1500"));
    }
}
