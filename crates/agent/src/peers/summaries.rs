//! The question to all hosts of the cluster what each has, lends and borrows. Only an operator asks
//! it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use aquifer_api::client::CallError;
use aquifer_api::cluster::{ClusterHost, Summary};
use aquifer_api::path;
use aquifer_api::status::{self, Standing};
use aquifer_page::HostName;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::{Peer, Peers, with_help};

/// How long one host may take to answer.
pub(super) const SUMMARY_TIMEOUT: Duration = Duration::from_secs(2);

/// The largest summary, in bytes: all of a cluster's summaries fit one answer to the operator.
pub(super) const LARGEST_SUMMARY: usize = 128 << 10;

/// How long all hosts together may take. The hosts that were not asked by then are rows, too.
const ALL_TIMEOUT: Duration = Duration::from_secs(8);

/// How many hosts are asked at a time, by all operators together.
pub(super) const AT_ONCE: usize = 32;

/// The most characters of the reason why a certificate is not renewed.
const LONGEST_REASON: usize = 200;

/// The most characters of a version that a table shows.
const LONGEST_VERSION: usize = 32;

/// Why a row lacks a host's answer.
struct Silence {
    refused: bool,
    why: String,
}

type Answer = Result<Summary, Silence>;

impl Peers {
    /// Asks all hosts of the configuration and of the cluster, and returns one row for each of them
    /// and for this host, by name. A host that left is a row, too, and is not asked.
    ///
    /// Neither an answer nor its lack changes what this host knows of lenders.
    pub(crate) async fn cluster(&self, own: Summary) -> Vec<ClusterHost> {
        let known: BTreeMap<_, _> =
            self.all().into_iter().filter(|(_, peer)| peer.standing != Standing::Former).collect();
        let before = self.status_with(|_| true).into_iter();
        let mut answers = self.ask_all(&known).await;
        let rows = before.filter_map(|status| {
            let peer = known.get(&status.host)?;
            let answer = answers.remove(&status.host);
            Some(row(told_by_gossip(status, peer), answer))
        });
        let mut rows: Vec<_> = rows.chain([own_row(own)]).collect();
        rows.sort_by(|a, b| a.peer.host.cmp(&b.peer.host));
        rows
    }

    /// Asks first the hosts that probably live: those that do not may use up the time.
    async fn ask_all(&self, known: &BTreeMap<HostName, Arc<Peer>>) -> BTreeMap<HostName, Answer> {
        let ends = Instant::now() + ALL_TIMEOUT;
        let mut asked: Vec<_> = known.iter().filter(|(_, peer)| peer.is_known()).collect();
        asked.sort_by_key(|(_, peer)| peer.standing == Standing::Down);
        let mut calls = JoinSet::new();
        let mut answers = BTreeMap::new();
        for (host, peer) in asked {
            let turn = timeout_at(ends, self.0.asking.clone().acquire_owned()).await;
            let Ok(Ok(turn)) = turn else {
                answers.insert(host.clone(), Err(out_of_time()));
                continue;
            };
            let (host, peer) = (host.clone(), peer.clone());
            calls.spawn(async move {
                let answer = ask(&host, &peer).await;
                drop(turn);
                (host, answer)
            });
        }
        while let Some(answered) = calls.join_next().await {
            answers.extend(answered);
        }
        answers
    }
}

fn out_of_time() -> Silence {
    let why = format!("it was not asked: its turn did not come within {} s", ALL_TIMEOUT.as_secs());
    Silence { refused: false, why }
}

async fn ask(host: &HostName, peer: &Peer) -> Answer {
    let answer = peer.asking.get::<Summary>(path::SUMMARY).await.map_err(|error| match error {
        CallError::Refused { problem, .. } => {
            Silence { refused: true, why: plain(&with_help(&problem)) }
        }
        error => Silence { refused: false, why: plain(&error.to_string()) },
    });
    answer.and_then(|summary| checked(host, &peer.address, summary))
}

/// Refuses an answer that cannot be true.
fn checked(host: &HostName, address: &str, mut summary: Summary) -> Answer {
    let wrong = |why: String| Err(Silence { refused: false, why });
    if summary.host != *host {
        return wrong(format!(
            "the agent at {address} has the certificate of {host}, but calls itself {}",
            summary.host
        ));
    }
    if !summary.ledger.adds_up() {
        return wrong(format!("the account of {host} does not add up: {:?}", summary.ledger));
    }
    summary.version = plain(&summary.version).chars().take(LONGEST_VERSION).collect();
    summary.address = plain(&summary.address);
    if let Some(certificate) = &mut summary.certificate {
        let failed = certificate.failed.as_deref().map(plain);
        certificate.failed = failed.map(|why| why.chars().take(LONGEST_REASON).collect());
    }
    Ok(summary)
}

/// Leaves out what would steer an operator's terminal.
fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

/// Adds what gossip last said of a host that gave no answer.
fn told_by_gossip(status: status::Peer, peer: &Peer) -> status::Peer {
    let told = peer.last().told;
    let age = told.map(|(_, at)| at.elapsed().as_secs_f64());
    let spare = told.map(|(spare, _)| spare);
    match status.spare {
        Some(_) => status,
        None => status::Peer { spare, spare_s: age, ..status },
    }
}

fn row(peer: status::Peer, answer: Option<Answer>) -> ClusterHost {
    match answer {
        Some(Ok(summary)) => ClusterHost {
            peer: status::Peer {
                heard_s: Some(0.0),
                zone: summary.zone.clone().or(peer.zone),
                admits: summary.admits,
                refused: false,
                error: None,
                ..peer
            },
            summary: Some(summary),
        },
        Some(Err(Silence { refused, why })) => {
            ClusterHost { peer: status::Peer { refused, error: Some(why), ..peer }, summary: None }
        }
        None => ClusterHost { peer, summary: None },
    }
}

fn own_row(own: Summary) -> ClusterHost {
    let peer = status::Peer {
        host: own.host.clone(),
        address: own.address.clone(),
        standing: Standing::Up,
        admits: own.admits,
        zone: own.zone.clone(),
        since_s: None,
        heard_s: Some(0.0),
        spare: None,
        spare_s: None,
        refused: false,
        error: None,
    };
    ClusterHost { peer, summary: Some(own) }
}

#[cfg(test)]
mod tests {
    use aquifer_api::status::{Ledger, Role};
    use aquifer_page::Bytes;

    use super::*;

    fn summary(host: &str, total: u64, free: u64) -> Summary {
        let (total, free) = (Bytes::gib(total), Bytes::gib(free));
        Summary {
            host: host.parse().unwrap(),
            address: "192.0.2.1:7070".to_owned(),
            admits: false,
            zone: None,
            certificate: None,
            version: "1".to_owned(),
            role: Role::Neutral,
            ledger: Ledger { total, free, ..Ledger::default() },
            lent: BTreeMap::new(),
            borrowed: BTreeMap::new(),
            vms: None,
            pressure: false,
            draining: false,
        }
    }

    fn check(summary: Summary) -> Result<Summary, String> {
        let checked = checked(&"b".parse().unwrap(), "192.0.2.1:7070", summary);
        checked.map_err(|silence| silence.why)
    }

    #[test]
    fn an_answer_in_another_name_or_that_does_not_add_up_is_wrong() {
        check(summary("b", 4, 4)).unwrap();
        let why = check(summary("c", 4, 4)).unwrap_err();
        assert!(why.contains("certificate of b, but calls itself c"), "{why}");
        for (total, free) in [(4, 3), (4, 5), (0, u64::MAX >> 30)] {
            let why = check(summary("b", total, free)).unwrap_err();
            assert!(why.contains("the account of b does not add up"), "{why}");
        }
    }

    #[test]
    fn an_answer_does_not_steer_the_terminal() {
        let version = format!("1\x1b[2J\n{}", "9".repeat(1000));
        let checked = check(Summary { version, ..summary("b", 4, 4) }).unwrap();
        assert_eq!(checked.version, format!("1[2J{}", "9".repeat(28)));
    }
}
