//! Connections that share a controller, and the controller's end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_nvme::initiator::{Connection, Failure, Session, Target};
use aquifer_nvme::target::{self as serving, Limits};
use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_transport::Address;

use super::middle::Middle;
use super::{connect, read, target};
use crate::common::{TIMEOUT, pattern, wait_until};
use crate::nvme_target::harness::Served;

#[test]
fn threads_share_a_controller_and_do_not_disturb_each_other() {
    let served = Served::new(Bytes::mib(64));
    let session = Session::new(Arc::new(target(&served)));
    let connections: Vec<_> = (0..8).map(|_| session.connect(TIMEOUT).unwrap()).collect();
    // Eight I/O queues and one admin queue.
    assert_eq!(served.queues(), 9);
    thread::scope(|scope| {
        for (worker, mut connection) in connections.into_iter().enumerate() {
            scope.spawn(move || {
                for round in 0..20 {
                    let data = pattern(2 << 20, worker as u64 * 100 + round);
                    let offset = (worker as u64) << 23;
                    connection.write(offset, &data).unwrap();
                    assert!(read(&mut connection, offset, data.len()) == data);
                }
            });
        }
    });
    wait_until("the controller has ended with its last queue", || served.queues() == 0);
}

#[test]
fn connections_that_come_at_once_make_one_controller() {
    let served = Served::new(Bytes::mib(4));
    let middle = Middle::honest(&served);
    let target = Target { address: middle.address.clone(), ..target(&served) };
    let session = Session::new(Arc::new(target));
    let connections: Vec<Connection> = thread::scope(|scope| {
        let threads: Vec<_> =
            (0..6).map(|_| scope.spawn(|| session.connect(TIMEOUT).unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!((connections.len(), middle.admin_queues.load(Ordering::SeqCst)), (6, 1));
    // Queue numbers are reused.
    drop(connections);
    for _ in 0..200 {
        session.connect(TIMEOUT).unwrap();
    }
}

#[test]
fn queues_that_are_left_make_room_for_others() {
    let limits = Limits { queues: 2, ..Limits::default() };
    let served = Served::with(Bytes::mib(4), Bytes::mib(4), limits);
    let session = Session::new(Arc::new(target(&served)));
    let _stays = session.connect(TIMEOUT).unwrap();
    for _ in 0..20 {
        let second = session.connect(TIMEOUT).unwrap();
        let third = session.connect(TIMEOUT).unwrap_err();
        assert!(third.to_string().contains("at most 2 I/O queues"), "{third}");
        drop(second);
        wait_until("the target knows", || served.queues() == 2);
    }
}

#[test]
fn an_idle_controller_is_kept_alive() {
    let served = Served::new(Bytes::mib(4));
    let middle = Middle::honest(&served);
    let keep_alive = Duration::from_secs(1);
    let target = Target { keep_alive, address: middle.address.clone(), ..target(&served) };
    let mut connection = Connection::connect(Arc::new(target), TIMEOUT).unwrap();
    // Longer than the target's timeout without a Keep Alive.
    wait_until("signs of life", || middle.signs_of_life.load(Ordering::SeqCst) >= 9);
    assert!(read(&mut connection, 0, PAGE_SIZE) == vec![0; PAGE_SIZE]);
    assert_eq!(middle.admin_queues.load(Ordering::SeqCst), 1);
}

#[test]
fn a_broken_queue_ends_its_controller_and_a_new_one_follows() {
    let served = Served::new(Bytes::mib(4));
    let middle = Middle::with(&served, |_, _| {});
    let target = Target { address: middle.address.clone(), ..target(&served) };
    let session = Session::new(Arc::new(target));
    let (mut one, mut two) = (session.connect(TIMEOUT).unwrap(), session.connect(TIMEOUT).unwrap());
    assert!(matches!(one.flush().unwrap_err().failure, Failure::Lost(_)));
    let error = two.flush().unwrap_err();
    assert!(error.ends_connection(), "{error}");
    wait_until("the target knows", || served.queues() == 0);
    let _three = session.connect(TIMEOUT).unwrap();
    assert_eq!(middle.admin_queues.load(Ordering::SeqCst), 2);
}

#[test]
fn a_lost_admin_queue_wakes_the_waiters_of_other_queues() {
    let served = Served::new(Bytes::mib(4));
    // The I/O queue waits forever: the proxy swallows its commands.
    let middle = Middle::with(&served, |mut host, _| {
        let _ = std::io::copy(&mut host, &mut std::io::sink());
    });
    let target = Target { address: middle.address.clone(), ..target(&served) };
    let mut connection = Connection::connect(Arc::new(target), TIMEOUT).unwrap();
    let waiting = thread::spawn(move || {
        let started = Instant::now();
        (connection.read(0, &mut [0; PAGE_SIZE]).unwrap_err(), started.elapsed())
    });
    wait_until("its target's end is gone", || served.queues() == 1);
    served.target.close_lease(served.lease.id());
    let (error, waited) = waiting.join().unwrap();
    assert!(matches!(error.failure, Failure::Lost(_)) && waited < TIMEOUT / 2, "{error}");
}

#[test]
fn a_target_that_is_restarted_is_found_again_with_its_pages() {
    let mut served = Served::new(Bytes::mib(4));
    let session = Session::new(Arc::new(target(&served)));
    let mut connection = session.connect(TIMEOUT).unwrap();
    connection.write(0, &pattern(PAGE_SIZE, 3)).unwrap();
    let (registry, address) = (Arc::clone(&served.registry), Address::Unix(served.socket()));
    let old =
        std::mem::replace(&mut served.target, serving::Target::new(registry, Limits::default()));
    old.shutdown();
    let error = connection.flush().unwrap_err();
    assert!(error.ends_connection(), "{error}");
    let error = session.connect(TIMEOUT).unwrap_err();
    assert!(matches!(error.failure, Failure::Connect(_)), "{error}");
    served.target.listen(&address, None).unwrap();
    let mut connection = session.connect(TIMEOUT).unwrap();
    assert!(read(&mut connection, 0, PAGE_SIZE) == pattern(PAGE_SIZE, 3));
    assert!(connect(&served).size() == Bytes::mib(4));
}
