//! Tests of what a host of the cluster can do to another by its datagrams: nothing but lie.

use std::net::SocketAddr;
use std::time::Duration;

use proptest::prelude::*;

use crate::gossip::{Gossip, Now, Output};
use crate::member::Member;
use crate::news::About;
use crate::seal::{Key, Opener, Sealer};

const WALL: Duration = Duration::from_secs(1_700_000_000);

fn member(number: u8) -> Member {
    Member {
        host: format!("h{number}").parse().unwrap(),
        address: SocketAddr::from(([127, 0, 0, number], 7070)),
        life: 1,
    }
}

fn at(millis: u64) -> Now {
    let steady = Duration::from_millis(millis);
    Now { steady, wall: WALL + steady }
}

fn gossip(number: u8, key: &Key) -> Gossip {
    let zone = Some(format!("z{number}").parse().unwrap());
    let about = About { admits: number == 1, zone };
    Gossip::new(member(number), about, key.clone(), number.into())
}

fn datagrams(outputs: Vec<Output>) -> Vec<Vec<u8>> {
    let datagram = |output| match output {
        Output::Send { datagram, .. } => Some(datagram),
        Output::Change(_) => None,
    };
    outputs.into_iter().filter_map(datagram).collect()
}

/// Returns the contents of datagrams that two hosts exchange in five seconds.
fn conversation(key: &Key) -> Vec<Vec<u8>> {
    let (mut one, mut two) = (gossip(1, key), gossip(2, key));
    let mut opener = Opener::new(key.clone());
    one.meet([member(2)]);
    let mut contents = Vec::new();
    for millis in (0..5000).step_by(50) {
        let now = at(millis);
        for datagram in datagrams(one.tick(now)) {
            contents.push(opener.open(&datagram, now.wall).unwrap().0.to_vec());
            for answer in datagrams(two.receive(&datagram, now).unwrap()) {
                contents.push(opener.open(&answer, now.wall).unwrap().0.to_vec());
                one.receive(&answer, now).unwrap();
            }
        }
    }
    assert!(contents.len() > 20, "{}", contents.len());
    contents
}

/// A content with some bytes changed, some cut off, and some added.
#[derive(Clone, Debug)]
struct Lie {
    of: usize,
    changes: Vec<(usize, u8)>,
    length: usize,
    more: Vec<u8>,
}

fn lie() -> impl Strategy<Value = Lie> {
    let changes = prop::collection::vec((0..200usize, any::<u8>()), 0..4);
    let more = prop::collection::vec(any::<u8>(), 0..40);
    let parts = (0..1000usize, changes, 1..200usize, more);
    parts.prop_map(|(of, changes, length, more)| Lie { of, changes, length, more })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 100,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn lies_of_a_host_of_the_cluster_stop_no_other(
        lies in prop::collection::vec(lie(), 1..40),
    ) {
        let key = Key::random().unwrap();
        let honest = conversation(&key);
        let mut sealer = Sealer::new(&key, 99);
        let mut host = gossip(3, &key);
        host.meet([member(1)]);
        let mut millis = 0;
        for lie in lies {
            let mut content = honest[lie.of % honest.len()].clone();
            for (place, byte) in &lie.changes {
                let place = place % content.len();
                content[place] = *byte;
            }
            content.truncate(lie.length.max(1));
            content.extend(lie.more);
            millis += 100;
            let datagram = sealer.seal(&content, at(millis).wall);
            prop_assert!(host.receive(&datagram, at(millis)).is_ok());
            host.tick(at(millis));
        }
        prop_assert_eq!(&host.own().host, &member(3).host);
        prop_assert_eq!(host.own().address, member(3).address);
        // It still answers an honest host, and takes it for alive.
        let mut other = gossip(4, &key);
        other.meet([member(3)]);
        for _ in 0..200 {
            millis += 50;
            for datagram in datagrams(other.tick(at(millis))) {
                for answer in datagrams(host.receive(&datagram, at(millis)).unwrap()) {
                    let _ = other.receive(&answer, at(millis));
                }
            }
            for datagram in datagrams(host.tick(at(millis))) {
                let _ = other.receive(&datagram, at(millis));
            }
        }
        let known = host.others();
        let found = known.iter().find(|known| known.member.host == member(4).host);
        prop_assert!(found.is_some_and(|known| known.is_alive()), "{known:?}");
    }
}
