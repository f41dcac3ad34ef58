//! An agent's status as text.

use aquifer_api::status::{
    AgentProcess, AtRisk, Certificate, CertificateState, Decision, DiskCopy, Event, GroupScanner,
    Held, LeaseTraffic, Ledger, LeftToDrain, LendingLink, Lent, Peer, Region, SecondCopy, Standing,
    Status, Volume,
};
use aquifer_page::Bytes;

use crate::table::table;

/// How many of the latest decisions, and of the latest events, are shown.
const LATEST: usize = 10;

/// Returns the whole status as text.
pub fn status(status: &Status) -> String {
    let Status { loans, history, .. } = status;
    let mut sections = vec![head(status)];
    let mut add = |heading: &str, is_any: bool, table: String| {
        if is_any {
            let lines: Vec<_> = table.lines().map(|line| format!(" {line}")).collect();
            sections.push(format!("{heading}\n{}", lines.join("\n")));
        }
    };
    add("Memory by class", status.ledger.total > Bytes::ZERO, ledger(&status.ledger));
    add("Lent", !loans.lent.is_empty(), lent(&loans.lent));
    add("Borrowed", !loans.borrowed.is_empty(), borrowed(&loans.borrowed));
    add("Regions", !loans.regions.is_empty(), regions(&loans.regions));
    add("Safety", !loans.at_risk.is_empty(), at_risk(&loans.at_risk));
    add("Groups", !status.scanners.is_empty(), scanners(&status.scanners));
    add("Peers", !status.peers.is_empty(), peers(&status.peers));
    if !history.events.is_empty() {
        sections.push(events(&history.events));
    }
    if !history.decisions.is_empty() {
        sections.push(decisions(&history.decisions));
    }
    sections.join("\n\n")
}

fn head(status: &Status) -> String {
    let (memory, AgentProcess { version, pid, .. }) = (&status.memory, &status.agent);
    let pressure = if memory.pressure { ", tasks wait for memory" } else { "" };
    let draining = status.draining.map(draining);
    let lines = [
        format!("{} is {} (agent {version}, process {pid})", status.host, status.role),
        format!(
            "memory of {}: {} of {} used{pressure}; borrows above {}, returns below {}",
            memory.source, memory.used, memory.total, memory.upper, memory.lower
        ),
        format!(
            "swapped out{}: {}; could lend: {}",
            whereto(&status.loans.borrowed),
            memory.swap_used,
            memory.spare
        ),
    ];
    let link = status.loans.lending_link.as_ref().map(lending_link);
    let certificate = status.membership.certificate.as_ref().map(certificate);
    lines.into_iter().chain(link).chain(certificate).chain(draining).collect::<Vec<_>>().join("\n")
}

/// Describes how long the host's certificate holds.
fn certificate(certificate: &Certificate) -> String {
    let failed = certificate.failed.as_ref().map_or_else(String::new, |why| format!(": {why}"));
    match certificate.state {
        CertificateState::Good => format!("certificate: {}", certificate.left()),
        _ => format!(
            "certificate: {}, not renewed{failed}; see 'aquifer doctor'",
            certificate.left()
        ),
    }
}

/// Describes how far the drain of the host is.
fn draining(left: LeftToDrain) -> String {
    let counted = |count: usize, what: &str| match count {
        1 => format!("1 {what}"),
        count => format!("{count} {what}s"),
    };
    match left {
        LeftToDrain { vms: 0, leases: 0 } => "drained: no VM and no lease left".to_owned(),
        LeftToDrain { vms, leases } => {
            format!("draining: {}, {} left", counted(vms, "VM"), counted(leases, "lease"))
        }
    }
}

/// Returns the destination of the swapped pages, as words.
fn whereto(volumes: &[Volume]) -> &'static str {
    let spilled = volumes.iter().any(|volume| volume.spilled > Bytes::ZERO);
    let lent =
        volumes.iter().any(|volume| volume.leases.iter().any(|held| held.placed > Bytes::ZERO));
    match (spilled, lent) {
        (false, _) => " to other hosts",
        (true, true) => " to other hosts and to a local file",
        (true, false) => " to a local file",
    }
}

/// Returns the classes of a host's memory under their headings, and their total.
pub fn classes(ledger: &Ledger) -> [(&'static str, Bytes); 9] {
    [
        ("RESERVED", ledger.reserved),
        ("VM FLOOR", ledger.vm_floor),
        ("VM ELASTIC", ledger.vm_elastic),
        ("CACHE FLOOR", ledger.cache_floor),
        ("GROUP SURPLUS", ledger.group_surplus),
        ("LENT", ledger.lent),
        ("MIRROR", ledger.mirror),
        ("FREE", ledger.free),
        ("TOTAL", ledger.total),
    ]
}

fn ledger(ledger: &Ledger) -> String {
    let over = Some(("OVERCOMMITTED", ledger.overcommitted));
    let over = over.filter(|(_, bytes)| *bytes > Bytes::ZERO);
    let (headings, sizes): (Vec<_>, Vec<_>) = classes(ledger).into_iter().chain(over).unzip();
    table(headings, [sizes.iter().map(ToString::to_string).collect::<Vec<_>>()])
}

fn scanners(scanners: &[GroupScanner]) -> String {
    let row = |scanner: &GroupScanner| {
        let GroupScanner { group, pid, by_agent, regions, shared, saved, cpu_pct, passes } =
            scanner;
        let by = if *by_agent { "the agent" } else { "an operator" };
        vec![
            group.to_string(),
            regions.to_string(),
            shared.to_string(),
            saved.to_string(),
            format!("process {pid} of {by}, {cpu_pct:.0} % of a CPU, {passes} passes"),
        ]
    };
    table(["GROUP", "REGIONS", "SHARED", "SAVED", "SCANNER"], scanners.iter().map(row))
}

fn owner(lease: &Lent) -> String {
    let owner = lease.region.as_ref().map_or_else(|| "swap".to_owned(), ToString::to_string);
    if lease.goes_first { format!("{owner} (mirror)") } else { owner }
}

fn lent(leases: &[Lent]) -> String {
    let row = |lease: &Lent| {
        vec![
            lease.lease.to_string(),
            lease.borrower.to_string(),
            owner(lease),
            lease.group.to_string(),
            format!("{} of {}", lease.stored, lease.capacity),
            lease.connections.map_or_else(|| "?".to_owned(), |count| count.to_string()),
            lease.state.to_string(),
            format!("{:.0}s ago", lease.silent_s),
            lease.traffic.as_ref().map(limited).unwrap_or_default(),
        ]
    };
    table(
        [
            "LEASE",
            "BORROWER",
            "OWNER",
            "GROUP",
            "STORED",
            "CONNECTIONS",
            "STATE",
            "HEARD OF",
            "LIMITED",
        ],
        leases.iter().map(row),
    )
}

/// Tells what borrowers may use of the network.
fn lending_link(link: &LendingLink) -> String {
    match link.rate {
        Some(rate) => format!("borrowers share {rate}/s: {}", link.why),
        None => format!("borrowers share no rate: {}", link.why),
    }
}

/// Tells how limits hold a borrower back.
fn limited(traffic: &LeaseTraffic) -> String {
    let LeaseTraffic { waiting, waited_s, limit, .. } = traffic;
    match (limit, waiting) {
        (None, _) => "no".to_owned(),
        (Some(limit), 0) => format!("waited {waited_s:.1}s by {limit}"),
        (Some(limit), waiting) => {
            format!("{waiting} wait by {limit}, {waited_s:.1}s in all")
        }
    }
}

fn borrowed(volumes: &[Volume]) -> String {
    let row = |volume: &Volume| {
        let error = volume
            .last_error
            .as_deref()
            .map(|error| format!("; last error: {error}"))
            .unwrap_or_default();
        let spilled = match volume.spilled {
            Bytes::ZERO => None,
            spilled => Some(format!("{spilled} in the local spill file")),
        };
        let on: Vec<_> = volume.leases.iter().map(held).chain(spilled).collect();
        vec![
            volume.volume.to_string(),
            volume.device.clone(),
            volume.backend.clone(),
            format!("{} of {}", volume.swap_used, volume.capacity),
            format!("{}{error}", on.join(", ")),
        ]
    };
    table(["VOLUME", "DEVICE", "BACKEND", "SWAPPED OUT", "ON"], volumes.iter().map(row))
}

fn regions(regions: &[Region]) -> String {
    let row = |region: &Region| {
        let error = region.last_error.as_ref().map(|error| format!("last error: {error}"));
        let spilled = Some(region.spilled).filter(|spilled| *spilled > Bytes::ZERO);
        let spilled = spilled.map(|spilled| format!("{spilled} in the local spill file"));
        let on: Vec<_> = region.leases.iter().map(held).chain(spilled).chain(error).collect();
        vec![region.region.to_string(), on.join(", ")]
    };
    table(["REGION", "ON"], regions.iter().map(row))
}

fn held(lease: &Held) -> String {
    let state = if lease.state == "ok" { String::new() } else { format!(" ({})", lease.state) };
    let copy = lease.copy.as_ref().map(copy).unwrap_or_default();
    let disk = lease.disk.as_ref().map(on_disk).unwrap_or_default();
    let days = lease.key_age_s.map_or(0, |seconds| (seconds / 86_400.0) as u64);
    let key = if days == 0 { String::new() } else { format!(", key {days}d old") };
    format!("{}: {} of {}{state}{copy}{disk}{key}", lease.lender, lease.placed, lease.capacity)
}

/// Describes the second copies of a lease's pages.
fn copy(copy: &SecondCopy) -> String {
    let SecondCopy { lender, first_answers, answers, lacks, first_lacks, .. } = copy;
    match (*lacks, *first_lacks) {
        _ if !answers && !first_answers => format!("; neither it nor its copy at {lender} answers"),
        _ if !answers => format!(", copy at {lender}, which does not answer"),
        _ if !first_answers => format!("; only its copy at {lender} answers"),
        (_, first_lacks) if first_lacks > Bytes::ZERO => {
            format!(", copy at {lender} with {first_lacks} that are only there")
        }
        (Bytes::ZERO, _) => format!(", copy at {lender}"),
        (lacks, _) => format!(", copy at {lender} without {lacks} so far"),
    }
}

/// Describes the copy of a lease's pages on the host's disk.
fn on_disk(copy: &DiskCopy) -> String {
    let DiskCopy { lender_answers, held, lacks, lender_lacks, paused, .. } = copy;
    let only = match *lender_lacks {
        Bytes::ZERO => String::new(),
        bytes => format!(", {bytes} of it only there"),
    };
    let without = match *lacks {
        Bytes::ZERO => String::new(),
        bytes => format!(", without {bytes} so far"),
    };
    let paused = paused.as_ref().map(|why| format!(", paused: {why}")).unwrap_or_default();
    let copy = format!("{held} on the disk{only}{without}{paused}");
    if *lender_answers { format!(", {copy}") } else { format!("; does not answer: {copy}") }
}

/// Describes what would be lost with each lender.
fn at_risk(at_risk: &[AtRisk]) -> String {
    let row = |risk: &AtRisk| vec![risk.lender.to_string(), risk.bytes.to_string()];
    table(["IF IT DIED NOW", "LOST"], at_risk.iter().map(row))
}

fn peers(peers: &[Peer]) -> String {
    let row = |peer: &Peer| {
        let spare = match (peer.spare, peer.spare_s) {
            (Some(spare), Some(age)) => format!("{spare}, {age:.0}s ago"),
            (Some(spare), None) => spare.to_string(),
            (None, _) => "?".to_owned(),
        };
        let state = match (&peer.error, peer.standing) {
            (Some(error), _) if peer.refused => format!("refuses: {error}"),
            (_, Standing::Down) => "down".to_owned(),
            (Some(error), _) => error.clone(),
            (None, Standing::Former) => "a former peer; its leases are being returned".to_owned(),
            (None, Standing::Left) => "left; its leases are being returned".to_owned(),
            (None, Standing::Up) if peer.admits => "up; admits hosts".to_owned(),
            (None, Standing::Up) => "up".to_owned(),
            (None, Standing::Listed) => String::new(),
        };
        let heard = match (peer.heard_s, peer.standing) {
            (Some(age), _) => format!("{age:.0}s ago"),
            (None, Standing::Up | Standing::Down | Standing::Left) => "-".to_owned(),
            (None, _) => "never".to_owned(),
        };
        vec![peer.host.to_string(), peer.address.clone(), heard, spare, state]
    };
    table(["HOST", "ADDRESS", "HEARD", "COULD LEND", "STATE"], peers.iter().map(row))
}

fn events(events: &[Event]) -> String {
    let latest = &events[events.len().saturating_sub(LATEST)..];
    let line = |event: &Event| {
        format!("  {}  {}  {}: {}", clock(event.at), event.kind, event.who, event.what)
    };
    std::iter::once("Events".to_owned())
        .chain(latest.iter().map(line))
        .collect::<Vec<_>>()
        .join("\n")
}

fn decisions(decisions: &[Decision]) -> String {
    let latest = &decisions[decisions.len().saturating_sub(LATEST)..];
    let lines = latest.iter().map(|latest| format!("  {}", decision(latest)));
    std::iter::once("Decisions".to_owned()).chain(lines).collect::<Vec<_>>().join("\n")
}

/// Returns a decision with its time.
pub fn decision(decision: &Decision) -> String {
    format!("{}  {}", clock(decision.at), decision.what)
}

/// Returns the time of day, UTC.
fn clock(since_epoch: f64) -> String {
    let second = since_epoch.max(0.0) as u64 % 86_400;
    format!("{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_shows_everything_that_an_operator_asks_for() {
        let text = status(
            &serde_json::from_value(serde_json::json!({
                "host": "a", "pid": 7, "version": "0.1.0", "uptime_s": 1.0, "role": "borrower",
                "period_s": 1.0, "role_changes": [],
                "memory": {
                    "source": "host", "total": 1 << 30, "used": 1 << 29, "swap_used": 1 << 20,
                    "upper": 1 << 29, "lower": 1 << 28, "shareable": 0, "spare": 0,
                    "pressure": true
                },
                "ledger": {
                    "total": 1 << 30, "reserved": 1 << 29, "vm_floor": 3 << 27, "vm_elastic": 0,
                    "cache_floor": 1 << 28, "group_surplus": 0, "lent": 0, "free": 0,
                    "overcommitted": 1 << 27
                },
                "draining": { "vms": 2, "leases": 1 },
                "lent": [],
                "borrowed": [{
                    "volume": "0".repeat(32), "pid": 8, "device": "/dev/loop3",
                    "backend": "fuse-loop", "capacity": 1 << 30, "swap_used": 1 << 20,
                    "spilled": 1 << 26, "last_error": "lender b is gone",
                    "leases": [{
                        "lease": "1".repeat(32), "lender": "b", "capacity": 1 << 30,
                        "placed": 1 << 26, "state": "unreachable for 3s", "key_age_s": 1e6
                    }]
                }],
                "peers": [{
                    "host": "b", "address": "192.0.2.2:7070", "standing": "listed",
                    "error": "connection refused"
                }],
                "events": [{
                    "at": 7322.0, "kind": "lender_lost", "who": "b", "what": "b does not answer"
                }],
                "decisions": [{"at": 3661.0, "what": "asks b for 1GiB"}],
            }))
            .unwrap(),
        );
        for part in [
            "a is borrower",
            "draining: 2 VMs, 1 lease left",
            "tasks wait",
            "CACHE FLOOR",
            "OVERCOMMITTED",
            "384MiB",
            "/dev/loop3",
            "1MiB of 1GiB",
            "b: 64MiB of 1GiB (unreachable for 3s), key 11d old",
            "64MiB in the local spill file",
            "lender b is gone",
            "connection refused",
            "01:01:01Z  asks b for 1GiB",
            "02:02:02Z  lender lost  b: b does not answer",
            "192.0.2.2:7070  never  ?",
        ] {
            assert!(text.contains(part), "no '{part}' in\n{text}");
        }
        assert!(!text.contains("Lent"), "an empty section is not shown:\n{text}");
    }
}
