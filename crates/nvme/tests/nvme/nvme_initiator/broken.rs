//! Targets that die, fall silent or break the protocol: each ends its own connection only.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_nvme::initiator::{Connection, Failure, NvmeError, Target};
use aquifer_nvme::proto::pdu::{
    CapsuleResp, CommonHeader, Data, IC_LENGTH, IcResp, R2t, Shape, TermReq, digests, flag, kind,
};
use aquifer_nvme::proto::{Command, Completion, NvmeStatus};
use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_transport::Address;
use zerocopy::{FromZeros, IntoBytes};

use super::middle::Middle;
use super::target;
use crate::common::{TIMEOUT, pattern};
use crate::nvme_target::harness::Served;

const PAGE: u32 = PAGE_SIZE as u32;
/// Length of a write that does not fit a capsule.
const LONG: usize = 128 << 10;

/// The bytes that a target sends in answer to a command.
type Answer = fn(Command) -> Vec<u8>;

fn through(middle: &Middle, served: &Served) -> Target {
    Target { address: middle.address.clone(), ..target(served) }
}

/// Returns the error of `use_it` when the target sends `answer`, then reads until the host closes.
fn misbehaving(
    served: &Served,
    digests: bool,
    answer: Answer,
    use_it: fn(&mut Connection) -> Result<(), NvmeError>,
) -> NvmeError {
    let middle = Middle::with(served, move |mut host, command| {
        let _ = host.write_all(&answer(command));
        let _ = host.read_to_end(&mut Vec::new());
    });
    let target =
        Target { header_digest: digests, data_digest: digests, ..through(&middle, served) };
    let mut connection = Connection::connect(Arc::new(target), TIMEOUT).unwrap();
    let error = use_it(&mut connection).unwrap_err();
    // The target answers no more. A connection that goes on notices that by its timeout.
    connection.set_io_timeout(Duration::from_millis(50));
    let after = connection.flush().unwrap_err();
    assert_eq!(
        matches!(after.failure, Failure::Broken),
        error.ends_connection(),
        "{error}, {after}"
    );
    error
}

/// Asserts that each answer is found out, and ends the connection.
#[track_caller]
fn break_the_rules(
    answers: &[(&str, Answer)],
    use_it: fn(&mut Connection) -> Result<(), NvmeError>,
) {
    let served = Served::new(Bytes::mib(4));
    for (what, answer) in answers {
        let error = misbehaving(&served, false, *answer, use_it);
        assert!(
            matches!(error.failure, Failure::Protocol(_)) && error.ends_connection(),
            "{what}: {error}"
        );
    }
    served.assert_serves();
}

fn a_read(connection: &mut Connection) -> Result<(), NvmeError> {
    connection.read(PAGE.into(), &mut [0; PAGE_SIZE])
}

fn a_write(connection: &mut Connection) -> Result<(), NvmeError> {
    connection.write(PAGE.into(), &pattern(LONG, 1))
}

fn data_pdu(command: Command, offset: u32, length: u32, flags: u8, shape: Shape) -> Data {
    let header = shape.header(kind::C2H_DATA, flags, size_of::<Data>(), length as usize);
    let (tag, reserved) = (0.into(), [0; 4]);
    Data {
        header,
        command_id: command.id,
        tag,
        offset: offset.into(),
        length: length.into(),
        reserved,
    }
}

fn data(command: Command, offset: u32, length: u32, flags: u8) -> Vec<u8> {
    let pdu = data_pdu(command, offset, length, flags, Shape::default());
    [pdu.as_bytes(), &vec![7; length as usize]].concat()
}

fn completion(command: Command, status: NvmeStatus) -> Vec<u8> {
    let mut completion = Completion::new_zeroed();
    (completion.command_id, completion.status) = (command.id, status.to_field());
    let header = CommonHeader::bare(kind::CAPSULE_RESP, size_of::<CapsuleResp>());
    CapsuleResp { header, completion }.as_bytes().to_vec()
}

fn r2t(command: Command, offset: u32, length: u32) -> Vec<u8> {
    let header = CommonHeader::bare(kind::R2T, size_of::<R2t>());
    let (tag, reserved) = (3.into(), [0; 4]);
    R2t {
        header,
        command_id: command.id,
        tag,
        offset: offset.into(),
        length: length.into(),
        reserved,
    }
    .as_bytes()
    .to_vec()
}

fn other(mut command: Command) -> Command {
    command.id = (command.id.get() ^ 1).into();
    command
}

fn changed(mut pdu: Vec<u8>, at: usize, byte: u8) -> Vec<u8> {
    pdu[at] = byte;
    pdu
}

const DONE: u8 = flag::LAST | flag::SUCCESS;

#[test]
fn answers_to_a_read_that_break_the_rules_are_found_out() {
    let answers: [(&str, Answer); 22] = [
        ("nothing but zeroes", |_| vec![0; 64]),
        ("an unknown type", |c| changed(completion(c, NvmeStatus::SUCCESS), 0, 0x42)),
        ("a type of hosts", |c| changed(completion(c, NvmeStatus::SUCCESS), 0, kind::CAPSULE_CMD)),
        ("a second ICResp", |c| changed(completion(c, NvmeStatus::SUCCESS), 0, kind::IC_RESP)),
        ("a long header", |c| changed(completion(c, NvmeStatus::SUCCESS), 2, 25)),
        ("a short PDU", |c| changed(completion(c, NvmeStatus::SUCCESS), 4, 23)),
        ("a completion with data", |c| changed(completion(c, NvmeStatus::SUCCESS), 4, 200)),
        ("a gigantic PDU", |c| changed(completion(c, NvmeStatus::SUCCESS), 7, 0xff)),
        ("a digest that was not agreed on", |c| {
            changed(completion(c, NvmeStatus::SUCCESS), 1, flag::HEADER_DIGEST)
        }),
        ("data before its header's end", |c| changed(data(c, 0, PAGE, DONE), 3, 16)),
        ("another command", |c| data(other(c), 0, PAGE, DONE)),
        ("another command's end", |c| completion(other(c), NvmeStatus::SUCCESS)),
        ("no data at all", |c| completion(c, NvmeStatus::SUCCESS)),
        ("half the data", |c| {
            [data(c, 0, PAGE / 2, 0), completion(c, NvmeStatus::SUCCESS)].concat()
        }),
        ("data from the middle", |c| data(c, PAGE / 2, PAGE / 2, DONE)),
        ("data beyond the end", |c| data(c, 0, PAGE + 4, DONE)),
        ("far too much data", |c| data(c, 0, 1 << 20, DONE)),
        ("the same data again", |c| [data(c, 0, PAGE / 2, 0), data(c, 0, PAGE / 2, DONE)].concat()),
        ("the last data too early", |c| data(c, 0, PAGE / 2, DONE)),
        ("the last data in silence", |c| data(c, 0, PAGE, 0)),
        ("a data PDU of another length", |c| changed(data(c, 0, PAGE, DONE), 17, 8)),
        ("it asks for data", |c| r2t(c, 0, PAGE)),
    ];
    break_the_rules(&answers, a_read);
}

#[test]
fn answers_to_a_write_that_break_the_rules_are_found_out() {
    let answers: [(&str, Answer); 8] = [
        ("data", |c| data(c, 0, PAGE, DONE)),
        ("nothing is asked for", |c| completion(c, NvmeStatus::SUCCESS)),
        ("less is asked for", |c| [r2t(c, 0, PAGE), completion(c, NvmeStatus::SUCCESS)].concat()),
        ("the middle is asked for", |c| r2t(c, PAGE, PAGE)),
        ("more is asked for", |c| r2t(c, 0, LONG as u32 + 4)),
        ("nothing is asked for by R2T", |c| r2t(c, 0, 0)),
        ("the same is asked for again", |c| [r2t(c, 0, PAGE), r2t(c, 0, PAGE)].concat()),
        ("another command's data", |c| r2t(other(c), 0, PAGE)),
    ];
    break_the_rules(&answers, a_write);
}

#[test]
fn statuses_are_told_by_name_and_end_nothing() {
    let served = Served::new(Bytes::mib(4));
    let error = misbehaving(&served, false, |c| completion(c, NvmeStatus::INTERNAL_ERROR), a_read);
    assert!(
        error.to_string().contains("internal error (0x006)") && !error.ends_connection(),
        "{error}"
    );
    // The same after a part of the data.
    let partial: Answer = |c| [data(c, 0, PAGE / 2, 0), completion(c, NvmeStatus(0x281))].concat();
    let error = misbehaving(&served, false, partial, a_read);
    assert!(error.to_string().contains("0x281") && !error.ends_connection(), "{error}");
    let error = misbehaving(
        &served,
        false,
        |c| completion(c, NvmeStatus::CAPACITY_EXCEEDED.final_()),
        a_write,
    );
    assert!(error.is_no_space() && !error.ends_connection(), "{error}");
    // Damaged on the way to the target: needs a new connection.
    let error =
        misbehaving(&served, false, |c| completion(c, NvmeStatus::TRANSIENT_TRANSPORT), a_write);
    assert!(matches!(error.failure, Failure::Damaged(_)) && error.ends_connection(), "{error}");
}

#[test]
fn a_termination_is_told_with_its_reason() {
    let served = Served::new(Bytes::mib(4));
    let error = misbehaving(
        &served,
        false,
        |_| {
            let mut term = TermReq::new_zeroed();
            term.header = CommonHeader::bare(kind::C2H_TERM_REQ, size_of::<TermReq>());
            (term.status, term.information) = (5.into(), 77.into());
            term.as_bytes().to_vec()
        },
        a_read,
    );
    assert!(matches!(error.failure, Failure::Accused { status: 5, information: 77 }), "{error}");
    assert!(error.ends_connection());
}

#[test]
fn damage_is_found_by_digests() {
    let served = Served::new(Bytes::mib(4));
    let all = digests::HEADER | digests::DATA;
    assert_eq!(Shape::new(all, 0).data_offset(24), 28);
    let damaged_header: Answer = |c| {
        let pdu = data_pdu(c, 0, PAGE, DONE, Shape::new(digests::HEADER | digests::DATA, 0));
        [pdu.as_bytes(), &[1; 4], &[0; PAGE_SIZE], &[0; 4]].concat()
    };
    let damaged_data: Answer = |c| {
        let pdu = data_pdu(c, 0, PAGE, DONE, Shape::new(digests::HEADER | digests::DATA, 0));
        let digest = aquifer_nvme::proto::digest::of(pdu.as_bytes());
        [pdu.as_bytes(), digest.as_bytes(), &[0; PAGE_SIZE], &[1; 4]].concat()
    };
    for (answer, what) in [
        (damaged_header, "the network damaged a header"),
        (damaged_data, "the network damaged data"),
    ] {
        let error = misbehaving(&served, true, answer, a_read);
        assert!(matches!(error.failure, Failure::Damaged(_)) && error.ends_connection(), "{error}");
        assert!(error.to_string().contains(what), "{error}");
    }
    // A target that leaves the digests out.
    let error = misbehaving(&served, true, |c| data(c, 0, PAGE, DONE), a_read);
    assert!(matches!(error.failure, Failure::Protocol(_)), "{error}");
}

#[test]
fn a_target_that_dies_within_a_command_is_a_lost_connection() {
    let served = Served::new(Bytes::mib(4));
    let deaths: [fn(UnixStream, Command); 3] = [
        |_, _| {},
        |mut host, c| host.write_all(&data(c, 0, PAGE, DONE)[..2000]).unwrap(),
        |mut host, c| host.write_all(&data(c, 0, PAGE, DONE)[..5]).unwrap(),
    ];
    for death in deaths {
        let middle = Middle::with(&served, death);
        let target = Arc::new(through(&middle, &served));
        let mut connection = Connection::connect(target, TIMEOUT).unwrap();
        let started = Instant::now();
        let error = a_read(&mut connection).unwrap_err();
        assert!(matches!(error.failure, Failure::Lost(_)) && error.ends_connection(), "{error}");
        assert!(started.elapsed() < TIMEOUT / 2);
    }
    served.assert_serves();
}

#[test]
fn a_silent_target_is_an_error_once_the_timeout_is_over() {
    let served = Served::new(Bytes::mib(4));
    let middle = Middle::with(&served, |mut host, _| {
        let _ = host.read_to_end(&mut Vec::new());
    });
    let target = Arc::new(through(&middle, &served));
    let mut connection = Connection::connect(target, TIMEOUT).unwrap();
    connection.set_io_timeout(Duration::from_millis(100));
    let started = Instant::now();
    let error = a_read(&mut connection).unwrap_err();
    assert!(matches!(error.failure, Failure::Silent(_)) && error.ends_connection(), "{error}");
    assert!(started.elapsed() < TIMEOUT / 2);
}

/// Returns the error of a connection to a target that answers ICReq with `greeting`.
fn greeted_by(greeting: Vec<u8>) -> NvmeError {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let server = thread::spawn(move || {
        let (mut host, _) = listener.accept().unwrap();
        host.read_exact(&mut [0; IC_LENGTH]).unwrap();
        let _ = host.write_all(&greeting);
    });
    let subsystem = "nqn.2014-08.org.example:a".parse().unwrap();
    let target = Target::new(
        Address::Unix(path),
        subsystem,
        crate::nvme_target::host::HOST.parse().unwrap(),
    );
    let error = Connection::connect(Arc::new(target), TIMEOUT).unwrap_err();
    server.join().unwrap();
    error
}

#[test]
fn connecting_to_anything_but_a_target_is_an_error() {
    let good = IcResp {
        header: CommonHeader::bare(kind::IC_RESP, IC_LENGTH),
        format: 0.into(),
        alignment: 0,
        digests: 0,
        max_data: 4096.into(),
        reserved: [0; 112],
    };
    for (what, response) in [
        ("a web server", b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()),
        ("another type", changed(good.as_bytes().to_vec(), 0, kind::R2T)),
        ("another length", changed(good.as_bytes().to_vec(), 4, 127)),
        ("another format", changed(good.as_bytes().to_vec(), 8, 1)),
        ("an impossible alignment", changed(good.as_bytes().to_vec(), 10, 32)),
        ("a tiny PDU", changed(good.as_bytes().to_vec(), 13, 8)),
    ] {
        let error = greeted_by(response);
        assert!(matches!(error.failure, Failure::Protocol(_)), "{what}: {error}");
    }
    let error = greeted_by(changed(good.as_bytes().to_vec(), 11, digests::DATA));
    assert!(matches!(error.failure, Failure::Refused(_)), "{error}");
    for cut in [0, 7, 100, IC_LENGTH] {
        let error = greeted_by(good.as_bytes()[..cut].to_vec());
        assert!(matches!(error.failure, Failure::Lost(_)), "{cut}: {error}");
    }
}
