//! Tests of the NBD initiator against other servers, dying servers and malicious ones.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_nbd::client::{Connection, Failure, NbdError, Operation, Run, Target};
use aquifer_nbd::proto::option;
use aquifer_transport::Address;
use aquifer_transport::initiating::Pipelined as _;
use aquifer_transport::initiator::Initiator as _;

use crate::certificates::{Cluster, host};
use crate::nbdkit::Nbdkit;
use crate::operations::{every_operation, pattern, read};

const TIMEOUT: Duration = Duration::from_secs(60);

fn target(address: Address) -> Arc<Target> {
    Arc::new(Target { address, export: String::new(), tls: None })
}

fn connect(server: &Nbdkit) -> Connection {
    Connection::connect(target(server.address()), TIMEOUT).unwrap()
}

#[test]
fn every_operation_works_with_structured_replies() {
    let server = Nbdkit::start(&["memory", "256M"]);
    let mut connection = connect(&server);
    assert!(connection.knows_holes() && connection.can_trim() && connection.can_write_zeroes());
    assert!(connection.can_multi_conn() && connection.can_flush() && !connection.is_read_only());
    every_operation(&mut connection);
}

#[test]
fn every_operation_works_with_simple_replies() {
    let server = Nbdkit::start(&["--no-sr", "memory", "256M"]);
    let mut connection = connect(&server);
    assert!(!connection.knows_holes());
    let error = connection.block_status(0, 4096, &mut Vec::new()).unwrap_err();
    assert!(matches!(error.failure, Failure::Unsupported(_)), "{error}");
    every_operation(&mut connection);
}

#[test]
fn every_operation_works_under_the_tls_of_another_make() {
    let cluster = Cluster::new();
    let server = Nbdkit::start_tls(&cluster.dir("lender"), &["memory", "256M"]);
    let config = cluster.identity("borrower").client();
    let tls = Some((config.clone(), host("lender")));
    let secure = Target { address: server.address(), export: String::new(), tls };
    every_operation(&mut Connection::connect(Arc::new(secure.clone()), TIMEOUT).unwrap());

    // The client rejects the wrong host, and the server rejects a client without TLS.
    let wrong = Target { tls: Some((config, host("borrower"))), ..secure };
    let error = Connection::connect(Arc::new(wrong), TIMEOUT).unwrap_err();
    assert!(matches!(error.failure, Failure::Tls(_)), "{error}");
    let error = Connection::connect(target(server.address()), TIMEOUT).unwrap_err().to_string();
    assert!(error.contains("it demands TLS"), "{error}");
}

#[test]
fn a_client_with_tls_sends_nothing_in_the_clear() {
    let cluster = Cluster::new();
    let server = Nbdkit::start(&["memory", "1M"]);
    let tls = Some((cluster.identity("borrower").client(), host("lender")));
    let target = Target { address: server.address(), export: String::new(), tls };
    let error = Connection::connect(Arc::new(target), TIMEOUT).unwrap_err().to_string();
    assert!(error.contains("it does not start TLS"), "{error}");
}

#[test]
fn holes_are_told_from_data() {
    let server = Nbdkit::start(&["memory", "256M"]);
    let mut connection = connect(&server);
    connection.write(64 << 10, &pattern(32 << 10, 4)).unwrap();
    let mut runs = Vec::new();
    connection.block_status(0, 256 << 10, &mut runs).unwrap();
    assert_eq!(
        runs[..2],
        [Run { length: 64 << 10, hole: true }, Run { length: 32 << 10, hole: false }]
    );
}

#[test]
fn an_error_of_the_server_is_typed_and_the_connection_goes_on() {
    let server = Nbdkit::start(&["full", "1M"]);
    let mut connection = connect(&server);
    let error = connection.write(0, &pattern(4096, 5)).unwrap_err();
    assert!(error.is_no_space() && !error.ends_connection(), "{error}");
    assert!(error.to_string().contains("nbd+unix:///?socket="), "{error}");
    assert!(read(&mut connection, 0, 4096) == vec![0; 4096]);

    let error = connection.read(1 << 20, &mut [0; 1]).unwrap_err();
    assert!(
        matches!(error.failure, Failure::OutOfRange { .. }) && !error.ends_connection(),
        "{error}"
    );

    let server = Nbdkit::start(&[
        "--filter=error",
        "memory",
        "1M",
        "error-pread=EIO",
        "error-pread-rate=100%",
    ]);
    let error = connect(&server).read(0, &mut [0; 4096]).unwrap_err();
    assert!(matches!(error.failure, Failure::Remote(5, _)) && !error.ends_connection(), "{error}");
    assert!(error.to_string().contains("Input/output error"), "{error}");
}

#[test]
fn an_unknown_export_is_refused_by_name() {
    let strict =
        ["--filter=exportname", "memory", "1M", "exportname-strict=true", "exportname=there"];
    let server = Nbdkit::start(&strict);
    let target = Target { address: server.address(), export: "not there".into(), tls: None };
    let error = Connection::connect(Arc::new(target), TIMEOUT).unwrap_err().to_string();
    assert!(error.contains("not%20there") && error.contains("no such export"), "{error}");
}

#[test]
fn a_refused_client_takes_its_leave() {
    let error = malicious(|mut socket| {
        socket.write_all(GREETING).unwrap();
        socket.read_exact(&mut [0; 4]).unwrap();
        let structured = read_option(&mut socket);
        answer(&mut socket, structured, 0x8000_0001, b"not known here");
        let go = read_option(&mut socket);
        answer(&mut socket, go, 0x8000_0007, b"maintenance");
        assert_eq!(read_option(&mut socket), option::ABORT);
        // The end is in order: no reset.
        assert_eq!(socket.read(&mut [0]).unwrap(), 0);
    });
    assert!(matches!(error.failure, Failure::Refused(_)) && error.ends_connection(), "{error}");
    assert!(error.to_string().contains("shutting down (maintenance)"), "{error}");
}

#[test]
fn a_killed_server_is_an_error_at_once_and_stays_one() {
    let mut server = Nbdkit::start(&["memory", "1M"]);
    let mut connection = connect(&server);
    server.kill();
    let error = connection.write(0, &[1; 4096]).and_then(|()| connection.flush()).unwrap_err();
    assert!(matches!(error.failure, Failure::Lost(_)) && error.ends_connection(), "{error}");
    let error = connection.flush().unwrap_err();
    assert!(matches!(error.failure, Failure::Broken), "{error}");
    let error = Connection::connect(target(server.address()), TIMEOUT).unwrap_err();
    assert!(matches!(error.failure, Failure::Connect(_)), "{error}");
}

#[test]
fn a_silent_server_is_an_error_once_the_timeout_is_over() {
    let server = Nbdkit::start(&["memory", "64M"]);
    let mut connection =
        Connection::connect(target(server.address()), Duration::from_secs(2)).unwrap();
    server.freeze();
    let started = Instant::now();
    let error = connection.read(0, &mut [0; 4096]).unwrap_err();
    assert!(matches!(error.failure, Failure::Silent(_)) && error.ends_connection(), "{error}");
    assert!(started.elapsed() < TIMEOUT);
    // The handshake with a frozen server times out, too.
    let error = Connection::connect(target(server.address()), Duration::from_secs(2)).unwrap_err();
    assert!(error.ends_connection(), "{error}");
}

#[test]
fn other_work_is_done_while_the_server_works() {
    let server = Nbdkit::start(&["memory", "64M"]);
    let mut connection = connect(&server);
    server.freeze();
    // The server can answer only after this work.
    let mut write = [Operation::Write { offset: 4096, from: &[7; 4096] }];
    connection.transfer(&mut write, Some(&mut || server.thaw())).unwrap();
    let mut page = [0; 4096];
    connection.read(4096, &mut page).unwrap();
    assert!(page == [7; 4096]);
}

#[test]
fn a_late_answer_is_dropped_by_the_next_operation() {
    let server = Nbdkit::start(&["memory", "64M"]);
    let mut connection = connect(&server);
    connection.write(0, &[1; 4096]).unwrap();
    connection.write(4096, &[2; 4096]).unwrap();
    let (soon, mut page) = (Duration::from_millis(5), [0; 4096]);
    assert!(connection.read_soon(0, &mut page, TIMEOUT / 2).unwrap());
    assert!(page == [1; 4096]);
    server.freeze();
    for _ in 0..3 {
        // The first answer is still to come, so no other request leaves.
        assert!(!connection.read_soon(0, &mut page, soon).unwrap());
    }
    server.thaw();
    assert!(connection.read_soon(4096, &mut page, TIMEOUT / 2).unwrap());
    assert!(page == [2; 4096]);
    for wait in [false, true] {
        server.freeze();
        assert!(!connection.read_soon(0, &mut page, soon).unwrap());
        server.thaw();
        if wait {
            thread::sleep(soon);
        }
        connection.write(4096, &[3; 4096]).unwrap();
        connection.read(4096, &mut page).unwrap();
        assert!(page == [3; 4096]);
    }
}

#[test]
fn an_answer_that_never_comes_ends_the_connection() {
    let server = Nbdkit::start(&["memory", "64M"]);
    let timeout = Duration::from_millis(400);
    let silent = || {
        let mut connection = Connection::connect(target(server.address()), TIMEOUT).unwrap();
        Connection::set_io_timeout(&mut connection, timeout);
        server.freeze();
        assert!(!connection.read_soon(0, &mut [0; 4096], timeout / 100).unwrap());
        connection
    };
    let (started, mut connection) = (Instant::now(), silent());
    let error = loop {
        match connection.read_page_soon(0, &mut [0; 4096], timeout / 100) {
            Ok(is_here) => assert!(!is_here),
            Err(error) => break error,
        }
    };
    assert!(matches!(error.failure, Failure::Silent(_)) && error.ends_connection(), "{error}");
    assert!(started.elapsed() >= timeout);
    server.thaw();
    let error = silent().write(0, &[1; 4096]).unwrap_err();
    assert!(matches!(error.failure, Failure::Silent(_)) && error.ends_connection(), "{error}");
}

/// Runs `script` as the server of one connection, and returns the client's error.
fn malicious(script: impl FnOnce(UnixStream) + Send + 'static) -> NbdError {
    let ask = |connection: &mut Connection| connection.read(4096, &mut [0; 4096]);
    asked_of(script, ask).unwrap_err()
}

/// Runs `script` as the server of one connection, and returns the result of `ask`.
fn asked_of(
    script: impl FnOnce(UnixStream) + Send + 'static,
    ask: impl FnOnce(&mut Connection) -> Result<(), NbdError>,
) -> Result<(), NbdError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nbd");
    let listener = UnixListener::bind(&path).unwrap();
    let server = thread::spawn(move || {
        let (socket, _) = listener.accept().unwrap();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        script(socket);
    });
    let result = Connection::connect(target(Address::Unix(path)), Duration::from_secs(10))
        .and_then(|mut connection| ask(&mut connection));
    server.join().unwrap();
    result
}

const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\0\x03";

fn read_option(socket: &mut UnixStream) -> u32 {
    let mut head = [0; 16];
    socket.read_exact(&mut head).unwrap();
    let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
    socket.read_exact(&mut vec![0; number(12) as usize]).unwrap();
    number(8)
}

fn answer(socket: &mut UnixStream, option: u32, kind: u32, payload: &[u8]) {
    socket.write_all(&0x3_e889_0455_65a9u64.to_be_bytes()).unwrap();
    for word in [option, kind, payload.len() as u32] {
        socket.write_all(&word.to_be_bytes()).unwrap();
    }
    socket.write_all(payload).unwrap();
}

/// Completes the handshake with structured replies over 1 MiB, then runs `script` with the cookie
/// of the first request.
fn misbehaving(script: impl FnOnce(UnixStream, [u8; 8]) + Send + 'static) -> NbdError {
    malicious(move |mut socket| {
        let cookie = handshake(&mut socket, |socket, context| {
            answer(socket, context, 0x8000_0001, b"no contexts");
        });
        script(socket, cookie);
    })
}

/// Performs the server's handshake, with `answer_context` for the choice of a context; returns the
/// cookie of the first request.
fn handshake(
    socket: &mut UnixStream,
    answer_context: impl FnOnce(&mut UnixStream, u32),
) -> [u8; 8] {
    socket.write_all(GREETING).unwrap();
    socket.read_exact(&mut [0; 4]).unwrap();
    let structured = read_option(socket);
    answer(socket, structured, 1, &[]);
    let context = read_option(socket);
    answer_context(socket, context);
    let go = read_option(socket);
    answer(socket, go, 3, &[0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 1]);
    answer(socket, go, 1, &[]);
    let mut request = [0; 28];
    socket.read_exact(&mut request).unwrap();
    request[8..16].try_into().unwrap()
}

fn chunk(flags: u16, kind: u16, cookie: [u8; 8], payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0x66, 0x8e, 0x33, 0xef];
    bytes.extend(flags.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie);
    bytes.extend((payload.len() as u32).to_be_bytes());
    bytes.extend(payload);
    bytes
}

fn data(offset: u64, len: usize) -> Vec<u8> {
    [&offset.to_be_bytes()[..], &vec![7; len]].concat()
}

#[test]
fn a_protocol_violation_in_the_handshake_is_an_error() {
    let oldstyle = malicious(|mut socket| {
        socket.write_all(b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53\0\0").unwrap()
    });
    let web =
        malicious(|mut socket| socket.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap());
    let endless = malicious(|mut socket| {
        socket.write_all(GREETING).unwrap();
        socket.read_exact(&mut [0; 4]).unwrap();
        let option = read_option(&mut socket);
        socket.write_all(&0x3_e889_0455_65a9u64.to_be_bytes()).unwrap();
        socket.write_all(&[option.to_be_bytes(), [0, 0, 0, 1], [0xff; 4]].concat()).unwrap();
    });
    for error in [oldstyle, web, endless] {
        assert!(
            matches!(error.failure, Failure::Protocol(_)) && error.ends_connection(),
            "{error}"
        );
    }
    let gone = malicious(|mut socket| socket.write_all(&GREETING[..10]).unwrap());
    assert!(matches!(gone.failure, Failure::Lost(_)), "{gone}");
}

type Reply = fn([u8; 8]) -> Vec<u8>;

#[test]
fn a_reply_that_is_not_one_to_the_request_is_found_out() {
    let replies: [(&str, Reply); 9] = [
        ("no reply at all", |_| vec![0; 64]),
        ("another cookie", |_| chunk(1, 1, [9; 8], &data(4096, 4096))),
        ("data before the range", |cookie| chunk(1, 1, cookie, &data(0, 4096))),
        ("data beyond the range", |cookie| chunk(1, 1, cookie, &data(4097, 4096))),
        ("too little", |cookie| chunk(1, 1, cookie, &data(4096, 4095))),
        ("too much", |cookie| {
            [chunk(0, 1, cookie, &data(4096, 4096)), chunk(1, 1, cookie, &data(4096, 1))].concat()
        }),
        ("an unknown chunk", |cookie| chunk(1, 77, cookie, &[])),
        ("a simple reply", |cookie| {
            [&[0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0][..], &cookie, &[0; 4096]].concat()
        }),
        ("a monstrous error", |cookie| chunk(1, 0x8001, cookie, &vec![0; 1 << 20])),
    ];
    for (what, reply) in replies {
        let error = misbehaving(move |mut socket, cookie| {
            let _ = socket.write_all(&reply(cookie));
        });
        assert!(
            matches!(error.failure, Failure::Protocol(_)) && error.ends_connection(),
            "{what}: {error}"
        );
    }
}

#[test]
fn a_connection_that_ends_within_a_reply_is_lost() {
    let error = misbehaving(|mut socket, cookie| {
        socket.write_all(&chunk(1, 1, cookie, &data(4096, 4096))[..2000]).unwrap()
    });
    assert!(matches!(error.failure, Failure::Lost(_)), "{error}");
}

#[test]
fn a_server_with_endless_holes_takes_no_client_memory() {
    // The id of the context, then `count` runs of one byte.
    let runs = |count: usize| [&[0, 0, 0, 7][..], &[0, 0, 0, 1, 0, 0, 0, 3].repeat(count)].concat();
    let told = move |what: fn([u8; 8], &[u8]) -> Vec<u8>, count: usize| {
        let mut told = Vec::new();
        let script = move |mut socket: UnixStream| {
            let cookie = handshake(&mut socket, |socket, context| {
                answer(socket, context, 4, b"\0\0\0\x07base:allocation");
                answer(socket, context, 1, &[]);
            });
            // The client may close the connection before it reads all.
            let _ = socket.write_all(&what(cookie, &runs(count)));
        };
        let result = asked_of(script, |connection| connection.block_status(0, 1 << 20, &mut told));
        (result, told.len())
    };
    let (result, count) = told(|cookie, runs| chunk(1, 5, cookie, runs), 1000);
    assert!(result.is_ok() && count == 1000, "{result:?} {count}");
    let (again, count) = told(|cookie, runs| chunk(0, 5, cookie, runs).repeat(100), 1000);
    assert!(matches!(again.unwrap_err().failure, Failure::Protocol(_)));
    assert_eq!(count, 1000);
    let (long, count) = told(|cookie, runs| chunk(1, 5, cookie, runs), (1 << 20) + 1);
    assert!(matches!(long.unwrap_err().failure, Failure::Protocol(_)));
    assert_eq!(count, 0);
}
