//! Tests of the server against the NBD specification, case by case.

use aquifer_nbd::proto::{
    BASE_ALLOCATION, ExportNameReply, chunk, command, command_flag, errno, export_flag, info,
    option, reply,
};
use aquifer_page::{Bytes, PAGE_SIZE};

use super::harness::{Answer, Client, Served, info_payload, meta_payload, request};
use crate::common::{Raw, pattern};

const PAGE: u64 = PAGE_SIZE as u64;
const MIB: usize = 1 << 20;

#[test]
fn export_name_works_with_and_without_the_zeroes() {
    let served = Served::new(Bytes::mib(1));
    for (client_flags, zeroes) in [(1u32, 124), (3, 0)] {
        let mut client = Client::connect(&served.socket());
        client.take_bytes(18);
        client.put(&client_flags.to_be_bytes());
        client.option(option::EXPORT_NAME, b"");
        let reply: ExportNameReply = client.take();
        assert_eq!(reply.size.get(), 1 << 20);
        assert_ne!(reply.flags.get() & export_flag::CAN_MULTI_CONN, 0);
        assert_eq!(client.take_bytes(zeroes), vec![0; zeroes]);
        client.write(PAGE, b"old");
        assert_eq!(client.read(PAGE, 3), b"old");
        client.request(command::DISC, 0, 0, 0, 0);
        assert!(client.is_closed());
    }
    let mut client = Client::greeted(&served.socket());
    client.option(option::EXPORT_NAME, b"nonsense");
    assert!(client.is_closed(), "there is no other way to say no");
}

#[test]
fn exports_are_listed_described_and_refused_by_name() {
    let served = Served::new(Bytes::mib(1));
    served.add("zwei", Bytes::mib(2));
    let mut client = Client::greeted(&served.socket());

    client.option(option::LIST, &[]);
    let names: Vec<_> = client.option_replies(option::LIST);
    assert_eq!(names[0], (reply::SERVER, vec![0; 4]));
    assert_eq!(names[1], (reply::SERVER, b"\0\0\0\x04zwei".to_vec()));
    assert_eq!(names.len(), 3);

    let mut payload = info_payload("zwei");
    payload.truncate(payload.len() - 2);
    payload.extend([0, 1]);
    payload.extend(info::NAME.to_be_bytes());
    client.option(option::INFO, &payload);
    let replies = client.option_replies(option::INFO);
    let kind = |payload: &[u8]| u16::from_be_bytes([payload[0], payload[1]]);
    let find = |wanted| {
        replies.iter().find(|(is, p)| *is == reply::INFO && kind(p) == wanted).unwrap().1.clone()
    };
    assert_eq!(find(info::EXPORT)[2..10], (2u64 << 20).to_be_bytes());
    assert_eq!(
        find(info::BLOCK_SIZE)[2..],
        [1u32.to_be_bytes(), 4096u32.to_be_bytes(), (32u32 << 20).to_be_bytes()].concat()
    );
    assert_eq!(find(info::NAME)[2..], *b"zwei");

    for (name, kind, text) in [
        ("drei", reply::ERR_UNKNOWN, "no export 'drei'"),
        ("forbidden", reply::ERR_POLICY, "belongs to another host"),
    ] {
        client.option(option::GO, &info_payload(name));
        let (is, why) = client.option_replies(option::GO).pop().unwrap();
        assert_eq!(is, kind);
        assert!(String::from_utf8(why).unwrap().contains(text));
    }

    client.option(option::ABORT, &[]);
    assert_eq!(client.option_reply(option::ABORT).0, reply::ACK);
    assert!(client.is_closed());
}

#[test]
fn bad_options_do_not_end_the_handshake() {
    let served = Served::new(Bytes::mib(1));
    let mut client = Client::greeted(&served.socket());
    for (option, payload, kind) in [
        (11, vec![], reply::ERR_UNSUP),
        (99, vec![1; 100], reply::ERR_UNSUP),
        (option::STARTTLS, vec![], reply::ERR_UNSUP),
        (option::LIST, vec![0], reply::ERR_INVALID),
        (option::STRUCTURED_REPLY, vec![0], reply::ERR_INVALID),
        (option::INFO, vec![0xff; 6], reply::ERR_INVALID),
        (option::INFO, info_payload("a\0b"), reply::ERR_INVALID),
        (option::GO, vec![0; 100_000], reply::ERR_TOO_BIG),
        (option::SET_META_CONTEXT, meta_payload("", &[]), reply::ERR_INVALID),
    ] {
        client.option(option, &payload);
        assert_eq!(client.option_reply(option).0, kind, "option {option}");
    }
    client.go("");
    client.write(0, b"x");

    let mut client = Client::greeted(&served.socket());
    client.option(option::ABORT, &[0; 100_000]);
    assert_eq!(client.option_reply(option::ABORT).0, reply::ACK);
    let mut client = Client::greeted(&served.socket());
    client.option(option::EXPORT_NAME, &[b'x'; 100_000]);
    assert!(client.is_closed(), "the reply to this option cannot carry an error");
}

#[test]
fn block_status_needs_its_negotiation_for_that_export() {
    let served = Served::new(Bytes::mib(1));
    served.add("other", Bytes::mib(1));
    served.lease.write(2 * PAGE, &pattern(2 * PAGE_SIZE, 1)).unwrap();

    let mut client = Client::greeted(&served.socket());
    client.structured();
    for queries in [&[][..], &["base:"], &[BASE_ALLOCATION], &["x", BASE_ALLOCATION]] {
        client.option(option::LIST_META_CONTEXT, &meta_payload("", queries));
        let (kind, context) = client.option_replies(option::LIST_META_CONTEXT).swap_remove(0);
        assert_eq!(
            (kind, &context[4..]),
            (reply::META_CONTEXT, BASE_ALLOCATION.as_bytes()),
            "{queries:?}"
        );
    }
    client.option(option::SET_META_CONTEXT, &meta_payload("", &["qemu:dirty-bitmap:x"]));
    assert_eq!(client.option_replies(option::SET_META_CONTEXT).len(), 1);
    client.option(option::SET_META_CONTEXT, &meta_payload("", &[BASE_ALLOCATION]));
    let context = client.option_replies(option::SET_META_CONTEXT).swap_remove(0).1;
    client.go("");

    let mut status = |flags, offset, length| {
        client.request(command::BLOCK_STATUS, flags, 5, offset, length);
        let Answer::Chunk { cookie: 5, done: true, kind: chunk::BLOCK_STATUS, payload } =
            client.answer()
        else {
            panic!("no block status")
        };
        assert_eq!(payload[..4], context[..4], "the context's id");
        let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
        payload[4..].chunks(8).map(|run| (number(&run[..4]), number(&run[4..]))).collect::<Vec<_>>()
    };
    assert_eq!(status(0, 0, 1 << 20), [(8192, 3), (8192, 0), ((1 << 20) - 16384, 3)]);
    assert_eq!(status(0, 8000, 1000), [(192, 3), (808, 0)]);
    assert_eq!(status(command_flag::REQ_ONE, 8000, 1000), [(192, 3)]);

    for (structured, context_of) in [(false, None), (true, None), (true, Some("other"))] {
        let mut client = Client::greeted(&served.socket());
        if structured {
            client.structured();
        }
        if let Some(name) = context_of {
            client.option(option::SET_META_CONTEXT, &meta_payload(name, &[BASE_ALLOCATION]));
            client.option_replies(option::SET_META_CONTEXT);
        }
        client.go("");
        client.request(command::BLOCK_STATUS, 0, 5, 0, 4096);
        match client.answer() {
            Answer::Simple { error, .. } => assert_eq!(error, errno::EINVAL),
            Answer::Chunk { kind, payload, .. } => {
                assert_eq!((kind, &payload[..4]), (chunk::ERROR, &errno::EINVAL.to_be_bytes()[..]));
            }
        }
    }
}

#[test]
fn reads_of_every_shape_give_the_same_bytes() {
    let served = Served::new(Bytes::mib(4));
    for (offset, length) in [(0, 5000), (100_000, 1), (120_000, 300_000), (2 << 20, 1 << 20)] {
        served.lease.write(offset, &pattern(length, offset + 1)).unwrap();
    }
    let all = super::harness::contents(&served.lease);
    let mut simple = served.client(false);
    let mut structured = served.client(true);
    for (offset, length) in [
        (0u64, 0u32),
        (0, 1),
        (4095, 2),
        (0, 4096),
        (4096, 4096),
        (1, 32 << 10),
        (3, 33 << 10),
        (99_999, 40_000),
        (777, 1 << 20),
        (0, 4 << 20),
        ((4 << 20) - 1, 1),
    ] {
        let expected = &all[offset as usize..][..length as usize];
        assert!(simple.read(offset, length) == expected, "simple {length} at {offset}");
        assert!(
            structured.structured_read(0, offset, length).0 == expected,
            "chunks {length} at {offset}"
        );
        let (bytes, chunks) = structured.structured_read(command_flag::DF, offset, length);
        assert!(bytes == expected && chunks == 1, "one chunk {length} at {offset}");
    }
    let (_, chunks) = structured.structured_read(0, 4096, 1 << 16);
    assert_eq!(chunks, 2, "data, then a hole");
}

#[test]
fn writes_of_every_size_arrive_whole() {
    let served = Served::new(Bytes::mib(40));
    let mut client = served.client(false);
    let mut model = vec![0; 40 * MIB];
    for (seed, (offset, length)) in [
        (0, 1),
        (4000, 200),
        (8192, 4096),
        (10_000, 128 << 10),
        (300_001, (128 << 10) + 1),
        (MIB, 3 * MIB + 17),
        (7 * MIB + 5, 32 * MIB),
        (40 * MIB - 3, 3),
    ]
    .into_iter()
    .enumerate()
    {
        let data = pattern(length, seed as u64);
        client.write(offset as u64, &data);
        model[offset..offset + length].copy_from_slice(&data);
    }
    assert!(super::harness::contents(&served.lease) == model);
}

#[test]
fn bad_ranges_and_flags_are_refused_one_by_one() {
    let served = Served::new(Bytes::mib(1));
    let mut client = served.client(false);
    let size = 1 << 20;
    for (command, flags, offset, length, error) in [
        (command::READ, 0, size, 1, errno::EINVAL),
        (command::READ, 0, u64::MAX, 4096, errno::EINVAL),
        (command::READ, 0, 0, (32 << 20) + 1, errno::EINVAL),
        (command::READ, 0, 0, 2 << 20, errno::EINVAL),
        (command::READ, command_flag::DF, 0, 1, errno::EINVAL),
        (command::TRIM, 0, size - 1, 2, errno::EINVAL),
        (command::CACHE, 0, size, 1, errno::EINVAL),
        (command::WRITE_ZEROES, 0, size - 1, 2, errno::ENOSPC),
        (command::TRIM, command_flag::NO_HOLE, 0, 1, errno::EINVAL),
        (command::FLUSH, 1 << 9, 0, 0, errno::EINVAL),
        (command::BLOCK_STATUS, 0, 0, 4096, errno::EINVAL),
        (
            command::WRITE_ZEROES,
            command_flag::NO_HOLE | command_flag::FAST_ZERO,
            0,
            4096,
            errno::ENOTSUP,
        ),
        (42, 0, 0, 0, errno::EINVAL),
        (command::TRIM, command_flag::FUA, 0, 4096, errno::OK),
        (command::READ, command_flag::FUA, 0, 0, errno::OK),
        (command::CACHE, 0, 0, 4096, errno::OK),
        (command::FLUSH, 0, 0, 0, errno::OK),
        (command::TRIM, 0, size, 0, errno::OK),
    ] {
        client.request(command, flags, 9, offset, length);
        assert_eq!(
            client.simple_reply(),
            (9, error),
            "command {command} flags {flags} {length} at {offset}"
        );
    }
    for (flags, offset, error) in
        [(0, size - 1, errno::ENOSPC), (0, u64::MAX - 1, errno::ENOSPC), (1 << 9, 0, errno::EINVAL)]
    {
        client.put(&[request(command::WRITE, flags, 3, offset, 4096), vec![1; 4096]].concat());
        assert_eq!(client.simple_reply(), (3, error));
    }
    client.put(
        &[request(command::WRITE, 0, 3, size - (1 << 17), 1 << 19), vec![1; 1 << 19]].concat(),
    );
    assert_eq!(client.simple_reply(), (3, errno::ENOSPC), "a long write, stored as it arrives");
    client.write(0, b"in step");

    let mut client = served.client(true);
    client.request(command::READ, 0, 9, size, 1);
    let Answer::Chunk { cookie: 9, done: true, kind: chunk::ERROR, payload } = client.answer()
    else {
        panic!()
    };
    assert_eq!(payload[..4], errno::EINVAL.to_be_bytes());
}

#[test]
fn requests_in_bulk_or_in_drips_are_answered_in_order() {
    let served = Served::new(Bytes::mib(4));
    let mut client = served.client(false);
    let mut together = Vec::new();
    for page in 0..500u64 {
        together.extend(request(command::WRITE, 0, page, page * PAGE, 4096));
        together.extend(pattern(PAGE_SIZE, page));
        together.extend(request(command::READ, 0, 1000 + page, page * PAGE, 4096));
    }
    let mut writer = client.stream.try_clone().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || std::io::Write::write_all(&mut writer, &together).unwrap());
        for page in 0..500u64 {
            assert_eq!(client.simple_reply(), (page, 0));
            assert_eq!(client.simple_reply(), (1000 + page, 0));
            assert!(client.take_bytes(PAGE_SIZE) == pattern(PAGE_SIZE, page), "page {page}");
        }
    });
    let drips =
        [request(command::WRITE, 0, 8, 5, 3), b"abc".to_vec(), request(command::READ, 0, 9, 5, 3)]
            .concat();
    for byte in drips {
        client.put(&[byte]);
    }
    assert_eq!((client.simple_reply(), client.simple_reply()), ((8, 0), (9, 0)));
    assert_eq!(client.take_bytes(3), b"abc");
}

#[test]
fn a_full_lease_says_no_space_and_goes_on() {
    let served =
        Served::with(Bytes::mib(1), Bytes(4 * PAGE), aquifer_nbd::server::Limits::default());
    let mut client = served.client(false);
    client.write(0, &pattern(4 * PAGE_SIZE, 1));
    client.put(&[request(command::WRITE, 0, 3, 8 * PAGE, 4096), vec![1; 4096]].concat());
    assert_eq!(client.simple_reply(), (3, errno::ENOSPC));
    client.request(command::WRITE_ZEROES, command_flag::NO_HOLE, 4, 8 * PAGE, 4096);
    assert_eq!(client.simple_reply(), (4, errno::ENOSPC));
    client.request(command::WRITE_ZEROES, 0, 5, 0, 4096);
    assert_eq!(client.simple_reply(), (5, 0));
    client.write(8 * PAGE, &[1; PAGE_SIZE]);
    assert_eq!(client.read(PAGE, 100), pattern(4 * PAGE_SIZE, 1)[PAGE_SIZE..PAGE_SIZE + 100]);
}
