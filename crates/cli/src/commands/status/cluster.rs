//! All hosts of the cluster as one table.

use std::time::Duration;

use aquifer_api::cluster::{ClusterHost, Summary};
use aquifer_api::status::{Certificate, CertificateState, Ledger, Peer, Standing};
use aquifer_page::{Bytes, HostName};

use crate::table::{Column, table};
use crate::view;

/// A cell that has nothing to show.
const NONE: &str = "-";

/// A cell of a host that did not answer.
const UNKNOWN: &str = "?";

/// Returns the table, with the totals in its last row, and below it why hosts did not answer. If it
/// is wider than `width` characters, the memory by class is a table of its own.
pub(super) fn text(hosts: &[ClusterHost], width: Option<usize>) -> String {
    let total = total(hosts);
    let is_over = total.overcommitted > Bytes::ZERO;
    let headings = Row::headings(is_over);
    let rows: Vec<_> = hosts
        .iter()
        .map(|host| Row::of(host, is_over))
        .chain([Row::of_all(hosts, &total, is_over)])
        .collect();
    let whole = table(headings.whole(), rows.iter().map(Row::whole));
    let is_narrow = |width| whole.lines().any(|line| line.chars().count() > width);
    let mut sections = match width.is_some_and(is_narrow) {
        false => vec![whole],
        true => vec![
            table(headings.without_memory(), rows.iter().map(Row::without_memory)),
            table(headings.only_memory(), rows.iter().map(Row::only_memory)),
        ],
    };
    let notes: Vec<_> = hosts.iter().filter_map(note).collect();
    if !notes.is_empty() {
        sections.push(notes.join("\n"));
    }
    sections.join("\n\n")
}

/// A row, or the headings of all rows.
struct Row<T> {
    /// The host's name is the first.
    host: Vec<T>,
    memory: Vec<T>,
    rest: Vec<T>,
}

impl<T: Clone> Row<T> {
    fn whole(&self) -> Vec<T> {
        [&*self.host, &self.memory, &self.rest].concat()
    }

    fn without_memory(&self) -> Vec<T> {
        [&*self.host, &self.rest].concat()
    }

    fn only_memory(&self) -> Vec<T> {
        [&self.host[..1], &self.memory].concat()
    }
}

impl Row<Column> {
    fn headings(is_over: bool) -> Self {
        let memory = classes(&Ledger::default(), is_over);
        Self {
            host: ["HOST", "ZONE", "STATE", "ROLE"].map(Column::from).to_vec(),
            memory: memory.into_iter().map(|(heading, _)| Column::numbers(heading)).collect(),
            rest: vec![
                Column::numbers("BORROWED"),
                "LENDS TO".into(),
                Column::numbers("VMS"),
                "PRESSURE".into(),
                "CERT".into(),
                "VERSION".into(),
            ],
        }
    }
}

impl Row<String> {
    fn of(ClusterHost { peer, summary }: &ClusterHost, is_over: bool) -> Self {
        let cell = |of: &dyn Fn(&Summary) -> String| {
            summary.as_ref().map_or_else(|| UNKNOWN.to_owned(), of)
        };
        let sizes =
            classes(&summary.as_ref().map_or_else(Ledger::default, |own| own.ledger), is_over);
        Self {
            host: vec![
                peer.host.to_string(),
                peer.zone.as_ref().map_or_else(|| NONE.to_owned(), ToString::to_string),
                state(peer, summary.as_ref()),
                cell(&|own| own.role.to_string()),
            ],
            memory: sizes.into_iter().map(|(_, bytes)| cell(&|_| bytes.to_string())).collect(),
            rest: vec![
                cell(&|own| borrowed(own).to_string()),
                cell(&lends_to),
                cell(&|own| own.vms.map_or_else(|| UNKNOWN.to_owned(), |vms| vms.to_string())),
                cell(&|own| if own.pressure { "yes" } else { NONE }.to_owned()),
                cell(&|own| own.certificate.as_ref().map_or_else(|| NONE.to_owned(), remaining)),
                cell(&|own| own.version.clone()),
            ],
        }
    }

    fn of_all(hosts: &[ClusterHost], total: &Ledger, is_over: bool) -> Self {
        let none = || NONE.to_owned();
        let answers = || hosts.iter().filter_map(|host| host.summary.as_ref());
        let here = hosts.iter().filter(|host| host.peer.standing != Standing::Left).count();
        let waiting = answers().filter(|own| own.pressure).count();
        let vms: u64 = answers().filter_map(|own| own.vms).map(u64::from).sum();
        Self {
            host: vec![
                "TOTAL".to_owned(),
                none(),
                format!("{} of {here} answer", answers().count()),
                none(),
            ],
            memory: classes(total, is_over).into_iter().map(|(_, sum)| sum.to_string()).collect(),
            rest: vec![
                answers().map(borrowed).fold(Bytes::ZERO, Bytes::saturating_add).to_string(),
                none(),
                vms.to_string(),
                if waiting > 0 { format!("{waiting} hosts") } else { none() },
                none(),
                none(),
            ],
        }
    }
}

fn classes(ledger: &Ledger, is_over: bool) -> Vec<(&'static str, Bytes)> {
    let over = is_over.then_some(("OVERCOMMITTED", ledger.overcommitted));
    view::classes(ledger).into_iter().chain(over).collect()
}

/// Returns the sums over all hosts that answered. A sum that does not fit is the largest size.
fn total(hosts: &[ClusterHost]) -> Ledger {
    let mut sum = Ledger::default();
    for Ledger {
        total,
        reserved,
        vm_floor,
        vm_elastic,
        cache_floor,
        group_surplus,
        lent,
        mirror,
        free,
        overcommitted,
    } in hosts.iter().filter_map(|host| host.summary.as_ref()).map(|own| own.ledger)
    {
        sum.total = sum.total.saturating_add(total);
        sum.reserved = sum.reserved.saturating_add(reserved);
        sum.vm_floor = sum.vm_floor.saturating_add(vm_floor);
        sum.vm_elastic = sum.vm_elastic.saturating_add(vm_elastic);
        sum.cache_floor = sum.cache_floor.saturating_add(cache_floor);
        sum.group_surplus = sum.group_surplus.saturating_add(group_surplus);
        sum.lent = sum.lent.saturating_add(lent);
        sum.mirror = sum.mirror.saturating_add(mirror);
        sum.free = sum.free.saturating_add(free);
        sum.overcommitted = sum.overcommitted.saturating_add(overcommitted);
    }
    sum
}

fn borrowed(own: &Summary) -> Bytes {
    own.borrowed.values().copied().fold(Bytes::ZERO, Bytes::saturating_add)
}

fn lends_to(own: &Summary) -> String {
    let loans = own.lent.iter().map(|(borrower, bytes)| format!("{borrower} {bytes}"));
    let loans: Vec<_> = loans.collect();
    if loans.is_empty() { NONE.to_owned() } else { loans.join(", ") }
}

fn state(peer: &Peer, summary: Option<&Summary>) -> String {
    let age = peer.since_s.map(seconds);
    match (summary, peer.standing) {
        (Some(Summary { draining: true, .. }), _) => "up, draining".to_owned(),
        (Some(_), _) => "up".to_owned(),
        (None, Standing::Down) => age.map_or("down".to_owned(), |age| format!("down for {age}")),
        (None, Standing::Left) => age.map_or("left".to_owned(), |age| format!("left {age} ago")),
        (None, _) if peer.refused => "refuses".to_owned(),
        (None, _) => "silent".to_owned(),
    }
}

/// Returns why a host is not in the totals, and what gossip last said of it.
fn note(ClusterHost { peer, summary }: &ClusterHost) -> Option<String> {
    let host = &peer.host;
    if summary.is_some() {
        let is_down = peer.standing == Standing::Down;
        let udp =
            is_down.then(|| format!("{host} answers, but gossip takes it for down: check UDP"));
        return udp.or_else(|| ending(host, summary.as_ref()?.certificate.as_ref()?));
    }
    let error = peer.error.as_ref()?;
    let told = peer.spare.zip(peer.spare_s).map_or_else(String::new, |(spare, age)| {
        format!("; it last told {} ago that it could lend {spare}", seconds(age))
    });
    Some(format!("{host}: {error}{told}"))
}

/// Returns the time that a certificate has left, as in `4d 15h`.
fn remaining(certificate: &Certificate) -> String {
    let left = certificate.left();
    left.strip_suffix(" left").unwrap_or(&left).to_owned()
}

/// Says that a host's certificate ends soon.
fn ending(host: &HostName, certificate: &Certificate) -> Option<String> {
    let failed = certificate.failed.as_ref().map_or_else(String::new, |why| format!(": {why}"));
    let is_good = certificate.state == CertificateState::Good;
    (!is_good)
        .then(|| format!("{host}: its certificate is not renewed, {}{failed}", certificate.left()))
}

fn seconds(age: f64) -> String {
    // The conversion saturates, and no age is negative.
    humantime::format_duration(Duration::from_secs(age as u64)).to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn hosts(hosts: Value) -> Vec<ClusterHost> {
        serde_json::from_value(hosts).unwrap()
    }

    fn summary(host: &str, lent: u64) -> Value {
        json!({
            "host": host, "address": "192.0.2.1:7070", "admits": false, "version": "0.1.0",
            "role": "lender", "pressure": true, "draining": host == "c", "vms": 2,
            "ledger": {
                "total": 4_u64 << 30, "reserved": 1 << 30, "vm_floor": 0, "vm_elastic": 0,
                "cache_floor": 0, "group_surplus": 0, "lent": lent, "free": (3_u64 << 30) - lent,
                "overcommitted": 0
            },
            "lent": { "z": lent }, "borrowed": { "y": 1 << 26, "x": 1 << 26 },
        })
    }

    fn host(name: &str, standing: &str, more: &[(&str, Value)]) -> Value {
        let mut host = json!({
            "host": name, "address": "192.0.2.1:7070", "standing": standing, "zone": "rack-1",
        });
        for (key, value) in more {
            host[*key] = value.clone();
        }
        host
    }

    fn scene() -> Vec<ClusterHost> {
        hosts(json!([
            host("a", "up", &[("summary", summary("a", 1 << 30))]),
            host(
                "b",
                "down",
                &[
                    ("since_s", json!(72.4)),
                    ("error", json!("no agent answers")),
                    ("spare", json!(1 << 30)),
                    ("spare_s", json!(90.0)),
                ]
            ),
            host("c", "down", &[("summary", summary("c", 1 << 29))]),
            host("d", "left", &[("since_s", json!(3600.0))]),
            host("e", "up", &[("error", json!("the account of e does not add up"))]),
            host("f", "listed", &[("refused", json!(true)), ("error", json!("no peer of f"))]),
        ]))
    }

    /// Returns the cells of the row of a host.
    fn row(text: &str, host: &str) -> String {
        let line = text.lines().find(|line| line.trim_start().starts_with(host)).unwrap();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn each_host_is_a_row_and_the_last_has_the_totals() {
        let text = text(&scene(), None);
        for cells in [
            "a rack-1 up lender 1GiB 0B 0B 0B 0B 1GiB 0B 2GiB 4GiB 128MiB z 1GiB 2 yes - 0.1.0",
            "b rack-1 down for 1m 12s ? ? ? ? ? ? ? ? ? ? ? ? ? ? ? ?",
            "c rack-1 up, draining lender 1GiB 0B 0B 0B 0B 512MiB 0B 2.5GiB 4GiB 128MiB z 512MiB 2 \
             yes - 0.1.0",
            "d rack-1 left 1h ago ? ? ? ? ? ? ? ? ? ? ? ? ? ? ? ?",
            "e rack-1 silent ? ? ? ? ? ? ? ? ? ? ? ? ? ? ? ?",
            "f rack-1 refuses ? ? ? ? ? ? ? ? ? ? ? ? ? ? ? ?",
            "TOTAL - 2 of 5 answer - 2GiB 0B 0B 0B 0B 1.5GiB 0B 4.5GiB 8GiB 256MiB - 4 2 hosts - -",
        ] {
            assert_eq!(row(&text, &cells[..2]), cells, "{text}");
        }
        for note in [
            "b: no agent answers; it last told 1m 30s ago that it could lend 1GiB",
            "c answers, but gossip takes it for down: check UDP",
            "e: the account of e does not add up",
            "f: no peer of f",
        ] {
            assert!(text.lines().any(|line| line == note), "no '{note}' in\n{text}");
        }
        assert!(!text.contains("OVERCOMMITTED"), "{text}");
    }

    #[test]
    fn a_narrow_terminal_gets_the_memory_as_a_second_table() {
        let wide = text(&scene(), Some(1000));
        assert_eq!(wide, text(&scene(), None));
        let narrow = text(&scene(), Some(100));
        assert!(narrow.lines().all(|line| line.chars().count() <= 100), "{narrow}");
        let [first, second, _] = narrow.split("\n\n").collect::<Vec<_>>()[..] else {
            panic!("{narrow}")
        };
        assert_eq!(row(first, "a "), "a rack-1 up lender 128MiB z 1GiB 2 yes - 0.1.0");
        assert_eq!(row(second, "a "), "a 1GiB 0B 0B 0B 0B 1GiB 0B 2GiB 4GiB");
        assert_eq!(second.lines().count(), first.lines().count());
    }

    #[test]
    fn hosts_that_promise_too_much_show_by_how_much() {
        let mut all = scene();
        let own = all[0].summary.as_mut().unwrap();
        own.ledger.overcommitted = Bytes::mib(5);
        own.ledger.total = Bytes(u64::MAX);
        let text = text(&all, None);
        assert!(text.contains("OVERCOMMITTED") && row(&text, "TOTAL").contains("5MiB"), "{text}");
    }
}
