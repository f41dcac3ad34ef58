//! Hosts that misbehave: each ends its own connection only.

use aquifer_nvme::proto::NvmeStatus;
use aquifer_nvme::proto::command::{Sgl, io};
use aquifer_nvme::proto::pdu::{CapsuleCmd, Data, digests, fatal, flag, kind};
use aquifer_page::Bytes;
use zerocopy::IntoBytes;

use super::harness::Served;
use super::host::{Host, ic_req};
use crate::common::{Raw, pattern, wait_until};

#[test]
fn nonsense_before_connect_ends_the_link_with_the_reason() {
    let served = Served::new(Bytes::mib(4));
    let (mut admin, controller) = served.admin();
    let mut bystander = served.io(controller, 1, 0);
    let good = ic_req(0, 0);
    let bytes_with = |at: usize, value: u8| {
        let mut bytes = good.as_bytes().to_vec();
        bytes[at] = value;
        bytes
    };
    for (what, bytes, status) in [
        ("an unknown type", bytes_with(0, 0x77), fatal::INVALID_HEADER),
        ("a controller's type", bytes_with(0, kind::R2T), fatal::INVALID_HEADER),
        ("a header too short", bytes_with(2, 64), fatal::INVALID_HEADER),
        ("4 GiB", bytes_with(7, 0xFF), fatal::INVALID_HEADER),
        ("an unknown format", bytes_with(8, 1), fatal::UNSUPPORTED),
        ("an alignment of 132 bytes", bytes_with(10, 32), fatal::INVALID_HEADER),
    ] {
        let mut host = Host::silent(&served.socket());
        host.put(&bytes);
        assert_eq!(host.terminated(), status, "{what}");
    }
    let mut host = Host::silent(&served.socket());
    let command = host.connect_command(0, 0);
    host.send(&command, &pattern(1024, 1));
    assert_eq!(host.terminated(), fatal::SEQUENCE, "a command instead of ICReq");
    let mut host = Host::connect(&served.socket(), 0);
    host.put(good.as_bytes());
    assert_eq!(host.terminated(), fatal::SEQUENCE, "ICReq twice");
    let mut host = Host::silent(&served.socket());
    host.put(&pattern(4096, 3));
    assert!(host.is_closed());

    bystander.write(0, &pattern(4096, 1));
    assert_eq!(admin.identify(1, 0).unwrap().len(), 4096);
    drop((admin, bystander));
    wait_until("all queues are gone", || served.queues() == 0);
}

#[test]
fn nonsense_on_a_queue_ends_the_queue_with_the_reason() {
    let served = Served::new(Bytes::mib(4));
    let (_admin, controller) = served.admin();
    let mut queue = 0;
    let mut broken = |what: &str, status: u16, digests: u8, make: &dyn Fn(&mut Host) -> Vec<u8>| {
        queue += 1;
        let mut host = served.io(controller, queue, digests);
        let bytes = make(&mut host);
        host.put(&bytes);
        assert_eq!(host.terminated(), status, "{what}");
    };
    let data = pattern(8192, 1);
    let write = |host: &mut Host| {
        let command = host.command(io::WRITE, Sgl::in_capsule(8192)).with_blocks(0, 2);
        host.capsule(&command, &data)
    };
    let with = |at: usize, value: u8| {
        move |host: &mut Host| {
            let command = host.command(io::WRITE, Sgl::in_capsule(8192)).with_blocks(0, 2);
            let mut bytes = host.capsule(&command, &pattern(8192, 1));
            bytes[at] = value;
            bytes
        }
    };
    broken("a type that does not exist", fatal::INVALID_HEADER, 0, &with(0, 0x44));
    broken(
        "a header digest not agreed on",
        fatal::INVALID_HEADER,
        0,
        &with(1, flag::HEADER_DIGEST),
    );
    broken("a data digest not agreed on", fatal::INVALID_HEADER, 0, &with(1, flag::DATA_DIGEST));
    broken("a wrong header length", fatal::INVALID_HEADER, 0, &with(2, 71));
    broken("data that overlaps the header", fatal::INVALID_HEADER, 0, &with(3, 68));
    broken("data that is not aligned", fatal::INVALID_HEADER, 0, &with(3, 74));
    broken("more than fits a capsule", fatal::LIMIT_EXCEEDED, 0, &with(6, 2));
    broken("a PDU of no length", fatal::INVALID_HEADER, 0, &|host| {
        let mut bytes = write(host);
        bytes[4..8].fill(0);
        bytes
    });
    broken("no header digest", fatal::INVALID_HEADER, digests::HEADER, &with(1, 0));
    broken("a wrong header digest", fatal::HEADER_DIGEST, digests::HEADER, &with(40, 0x99));
    broken("data that no command requested", fatal::INVALID_HEADER, 0, &|host| {
        let header = host.shape.header(kind::H2C_DATA, flag::LAST, size_of::<Data>(), 4);
        let (id, tag) = (1.into(), 2000.into());
        let pdu = Data {
            header,
            command_id: id,
            tag,
            offset: 0.into(),
            length: 4.into(),
            reserved: [0; 4],
        };
        [pdu.as_bytes(), &[0; 4]].concat()
    });
    served.assert_serves();
}

#[test]
fn data_other_than_was_asked_for_ends_the_queue() {
    let served = Served::new(Bytes::mib(4));
    let (_admin, controller) = served.admin();
    let mut queue = 0;
    let mut broken = |what: &str, status: u16, offset: u32, length: usize, last: bool| {
        queue += 1;
        let mut host = served.io(controller, queue, 0);
        let command = host.command(io::WRITE, Sgl::transport(16384)).with_blocks(0, 4);
        host.send(&command, &[]);
        let request = host.r2t();
        let pdu = host.data(&request, offset, &vec![1; length], last);
        host.put(&pdu);
        assert_eq!(host.terminated(), status, "{what}");
    };
    broken("not the start", fatal::DATA_OUT_OF_RANGE, 4096, 4096, false);
    broken("beyond the end", fatal::DATA_OUT_OF_RANGE, 0, 20000, true);
    broken("the last that is not", fatal::INVALID_HEADER, 0, 4096, true);
    broken("the last without saying so", fatal::INVALID_HEADER, 0, 16384, false);
    broken("more than fits a PDU", fatal::LIMIT_EXCEEDED, 0, (128 << 10) + 4, false);

    // The identifier of another command with this tag, and a length that differs from the PDU's.
    for (at, value) in [(8, 0x55), (16, 0x55)] {
        let mut host = served.io(controller, queue + 10 + at as u16, 0);
        let command = host.command(io::WRITE, Sgl::transport(16384)).with_blocks(0, 4);
        host.send(&command, &[]);
        let request = host.r2t();
        let mut pdu = host.data(&request, 0, &[1; 16384], true);
        pdu[at] = value;
        host.put(&pdu);
        assert_eq!(host.terminated(), fatal::INVALID_HEADER);
    }
    assert_eq!(served.lease.stored(), Bytes::ZERO);
}

#[test]
fn more_commands_than_the_queue_has_entries_end_it() {
    let served = Served::new(Bytes::mib(4));
    let (_admin, controller) = served.admin();
    let mut host = served.io(controller, 1, 0);
    for number in 0..33 {
        let command = host.command(io::WRITE, Sgl::transport(4096)).with_blocks(number, 1);
        host.send(&command, &[]);
    }
    for _ in 0..32 {
        host.r2t();
    }
    assert_eq!(host.terminated(), fatal::SEQUENCE);
}

#[test]
fn hosts_may_vanish_at_any_byte() {
    let served = Served::new(Bytes::mib(4));
    let mut host = Host::silent(&served.socket());
    let command = host.connect_command(0, 0);
    let data = host.connect_data(&served.subsystem, 0xFFFF);
    let connect = host.capsule(&command, data.as_bytes());
    let dialogue = [ic_req(0, 0).as_bytes(), &connect].concat();
    drop(host);
    for cut in (0..dialogue.len()).step_by(7) {
        let mut host = Host::silent(&served.socket());
        host.put(&dialogue[..cut]);
    }
    // In the middle of a write with requested data: the incomplete PDU must change nothing.
    served.lease.write(0, &pattern(1 << 20, 1)).unwrap();
    let (_admin, controller) = served.admin();
    let mut host = served.io(controller, 1, 0);
    let command = host.command(io::WRITE, Sgl::transport(65536)).with_blocks(0, 16);
    host.send(&command, &[]);
    let request = host.r2t();
    let pdu = host.data(&request, 0, &pattern(32768, 2), false);
    host.put(&pdu[..pdu.len() - 1]);
    drop(host);
    wait_until("the queue is gone", || served.queues() == 1);
    let mut there = vec![0; 1 << 20];
    served.lease.read(0, &mut there).unwrap();
    assert!(there == pattern(1 << 20, 1));
    served.assert_serves();
}

#[test]
fn a_host_that_terminates_is_heard() {
    let served = Served::new(Bytes::mib(4));
    let (_admin, controller) = served.admin();
    let mut host = served.io(controller, 1, 0);
    let mut bytes = [0; 24];
    (bytes[0], bytes[2], bytes[4]) = (kind::H2C_TERM_REQ, 24, 24);
    host.put(&bytes);
    assert!(host.is_closed());
    wait_until("the queue is gone", || served.queues() == 1);
}

#[test]
fn a_hundred_queues_are_served_at_once() {
    let served = Served::new(Bytes::mib(4));
    let (_first, one) = served.admin();
    let (_second, two) = served.admin();
    let mut hosts: Vec<_> = (0..100)
        .map(|number| served.io([one, two][number % 2], number as u16 / 2 + 1, 0))
        .collect();
    for (number, host) in hosts.iter_mut().enumerate() {
        host.write(number as u64, &pattern(4096, number as u64));
    }
    for (number, host) in hosts.iter_mut().rev().enumerate() {
        assert!(host.read(99 - number as u64, 1) == pattern(4096, 99 - number as u64));
    }
    drop(hosts);
    wait_until("all I/O queues are gone", || served.queues() == 2);
}

#[test]
fn a_batch_is_answered_in_order_also_after_an_error() {
    let served = Served::new(Bytes::mib(4));
    let (_admin, controller) = served.admin();
    let mut host = served.io(controller, 1, 0);
    let page = pattern(4096, 1);
    let mut batch = Vec::new();
    let mut ids = Vec::new();
    for number in 0..20 {
        let opcode = if number == 10 { 0x55 } else { io::WRITE };
        let command = host.command(opcode, Sgl::in_capsule(4096)).with_blocks(number, 1);
        batch.extend(host.capsule(&command, &page));
        ids.push(command.id);
    }
    assert_eq!(batch.len(), 20 * (size_of::<CapsuleCmd>() + 4096));
    host.put(&batch);
    for (number, id) in ids.into_iter().enumerate() {
        let completion = host.completion();
        assert_eq!(completion.command_id, id);
        let expected = if number == 10 { NvmeStatus::INVALID_OPCODE } else { NvmeStatus::SUCCESS };
        assert_eq!(completion.status().code(), expected.code());
    }
}
