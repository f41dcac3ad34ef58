//! Tests that a misbehaving client harms only itself.

use std::io::Write;
use std::net::Shutdown;
use std::thread;
use std::time::Duration;

use aquifer_nbd::proto::{MAX_PAYLOAD, OPTION_MAGIC, command, option};
use aquifer_nbd::server::Limits;
use aquifer_page::{Bytes, PAGE_SIZE};

use super::harness::{Client, Served, info_payload, request};
use crate::common::{Raw, at_most, pattern, wait_until};

const MIB: usize = 1 << 20;

#[test]
fn garbage_and_lies_end_the_connection_that_tells_them() {
    let served = Served::new(Bytes::mib(64));
    let mut bystander = served.client(false);

    let mut client = Client::connect(&served.socket());
    client.put(&pattern(4096, 1));
    assert!(client.is_closed(), "garbage for a greeting");

    let mut client = Client::greeted(&served.socket());
    client.put(&pattern(4096, 2));
    assert!(client.is_closed(), "garbage for an option");

    let mut client = Client::greeted(&served.socket());
    client.put(&[&OPTION_MAGIC.to_be_bytes()[..], &[0, 0, 0, 7], &u32::MAX.to_be_bytes()].concat());
    assert!(client.is_closed(), "an option of 4 GiB");

    let mut client = served.client(true);
    client.put(&pattern(28, 3));
    assert!(client.is_closed(), "garbage for a request");

    let mut client = served.client(true);
    client.request(command::WRITE, 0, 1, 0, MAX_PAYLOAD + 1);
    assert!(client.is_closed(), "a write of more than agreed");

    bystander.write(0, b"unharmed");
    served.assert_serves();
    drop(bystander);
    wait_until("all connections are gone", || served.connections() == 0);
}

#[test]
fn clients_may_vanish_at_any_byte() {
    let served = Served::new(Bytes::mib(4));
    let handshake = [
        &3u32.to_be_bytes()[..],
        &OPTION_MAGIC.to_be_bytes(),
        &7u32.to_be_bytes(),
        &6u32.to_be_bytes(),
        &info_payload(""),
    ]
    .concat();
    let dialogue = [handshake, request(command::WRITE, 0, 1, 0, 200), pattern(200, 4)].concat();
    for cut in 0..dialogue.len() {
        let mut client = Client::connect(&served.socket());
        client.put(&dialogue[..cut]);
    }
    // In the middle of a long write: the server may store the received part, and changes nothing
    // else.
    served.lease.write(2 << 20, &pattern(MIB, 5)).unwrap();
    let mut client = served.client(false);
    client.put(&request(command::WRITE, 0, 1, 0, 3 << 20));
    client.put(&pattern(MIB + 100, 6));
    client.stream.shutdown(Shutdown::Both).unwrap();
    wait_until("all connections are gone", || served.connections() == 0);
    let mut after = vec![0; MIB];
    served.lease.read(2 << 20, &mut after).unwrap();
    assert!(after == pattern(MIB, 5));
    served.assert_serves();
}

#[test]
fn a_slow_handshake_ends_the_connection() {
    let limits = Limits { handshake: Duration::from_secs(2), ..Limits::default() };
    let served = Served::with(Bytes::mib(1), Bytes::mib(1), limits);
    let mut silent = Client::connect(&served.socket());
    let mut slow = Client::greeted(&served.socket());
    let mut drip = slow.stream.try_clone().unwrap();
    // A client that sends an endless option byte by byte keeps no thread beyond the timeout.
    let dripping = thread::spawn(move || {
        let option =
            [&OPTION_MAGIC.to_be_bytes()[..], &option::GO.to_be_bytes(), &10_000u32.to_be_bytes()]
                .concat();
        for byte in option.into_iter().chain(std::iter::repeat_n(0, 10_000)) {
            if drip.write_all(&[byte]).is_err() {
                return true;
            }
            thread::sleep(Duration::from_millis(5));
        }
        false
    });
    let mut steady = served.client(false);
    assert!(silent.is_closed());
    assert!(slow.is_closed());
    assert!(dripping.join().unwrap());
    steady.write(0, b"past the handshake there is no hurry");
}

#[test]
fn a_hundred_clients_are_served_and_the_next_one_is_refused() {
    let limits = Limits { connections: at_most(100), ..Limits::default() };
    let served = Served::with(Bytes::mib(1), Bytes::mib(1), limits);
    let mut clients: Vec<_> = (0..100).map(|_| served.client(false)).collect();
    for (at, client) in clients.iter_mut().enumerate() {
        client.write(at as u64 * 10, &[at as u8; 10]);
    }
    assert!(Client::connect(&served.socket()).is_closed());
    for (at, client) in clients.iter_mut().rev().enumerate() {
        assert_eq!(client.read((99 - at as u64) * 10, 10), [99 - at as u8; 10]);
    }
    drop(clients);
    wait_until("all connections are gone", || served.connections() == 0);
    served.assert_serves();
}

#[test]
fn silent_clients_keep_no_other_client_out() {
    let limits = Limits { connections: at_most(10), ..Limits::default() };
    let served = Served::with(Bytes::mib(1), Bytes::mib(1), limits);
    let mut steady = served.client(false);
    wait_until("the server knows that it has chosen an export", || served.connections() == 1);
    let mut silent: Vec<_> = (0..50).map(|_| Client::connect(&served.socket())).collect();
    served.assert_serves();
    assert!(silent[0].is_closed(), "the one that was there the longest made room");
    steady.write(0, b"past the handshake nobody makes room");
}

#[test]
fn a_client_that_does_not_read_holds_up_no_writer() {
    let served = Served::new(Bytes::mib(8));
    served.lease.write(0, &pattern(8 * MIB, 1)).unwrap();
    let mut lazy = served.client(false);
    for _ in 0..16 {
        lazy.request(command::READ, 0, 1, 0, 8 << 20);
    }
    // The server's send blocks by now or soon; in both cases it holds no pages.
    let mut writer = served.client(false);
    for round in 0..8u64 {
        writer.write(0, &pattern(8 * MIB, 10 + round));
    }
    // Each page that a read returns is the content of one round.
    let rounds: Vec<_> = [1].into_iter().chain(10..18).map(|seed| pattern(8 * MIB, seed)).collect();
    for _ in 0..16 {
        assert_eq!(lazy.simple_reply(), (1, 0));
        let bytes = lazy.take_bytes(8 * MIB);
        for page in (0..8 * MIB).step_by(PAGE_SIZE) {
            let page = page..page + PAGE_SIZE;
            assert!(
                rounds.iter().any(|round| round[page.clone()] == bytes[page.clone()]),
                "page at {}",
                page.start
            );
        }
    }
    served.assert_serves();
}
