//! The measurement of link and processors, by which borrowers' common rate follows the load.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use aquifer_api::status::LendingLink;
use aquifer_blockdev::nvme::{Root, network};
use aquifer_control::pace::{Flow, LinkLoad, Pace, ProcessorLoad, Short};
use aquifer_page::Bytes;
use aquifer_procfs::{
    LinkTraffic, ProcessorTimes, link_speed, link_traffic, process, processor_times,
};
use aquifer_transport::serving::limits::{Borrower, ByteRate, Gate, Traffic};

/// The shortest period that is worth a measurement.
const SHORTEST: Duration = Duration::from_millis(200);

/// Measures each period, and sets the rate that all borrowers share.
#[derive(Debug)]
pub struct Pacer {
    /// `/`, or in tests a directory that imitates it.
    root: PathBuf,
    /// The address of the pages.
    pages: IpAddr,
    /// The interface to the borrowers at the last call; `None` for loopback.
    interface: Option<String>,
    share: f64,
    pace: Pace,
    last: Option<Sample>,
    /// What borrowers had read and written at the last call.
    lent: Traffic,
    speed: Option<Bytes>,
    rate: Option<(Bytes, Short)>,
}

#[derive(Debug)]
struct Sample {
    at: Instant,
    link: Option<LinkTraffic>,
    lent: Traffic,
    by_host: BTreeMap<Borrower, Bytes>,
    processors: ProcessorTimes,
    /// Processor time of this process, in seconds.
    own: f64,
}

impl Pacer {
    /// Makes the pacer of a lender whose pages are at `pages`, and that may use `share` of the link
    /// there.
    pub fn new(pages: IpAddr, share: f64) -> Self {
        Self::at(Path::new("/"), pages, share)
    }

    fn at(root: &Path, pages: IpAddr, share: f64) -> Self {
        Self {
            root: root.to_owned(),
            pages,
            interface: None,
            share,
            pace: Pace::new(share),
            last: None,
            lent: Traffic::default(),
            speed: None,
            rate: None,
        }
    }

    /// Measures the time since the last call, and sets the gate's rate. Returns a sentence if that
    /// begins or ends a limit, with this host as the subject.
    pub fn tick(&mut self, gate: &Gate) -> Option<String> {
        let now = Instant::now();
        if self.last.as_ref().is_some_and(|last| now - last.at < SHORTEST) {
            return None;
        }
        let lent = gate.traffic();
        if std::mem::replace(&mut self.lent, lent) == lent && self.rate.is_none() {
            // An idle lender measures nothing, and uses no processor time for it.
            self.last = None;
            return None;
        }
        // A network may come up, or change its route or its speed, at any time.
        let interface = self.interface();
        if interface != self.interface {
            self.interface = interface;
            // The counters of another interface say nothing about this one.
            self.last = None;
        }
        self.speed = self.speed(self.interface.as_deref());
        let sample = self.sample(now, gate);
        let last = self.last.replace(sample)?;
        let (link, processors) = self.loads(&last)?;
        let before = self.rate;
        self.rate = self.pace.step(link.as_ref(), &processors);
        gate.set_total(self.rate.map(|(rate, _)| ByteRate(rate)));
        let (was, is) = (before.map(|(_, why)| why), self.rate.map(|(_, why)| why));
        (was != is).then(|| self.change(link.as_ref(), &processors))
    }

    /// Returns the state for people and programs.
    pub fn status(&self) -> LendingLink {
        let interface = self.interface();
        let speed = self.speed(interface.as_deref());
        LendingLink {
            speed,
            share: self.share,
            rate: self.rate.map(|(rate, _)| rate),
            why: self.why(interface.as_deref(), speed),
            interface,
        }
    }

    fn why(&self, interface: Option<&str>, speed: Option<Bytes>) -> String {
        let interface = interface.unwrap_or("loopback");
        match (self.rate, speed) {
            (Some((_, Short::Network)), _) => {
                format!("this host's own programs use {interface}, too")
            }
            (Some((_, Short::Processors)), _) => {
                "several hosts' requests take all processors".to_owned()
            }
            (None, _) if self.share >= 1.0 => "network_share is 1.0".to_owned(),
            (None, None) => {
                format!("the speed of {interface} is unknown, so network_share has no effect")
            }
            (None, Some(_)) => format!("{interface} has room for all"),
        }
    }

    fn change(&self, link: Option<&LinkLoad>, processors: &ProcessorLoad) -> String {
        let lent = processors.lent;
        let why = self.why(self.interface.as_deref(), self.speed);
        match (self.rate, link) {
            (Some((rate, Short::Network)), Some(LinkLoad { speed, all, .. })) => {
                let all = all.sent.max(all.received);
                format!(
                    "limits its borrowers to {rate}/s together: {why}; it carries {all}/s of \
                     {speed}/s"
                )
            }
            (Some((rate, _)), _) => {
                format!("limits its borrowers to {rate}/s together, in turns: {why} at {lent}/s")
            }
            (None, _) => format!("no longer limits its borrowers' common rate: {why}"),
        }
    }

    fn interface(&self) -> Option<String> {
        network::interface_to(&Root::at(&self.root), self.pages)
    }

    fn speed(&self, interface: Option<&str>) -> Option<Bytes> {
        let path = format!("sys/class/net/{}/speed", interface?);
        // Reading fails for interfaces without a speed.
        link_speed(&std::fs::read_to_string(self.root.join(path)).ok()?)
    }

    fn sample(&self, at: Instant, gate: &Gate) -> Sample {
        let read = |path: &str| aquifer_procfs::read(self.root.join(path)).unwrap_or_default();
        let mut by_host = BTreeMap::<_, Bytes>::new();
        for one in gate.by_lease().into_iter().filter(|one| one.borrower != Borrower::Former) {
            let sum = by_host.entry(one.borrower).or_default();
            *sum = sum.saturating_add(one.traffic.sent).saturating_add(one.traffic.received);
        }
        Sample {
            at,
            link: self
                .interface
                .as_ref()
                .and_then(|interface| link_traffic(&read("proc/self/net/dev"), interface)),
            lent: gate.traffic(),
            by_host,
            processors: processor_times(&read("proc/stat")).unwrap_or_default(),
            own: process::cpu_seconds(std::process::id()),
        }
    }

    /// Returns the loads since the last sample.
    fn loads(&self, last: &Sample) -> Option<(Option<LinkLoad>, ProcessorLoad)> {
        let now = self.last.as_ref()?;
        let seconds = (now.at - last.at).as_secs_f64();
        let rate = |now: Bytes, last: Bytes| now.saturating_sub(last).scaled(1.0 / seconds);
        let lent = Flow {
            received: rate(now.lent.received, last.lent.received),
            sent: rate(now.lent.sent, last.lent.sent),
        };
        let link = self.speed.zip(now.link).zip(last.link).map(|((speed, now), last)| LinkLoad {
            speed,
            all: Flow {
                received: rate(now.received, last.received),
                sent: rate(now.sent, last.sent),
            },
            lent,
        });
        let ticks = |of: fn(&ProcessorTimes) -> u64| {
            of(&now.processors).saturating_sub(of(&last.processors)) as f64
        };
        let count = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        let active =
            now.by_host.iter().filter(|(host, bytes)| last.by_host.get(host) != Some(bytes));
        let processors = ProcessorLoad {
            lent: lent.received.saturating_add(lent.sent),
            hosts: active.count(),
            busy: ticks(|times| times.busy) / ticks(|times| times.total).max(1.0),
            server: (now.own - last.own) / (seconds * count),
        };
        Some((link, processors))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use aquifer_page::LeaseId;
    use aquifer_transport::serving::limits::{LendingLimits, Pass};

    use super::*;

    const ROUTE: &str = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\n\
        eth0\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\n";

    struct Imitated {
        root: tempfile::TempDir,
        gate: std::sync::Arc<Gate>,
        pass: Pass,
        /// Bytes that the interface sent.
        sent: u64,
    }

    impl Imitated {
        fn new(speed: &str) -> Self {
            let root = tempfile::tempdir().unwrap();
            // An hour from one look to the next, so that no request waits for long.
            let hours = std::sync::atomic::AtomicU64::new(0);
            let hour = move || hours.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let clock = move || Duration::from_secs(3600 * hour());
            let gate = Gate::with_clock(LendingLimits::default(), clock);
            let pass = gate.enter(Borrower::Local, LeaseId(1)).unwrap();
            let imitated = Self { root, gate, pass, sent: 0 };
            imitated.write("proc/net/route", ROUTE);
            imitated.write("sys/class/net/eth0/speed", speed);
            imitated.write("proc/stat", "cpu 1 0 0 99 0 0 0 0\n");
            imitated
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn pacer(&self) -> Pacer {
            Pacer::at(self.root.path(), IpAddr::from([10, 0, 0, 1]), 0.8)
        }

        /// Lets a long time pass, in which the link carries these megabytes a second.
        fn tick(&mut self, pacer: &mut Pacer, lent: u64, own: u64) -> Option<String> {
            const TIME: Duration = Duration::from_secs(1000);
            let seconds = TIME.as_secs() * 1_000_000;
            let sent = Traffic { sent: Bytes(lent * seconds), ..Traffic::default() };
            self.pass.wait(sent, &mut (), |_| Ok(()), |_, _| Ok::<_, ()>(())).unwrap();
            self.pass.tell_traffic();
            self.sent += (lent + own) * seconds;
            let of = |name| format!("  {name}: 0 0 0 0 0 0 0 0 {} 0 0 0 0 0 0 0\n", self.sent);
            let dev = of("eth0") + &of("eth1");
            self.write("proc/self/net/dev", &dev);
            if let Some(last) = &mut pacer.last {
                last.at -= TIME;
            }
            pacer.tick(&self.gate)
        }
    }

    #[test]
    fn borrowers_make_room_for_the_hosts_own_traffic() {
        let mut host = Imitated::new("10000\n");
        let mut pacer = host.pacer();
        assert_eq!(host.tick(&mut pacer, 0, 0), None);
        assert!(pacer.last.is_none(), "an idle lender measures nothing");
        assert_eq!(pacer.status().speed, Some(Bytes(1_250_000_000)));
        assert_eq!(host.tick(&mut pacer, 1100, 0), None, "lending alone may use all");
        let why = host.tick(&mut pacer, 900, 200).expect("a decision");
        assert!(why.starts_with("limits its borrowers to"), "{why}");
        assert!(why.contains("this host's own programs use eth0"), "{why}");
        let rate = pacer.status().rate.expect("a rate");
        assert!((850_000_000..926_000_000).contains(&rate.0), "{rate}");
        assert_eq!(host.tick(&mut pacer, 900, 200), None, "the limit goes on");
        let ends: Vec<_> = (0..6).filter_map(|_| host.tick(&mut pacer, 100, 0)).collect();
        assert_eq!(ends.len(), 1, "{ends:?}");
        assert!(ends[0].starts_with("no longer limits"), "{ends:?}");
    }

    #[test]
    fn a_link_of_unknown_speed_has_no_limit_and_says_so() {
        let mut host = Imitated::new("-1\n");
        let mut pacer = host.pacer();
        for _ in 0..3 {
            assert_eq!(host.tick(&mut pacer, 5000, 5000), None);
        }
        let status = pacer.status();
        assert_eq!((status.interface.as_deref(), status.speed), (Some("eth0"), None));
        assert_eq!(status.why, "the speed of eth0 is unknown, so network_share has no effect");
    }

    #[test]
    fn a_route_that_changes_is_followed() {
        let mut host = Imitated::new("10000\n");
        let mut pacer = host.pacer();
        host.tick(&mut pacer, 0, 0);
        host.tick(&mut pacer, 900, 200);
        host.tick(&mut pacer, 900, 200).expect("a decision about eth0");
        host.write("proc/net/route", &ROUTE.replace("eth0", "eth1"));
        host.write("sys/class/net/eth1/speed", "40000\n");
        let status = pacer.status();
        assert_eq!(status.interface.as_deref(), Some("eth1"), "also between two measurements");
        assert_eq!(status.speed, Some(Bytes(5_000_000_000)));
        let why = host.tick(&mut pacer, 900, 200);
        assert_eq!(why, None, "the counters of two interfaces are not compared");
        assert_eq!(pacer.interface.as_deref(), Some("eth1"));
        let ends: Vec<_> = (0..40).filter_map(|_| host.tick(&mut pacer, 900, 200)).collect();
        assert_eq!(ends.len(), 1, "{ends:?}");
        assert!(ends[0].starts_with("no longer limits"), "{ends:?}");
    }

    #[test]
    fn loopback_has_no_interface_to_measure() {
        let host = Imitated::new("10000\n");
        let pacer = Pacer::at(host.root.path(), IpAddr::from([127, 0, 0, 1]), 0.8);
        assert_eq!(pacer.status().interface, None);
    }
}
