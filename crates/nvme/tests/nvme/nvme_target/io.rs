//! Reads, writes and other I/O commands.

use aquifer_nvme::proto::command::{DSM_DEALLOCATE, DsmRange, FABRICS, Sgl, control, flag, io};
use aquifer_nvme::proto::fabrics::kind as fabrics;
use aquifer_nvme::proto::pdu::digests;
use aquifer_nvme::proto::{Command, NvmeStatus};
use aquifer_nvme::target::Limits;
use aquifer_page::Bytes;
use zerocopy::IntoBytes;

use super::harness::Served;
use super::host::Host;
use crate::common::{Raw, pattern};

const ALL_DIGESTS: u8 = digests::HEADER | digests::DATA;

/// Sends data after an R2T, in PDUs of at most `piece` bytes, and returns the status.
fn send_asked(host: &mut Host, command: &Command, data: &[u8], piece: usize) -> NvmeStatus {
    host.send(command, &[]);
    let request = host.r2t();
    assert_eq!((request.command_id, request.offset.get()), (command.id, 0));
    assert_eq!(request.length.get() as usize, data.len());
    let mut offset = 0;
    for piece in data.chunks(piece) {
        let last = offset + piece.len() == data.len();
        let pdu = host.data(&request, offset as u32, piece, last);
        host.put(&pdu);
        offset += piece.len();
    }
    NvmeStatus(host.completion().status().code())
}

fn ranges(all: &[(u64, u32)]) -> Vec<u8> {
    let range = |&(start, blocks): &(u64, u32)| {
        let (attributes, blocks, start) = (0.into(), blocks.into(), start.into());
        DsmRange { attributes, blocks, start }.as_bytes().to_vec()
    };
    all.iter().flat_map(range).collect()
}

#[test]
fn writes_in_capsules_and_after_r2t_are_read_back() {
    let served = Served::new(Bytes::mib(16));
    for digests in [0, ALL_DIGESTS] {
        let (_admin, controller) = served.admin_with(digests, 0);
        let mut host = served.io(controller, 1, digests);
        let mut expected = vec![0; 16 << 20];
        served.lease.discard(0, 16 << 20).unwrap();
        for (seed, (block, blocks, piece)) in [
            (0, 1, 0),
            (3, 16, 0),
            (100, 17, 4096),
            (200, 256, 128 << 10),
            (500, 256, 5000),
            (1000, 8, 100),
            (4095, 1, 4096),
        ]
        .into_iter()
        .enumerate()
        {
            let data = pattern(blocks * 4096, seed as u64);
            if piece == 0 {
                host.write(block, &data);
            } else {
                let sgl = Sgl::transport(data.len() as u32);
                let command = host.command(io::WRITE, sgl).with_blocks(block, blocks as u32);
                assert_eq!(send_asked(&mut host, &command, &data, piece), NvmeStatus::SUCCESS);
            }
            expected[block as usize * 4096..][..data.len()].copy_from_slice(&data);
        }
        for (block, blocks) in [(0, 1), (0, 8), (3, 9), (100, 20), (190, 256), (3840, 256)] {
            let there = host.read(block, blocks);
            assert!(
                there == expected[block as usize * 4096..][..there.len()],
                "{blocks} blocks at {block}"
            );
        }
        let mut stored = vec![0; 16 << 20];
        served.lease.read(0, &mut stored).unwrap();
        assert!(stored == expected);
    }
}

#[test]
fn many_commands_in_flight_may_mix_their_data() {
    let served = Served::new(Bytes::mib(16));
    let (_admin, controller) = served.admin();
    let mut host = served.io(controller, 1, 0);
    let mut commands = Vec::new();
    for number in 0..16 {
        let command =
            host.command(io::WRITE, Sgl::transport(64 << 10)).with_blocks(number * 16, 16);
        host.send(&command, &[]);
        commands.push(command);
    }
    let requests: Vec<_> = (0..16).map(|_| host.r2t()).collect();
    for half in 0..2 {
        for (number, request) in requests.iter().enumerate().rev() {
            let data = pattern(64 << 10, number as u64);
            let part = &data[half * (32 << 10)..][..32 << 10];
            let pdu = host.data(request, half as u32 * (32 << 10), part, half == 1);
            host.put(&pdu);
        }
    }
    for command in commands.iter().rev() {
        assert_eq!(host.completion().command_id, command.id);
    }
    for number in 0..16 {
        assert!(host.read(number * 16, 16) == pattern(64 << 10, number));
    }
}

#[test]
fn compare_tells_equal_from_different() {
    let served = Served::new(Bytes::mib(4));
    let (_admin, controller) = served.admin();
    let mut host = served.io(controller, 1, 0);
    let mut data = pattern(4 * 4096, 1);
    data[4096..8192].fill(0);
    host.write(8, &data);
    let here = host.command(io::COMPARE, Sgl::in_capsule(16384)).with_blocks(8, 4);
    let there = host.command(io::COMPARE, Sgl::transport(16384)).with_blocks(8, 4);
    assert_eq!(host.status(&here, &data), NvmeStatus::SUCCESS);
    assert_eq!(send_asked(&mut host, &there, &data, 5000), NvmeStatus::SUCCESS);
    for at in [0, 5000, 16383] {
        let mut other = data.clone();
        other[at] ^= 1;
        assert_eq!(host.status(&here, &other), NvmeStatus::COMPARE_FAILURE);
        assert_eq!(send_asked(&mut host, &there, &other, 5000), NvmeStatus::COMPARE_FAILURE);
    }
}

#[test]
fn deallocated_blocks_read_as_zeroes_and_free_their_ram() {
    let served = Served::new(Bytes::mib(16));
    let (_admin, controller) = served.admin();
    let mut host = served.io(controller, 1, 0);
    host.write(0, &pattern(16 * 4096, 1));
    assert_eq!(served.lease.stored(), Bytes::kib(64));

    let command = host.command(io::WRITE_ZEROES, Sgl::NONE).with_blocks(0, 4);
    let dword = command.dword(12);
    assert_eq!(
        host.status(&command.with(12, dword | control::DEALLOCATE), &[]),
        NvmeStatus::SUCCESS
    );
    assert_eq!(served.lease.stored(), Bytes::kib(48));

    // Two ranges in the capsule, which has room for more.
    let mut two = ranges(&[(4, 1), (6, 2)]);
    two.resize(4096, 0);
    let command = host.command(io::DATASET_MANAGEMENT, Sgl::in_capsule(4096));
    let command = command.with(10, 1).with(11, DSM_DEALLOCATE);
    assert_eq!(host.status(&command, &two), NvmeStatus::SUCCESS);
    assert_eq!(served.lease.stored(), Bytes::kib(36));

    // Three ranges requested by R2T, in pieces of odd sizes.
    let three = ranges(&[(8, 1), (10, 1), (12, 4)]);
    let command = host.command(io::DATASET_MANAGEMENT, Sgl::transport(48)).with(10, 2);
    assert_eq!(
        send_asked(&mut host, &command.with(11, DSM_DEALLOCATE), &three, 20),
        NvmeStatus::SUCCESS
    );
    assert_eq!(served.lease.stored(), Bytes::kib(12));
    let mut expected = pattern(16 * 4096, 1);
    for block in (0..16).filter(|block| ![5, 9, 11].contains(block)) {
        expected[block * 4096..][..4096].fill(0);
    }
    assert!(host.read(0, 16) == expected);

    // With one range beyond the end, none is deallocated. Without the deallocate bit, ranges are
    // hints.
    let beyond = ranges(&[(5, 1), (4096, 1)]);
    let command = host.command(io::DATASET_MANAGEMENT, Sgl::in_capsule(32)).with(10, 1);
    assert_eq!(
        host.status(&command.with(11, DSM_DEALLOCATE), &beyond),
        NvmeStatus::LBA_OUT_OF_RANGE
    );
    assert_eq!(host.status(&command, &beyond), NvmeStatus::SUCCESS);
    assert_eq!(served.lease.stored(), Bytes::kib(12));
}

#[test]
fn errors_name_what_is_wrong_and_hurt_nobody() {
    let served = Served::with(Bytes::mib(4), Bytes::kib(64), Limits::default());
    let (_admin, controller) = served.admin();
    let mut host = served.io(controller, 1, 0);
    let page = pattern(4096, 1);
    let read = host.command(io::READ, Sgl::transport(4096)).with_blocks(0, 1);
    let write = host.command(io::WRITE, Sgl::in_capsule(4096)).with_blocks(0, 1);
    let zeroes = host.command(io::WRITE_ZEROES, Sgl::NONE);

    let beyond = [(1024, 1), (1023, 2), (u64::MAX, 1)];
    for (start, blocks) in beyond {
        let length = blocks * 4096;
        let command = host.command(io::READ, Sgl::transport(length)).with_blocks(start, blocks);
        assert_eq!(host.fetch(&command, 0), Err(NvmeStatus::LBA_OUT_OF_RANGE));
        let command = host.command(io::WRITE, Sgl::transport(length)).with_blocks(start, blocks);
        assert_eq!(
            host.status(&command, &[]),
            NvmeStatus::LBA_OUT_OF_RANGE,
            "without asking for data"
        );
        assert_eq!(
            host.status(&zeroes.with_blocks(start, blocks), &[]),
            NvmeStatus::LBA_OUT_OF_RANGE
        );
    }
    for (what, command, status) in [
        ("no such command", Command { opcode: 0x55, ..read }, NvmeStatus::INVALID_OPCODE),
        ("no namespace", Command { nsid: 0.into(), ..read }, NvmeStatus::INVALID_NAMESPACE),
        ("another namespace", Command { nsid: 2.into(), ..read }, NvmeStatus::INVALID_NAMESPACE),
        ("fused", Command { flags: flag::SGL | 1, ..read }, NvmeStatus::INVALID_FIELD),
        ("described by PRPs", Command { flags: 0, ..read }, NvmeStatus::INVALID_FIELD),
        ("protection", read.with(12, 1 << 26), NvmeStatus::INVALID_FIELD),
        (
            "too short",
            Command { sgl: Sgl::transport(4095), ..read },
            NvmeStatus::DATA_LENGTH_INVALID,
        ),
        (
            "into the capsule",
            Command { sgl: Sgl::in_capsule(4096), ..read },
            NvmeStatus::SGL_TYPE_INVALID,
        ),
        ("too long", read.with_blocks(0, 257), NvmeStatus::INVALID_FIELD),
        ("no data at all", write, NvmeStatus::DATA_LENGTH_INVALID),
        (
            "flush of another",
            Command { opcode: io::FLUSH, nsid: 2.into(), ..read },
            NvmeStatus::INVALID_NAMESPACE,
        ),
        (
            "connected already",
            Command::new(FABRICS, 9, fabrics::CONNECT.into(), Sgl::NONE),
            NvmeStatus::COMMAND_SEQUENCE,
        ),
    ] {
        assert_eq!(host.status(&command, &[]), status, "{what}");
    }
    let mut shifted = write;
    shifted.sgl.address = 4.into();
    assert_eq!(host.status(&shifted, &page), NvmeStatus::SGL_OFFSET_INVALID);

    // 16 pages fit the quota. The 17th does not, in the capsule or after R2T; zeroes always do.
    for block in 0..16 {
        host.write(block, &page);
    }
    assert_eq!(host.status(&write.with_blocks(16, 1), &page), NvmeStatus::CAPACITY_EXCEEDED);
    let asked = host.command(io::WRITE, Sgl::transport(4096)).with_blocks(16, 1);
    assert_eq!(send_asked(&mut host, &asked, &page, 1000), NvmeStatus::CAPACITY_EXCEEDED);
    host.write(16, &[0; 4096]);
    assert!(host.read(15, 2) == [&page[..], &[0; 4096]].concat());

    served.store.remove(served.lease.id()).unwrap();
    assert_eq!(host.fetch(&read, 4096), Err(NvmeStatus::INVALID_NAMESPACE));
    let large = host.command(io::READ, Sgl::transport(1 << 20)).with_blocks(0, 256);
    assert_eq!(host.fetch(&large, 1 << 20), Err(NvmeStatus::INVALID_NAMESPACE));
    assert_eq!(host.status(&write, &page), NvmeStatus::INVALID_NAMESPACE);
}

#[test]
fn damaged_data_is_refused_and_can_be_sent_again() {
    let served = Served::new(Bytes::mib(4));
    let (_admin, controller) = served.admin_with(ALL_DIGESTS, 0);
    let mut host = served.io(controller, 1, ALL_DIGESTS);
    let data = pattern(8192, 1);
    let command = host.command(io::WRITE, Sgl::in_capsule(8192)).with_blocks(0, 2);
    let mut damaged = host.capsule(&command, &data);
    damaged[200] ^= 1;
    host.put(&damaged);
    let completion = host.completion();
    assert_eq!(completion.status(), NvmeStatus::TRANSIENT_TRANSPORT, "and to be tried again");

    let command = host.command(io::WRITE, Sgl::transport(8192)).with_blocks(0, 2);
    host.send(&command, &[]);
    let request = host.r2t();
    let mut damaged = host.data(&request, 0, &data[..4096], false);
    damaged[200] ^= 1;
    let rest = host.data(&request, 4096, &data[4096..], true);
    host.put(&[damaged, rest].concat());
    assert_eq!(host.completion().status(), NvmeStatus::TRANSIENT_TRANSPORT);
    assert!(host.read(0, 2) == [0; 8192]);
    host.write(0, &data);
    assert!(host.read(0, 2) == data);
}

#[test]
fn a_queue_can_be_disconnected_and_connected_again() {
    let served = Served::new(Bytes::mib(4));
    let (mut admin, controller) = served.admin();
    let mut host = served.io(controller, 3, 0);
    let command = Command::new(FABRICS, 7, fabrics::DISCONNECT.into(), Sgl::NONE);
    assert_eq!(admin.status(&command, &[]), NvmeStatus::QUEUE_TYPE);
    assert_eq!(host.status(&command.with(10, 1), &[]), NvmeStatus::CONNECT_FORMAT);
    assert_eq!(host.status(&command, &[]), NvmeStatus::SUCCESS);
    assert!(host.is_closed());
    crate::common::wait_until("the queue is gone", || served.queues() == 1);
    served.io(controller, 3, 0).write(0, &pattern(4096, 1));
}

#[test]
fn a_host_that_does_not_read_holds_up_no_writer() {
    let served = Served::new(Bytes::mib(8));
    served.lease.write(0, &pattern(8 << 20, 1)).unwrap();
    let (_admin, controller) = served.admin();
    let mut lazy = served.io(controller, 1, 0);
    for number in 0..16 {
        let command =
            lazy.command(io::READ, Sgl::transport(1 << 20)).with_blocks(number % 8 * 256, 256);
        lazy.send(&command, &[]);
    }
    let mut writer = served.io(controller, 2, 0);
    for block in 0..2048 {
        writer.write(block, &pattern(4096, 1));
    }
    drop(lazy);
    crate::common::wait_until("the lazy one is gone", || served.queues() == 2);
}
