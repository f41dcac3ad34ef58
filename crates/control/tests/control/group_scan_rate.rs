//! Tests of Algorithm 1 of \[Kim14\], line by line, and of its variants on a running group (Figs. 5
//! to 7).

use aquifer_control::group::scan_rate::{Activity, Config, Controller, Rate, Variant, Why};
use aquifer_page::Bytes;

const ADAPTIVE: [Variant; 3] = [Variant::C, Variant::Cs, Variant::Csd];

/// Returns a controller at this rate.
fn at(variant: Variant, rate: u32) -> Controller {
    let mut controller =
        Controller::new(Config { variant: Variant::Static(Rate(rate)), ..Config::default() });
    controller.set_config(Config { variant, ..Config::default() });
    controller
}

/// Returns one period of a group of four VMs: CPU in percent, pages swapped, pages saved.
fn activity(cpu_percent: f64, swapped: u64, saved: i64) -> Activity {
    Activity { cpu_percent, swapped: Bytes(swapped * 4096), saved_bytes: saved * 4096, vms: 4 }
}

/// The number of pages above which deduplication is worth the CPU: 1 MB for each of four VMs.
const WORTH: i64 = 4 * 256;

fn word(why: Why) -> String {
    format!("{why:?}").split(' ').next().unwrap_or_default().to_owned()
}

#[test]
fn algorithm_1_starts_at_the_minimum_and_static_rates_stay() {
    assert!(
        ADAPTIVE.map(|variant| Controller::new(Config { variant, ..Config::default() }).rate())
            == [Rate(5); 3]
    );
    let mut controller = at(Variant::Static(Rate(20)), 20);
    for activity in [activity(0.0, 0, 0), activity(100.0, 9, 0), activity(100.0, 9, 9999)] {
        let decision = controller.step(&activity);
        assert_eq!((decision.from, decision.to, decision.why), (Rate(20), Rate(20), Why::Static));
    }
}

#[test]
fn algorithm_1_every_branch_at_every_rate() {
    let up = |rate: u32| (rate + 5).min(50);
    let down = |rate: u32| (rate / 2).max(5);
    let stay = |rate: u32| rate;
    type Branch<'a> = (&'a dyn Fn(u32) -> u32, &'a str);
    // The lines, the activity, and each variant's reaction.
    let cases: [(&str, Activity, [Branch<'_>; 3]); 10] = [
        ("4-5", activity(0.0, 0, 0), [(&up, "CpuFree"); 3]),
        ("4-5", activity(89.99, 500, -500), [(&up, "CpuFree"); 3]),
        // CPU use at the threshold is not below it.
        (
            "7-8",
            activity(90.0, 0, 0),
            [(&down, "CpuScarce"), (&down, "NoDemand"), (&down, "NoDemand")],
        ),
        (
            "7-8",
            activity(100.0, 0, 9999),
            [(&down, "CpuScarce"), (&down, "NoDemand"), (&down, "NoDemand")],
        ),
        // "The presence of swap operations is deemed memory demands": one page is enough.
        (
            "10-11",
            activity(90.0, 1, WORTH + 1),
            [(&down, "CpuScarce"), (&up, "Demand"), (&up, "Productive")],
        ),
        (
            "14",
            activity(100.0, 1, WORTH),
            [(&down, "CpuScarce"), (&up, "Demand"), (&stay, "LittleSaved")],
        ),
        (
            "14",
            activity(100.0, 800, 1),
            [(&down, "CpuScarce"), (&up, "Demand"), (&stay, "LittleSaved")],
        ),
        (
            "12-13",
            activity(100.0, 800, 0),
            [(&down, "CpuScarce"), (&up, "Demand"), (&down, "Unproductive")],
        ),
        (
            "12-13",
            activity(100.0, 1, -1),
            [(&down, "CpuScarce"), (&up, "Demand"), (&down, "Unproductive")],
        ),
        (
            "12-13",
            activity(120.0, 9, i64::MIN / 4096),
            [(&down, "CpuScarce"), (&up, "Demand"), (&down, "Unproductive")],
        ),
    ];
    for (lines, activity, expected) in cases {
        for (variant, (to, why)) in ADAPTIVE.into_iter().zip(expected) {
            for rate in 5..=50 {
                let decision = at(variant, rate).step(&activity);
                let found = (decision.from, decision.to, word(decision.why));
                assert_eq!(
                    found,
                    (Rate(rate), Rate(to(rate)), why.to_owned()),
                    "line {lines}, {variant:?}"
                );
            }
        }
    }
}

#[test]
fn line_13_halves_and_does_not_drop_to_the_minimum_at_once() {
    let mut controller = at(Variant::Csd, 50);
    let rates: Vec<u32> = (0..5).map(|_| controller.step(&activity(100.0, 1, 0)).to.0).collect();
    assert_eq!(rates, [25, 12, 6, 5, 5]);
}

#[test]
fn nine_steps_lead_from_the_minimum_to_the_maximum() {
    let mut controller = Controller::new(Config::default());
    let rates: Vec<u32> = (0..10).map(|_| controller.step(&activity(10.0, 0, 0)).to.0).collect();
    assert_eq!(rates, [10, 15, 20, 25, 30, 35, 40, 45, 50, 50]);
}

/// Four running and scanned VMs of 512 MiB on four CPUs, in pages and periods of a second.
struct Run {
    controller: Controller,
    /// The CPU that the VMs' programs would use, in percent of all.
    wants: f64,
    /// Pages that do not fit in the VMs' memory.
    missing: i64,
    /// Equal pages, and those of them that the scanner has found.
    equal: i64,
    found: i64,
    /// Found pages that a program writes to in a period.
    broken: i64,
    /// Sums: pages swapped, and CPU seconds of programs and of the scanner.
    swapped: i64,
    ran: f64,
    scanned: f64,
    rates: Vec<u32>,
}

const PAGES: i64 = 4 * 512 * 256;

impl Run {
    fn new(variant: Variant, wants: f64, missing: i64, equal: i64) -> Self {
        let controller = Controller::new(Config { variant, ..Config::default() });
        let (found, broken, swapped, ran, scanned) = (0, 0, 0, 0.0, 0.0);
        Self {
            controller,
            wants,
            missing,
            equal,
            found,
            broken,
            swapped,
            ran,
            scanned,
            rates: Vec::new(),
        }
    }

    fn periods(mut self, periods: usize) -> Self {
        for _ in 0..periods {
            self.period();
        }
        self
    }

    fn period(&mut self) {
        let rate = self.controller.rate().0;
        let saved = i64::from(rate) * 1000 * (self.equal - self.found) / PAGES
            - self.broken.min(self.found);
        self.found += saved;
        // The found pages go to VMs that swap; pages that still do not fit are swapped.
        let short = (self.missing - self.found).max(0);
        let swapped = (short + 49) / 50;
        // Fig. 1(b): 50 pages/ms take about half a CPU. A program that waits for a disk does not
        // run.
        let scanner = f64::from(rate) * 0.01 / 4.0 * 100.0;
        let runs = self.wants.min(100.0 - scanner) * (1.0 - swapped as f64 / 160_000.0);
        (self.swapped, self.ran, self.scanned) =
            (self.swapped + swapped, self.ran + runs * 0.04, self.scanned + scanner * 0.04);
        self.rates.push(rate);
        let activity = Activity {
            cpu_percent: runs + scanner,
            swapped: Bytes(swapped as u64 * 4096),
            saved_bytes: saved * 4096,
            vms: 4,
        };
        self.controller.step(&activity);
    }

    fn last(&self) -> u32 {
        *self.rates.last().expect("it ran")
    }
}

#[test]
fn where_cpu_is_left_all_variants_scan_as_fast_as_they_may() {
    // Fig. 5(a), MapReduce: "the three adaptive controllers show similar performance to Static-50".
    let run = |variant| Run::new(variant, 50.0, 100_000, 200_000).periods(120);
    let [slow, fast] = [5, 50].map(|rate| run(Variant::Static(Rate(rate))));
    for adaptive in ADAPTIVE.map(run) {
        assert_eq!(adaptive.last(), 50);
        // The variants lag only by the nine periods until they reach that rate.
        assert!(adaptive.found > fast.found * 99 / 100, "{} {}", adaptive.found, fast.found);
        assert!(adaptive.swapped < slow.swapped / 3, "{} {}", adaptive.swapped, slow.swapped);
    }
}

#[test]
fn scarce_cpu_alone_slows_all_variants_to_the_minimum() {
    // Fig. 5(b), most of NPB: the faster a static rate, the slower the programs.
    let fast = Run::new(Variant::Static(Rate(50)), 100.0, 0, 200_000).periods(120);
    for variant in ADAPTIVE {
        let run = Run::new(variant, 100.0, 0, 200_000).periods(120);
        assert!(run.rates.iter().all(|&rate| rate == 5) && run.ran > fast.ran, "{variant:?}");
    }
}

#[test]
fn under_scarcity_swap_and_deduplication_raise_the_rate() {
    // Fig. 5(b), NPB DT: "Adaptive-C shows no performance improvement". CS and CSD improve it,
    // because they find memory soon.
    let run = |variant| Run::new(variant, 100.0, 150_000, 200_000).periods(60);
    let [c, cs, csd] = ADAPTIVE.map(run);
    assert!(c.rates.iter().all(|&rate| rate == 5), "{:?}", c.rates);
    for helps in [&cs, &csd] {
        assert!(helps.found > c.found * 3 / 2, "{} {}", helps.found, c.found);
        assert!(helps.swapped < c.swapped / 2, "{} {}", helps.swapped, c.swapped);
    }
}

#[test]
fn only_csd_stops_when_deduplication_yields_nothing() {
    // Figs. 6 and 7, SORT and NPB CG: memory stays short. CSD equals CS while there is much to
    // find, and then leaves the CPU to programs.
    let run =
        |variant| Run { broken: 40, ..Run::new(variant, 100.0, 400_000, 200_000) }.periods(300);
    let [c, cs, csd] = ADAPTIVE.map(run);
    assert_eq!(cs.rates[..12], csd.rates[..12], "as long as it finds much");
    assert_eq!((c.last(), cs.last()), (5, 50));
    assert!(csd.last() < 50 && csd.scanned < cs.scanned * 0.6, "{} {}", csd.scanned, cs.scanned);
    assert!(csd.ran > cs.ran, "{} {}", csd.ran, cs.ran);
    let at = |run: Run| run.swapped;
    let (c, cs, csd) = (at(c), at(cs), at(csd));
    assert!(cs < c && csd < c && csd < cs * 5 / 4, "{c} {cs} {csd}");
}
