//! Introductions: hosts that name the owner of the pages in a namespace.

use aquifer_nvme::proto::command::{Sgl, admin, io};
use aquifer_nvme::proto::introduction::{Introduction, REFUSAL_LENGTH, from_field};
use aquifer_nvme::proto::{Command, DISCOVERY_NQN, NvmeStatus};
use aquifer_page::visitor::Visitor;
use aquifer_page::{Bytes, ClientId, OwnerId};
use zerocopy::IntoBytes;

use super::harness::Served;
use super::host::Host;
use crate::common::{Raw, wait_until};

fn visitor(owner: u128, epoch: u64) -> Visitor {
    Visitor {
        owner: OwnerId(owner),
        name: format!("owner {owner}"),
        generation: 0,
        ends_older: false,
        client: ClientId(owner),
        epoch,
        keeps: false,
        takes_over: false,
    }
}

fn introduce(host: &mut Host, visitor: &Visitor) -> NvmeStatus {
    send(host, Introduction::of(visitor).as_bytes())
}

fn send(host: &mut Host, bytes: &[u8]) -> NvmeStatus {
    let command = Command::new(admin::INTRODUCE, host.id(), 0, Sgl::in_capsule(bytes.len() as u32));
    host.status(&command, bytes)
}

fn refusal(host: &mut Host) -> String {
    let command = Command::new(admin::REFUSAL, host.id(), 0, Sgl::transport(REFUSAL_LENGTH as u32));
    from_field(&host.fetch(&command, REFUSAL_LENGTH).unwrap())
}

#[test]
fn a_newer_epoch_ends_the_controllers_and_queues_of_older_ones() {
    let served = Served::new(Bytes::mib(4));
    let (mut old, controller) = served.admin();
    assert_eq!(introduce(&mut old, &visitor(1, 1)), NvmeStatus::SUCCESS);
    let mut old_queue = served.io(controller, 1, 0);
    let (mut beside, _) = served.admin();
    assert_eq!(introduce(&mut beside, &visitor(1, 1)), NvmeStatus::SUCCESS);
    let (mut new, controller) = served.admin();
    assert_eq!(introduce(&mut new, &visitor(1, 2)), NvmeStatus::SUCCESS);
    // The old queues are gone when the answer arrives, not some time later.
    assert_eq!(served.queues(), 1);
    assert!(old.is_closed() && old_queue.is_closed() && beside.is_closed());
    let mut queue = served.io(controller, 1, 0);
    let flush = Command::new(io::FLUSH, queue.id(), 1, Sgl::NONE);
    assert_eq!(queue.status(&flush, &[]), NvmeStatus::SUCCESS);
    let (mut late, _) = served.admin();
    assert_eq!(introduce(&mut late, &visitor(1, 1)), NvmeStatus::NOT_NOW);
    assert_eq!(refusal(&mut late), "a newer connection of owner 1 has taken over");
}

#[test]
fn a_second_owner_learns_the_name_of_the_first() {
    let served = Served::new(Bytes::mib(4));
    let (mut first, _) = served.admin();
    assert_eq!(introduce(&mut first, &visitor(1, 1)), NvmeStatus::SUCCESS);
    let (mut second, _) = served.admin();
    assert_eq!(introduce(&mut second, &visitor(2, 1)), NvmeStatus::CLAIMED);
    assert!(refusal(&mut second).starts_with("it belongs to owner 1:"));
    let by_force = Visitor { takes_over: true, ..visitor(2, 1) };
    assert_eq!(introduce(&mut second, &by_force), NvmeStatus::SUCCESS);
    assert!(first.is_closed());
    drop((first, second));
    wait_until("both have left", || served.queues() == 0);
}

#[test]
fn bad_introductions_are_refused_and_nothing_comes_of_them() {
    let served = Served::new(Bytes::mib(4));
    let (mut host, _) = served.admin();
    assert_eq!(send(&mut host, &[1; 255]), NvmeStatus::DATA_LENGTH_INVALID);
    let elsewhere = Command::new(admin::INTRODUCE, host.id(), 0, Sgl::transport(256));
    assert_eq!(host.status(&elsewhere, &[]), NvmeStatus::SGL_TYPE_INVALID);
    let little_room = Command::new(admin::REFUSAL, host.id(), 0, Sgl::transport(8));
    assert_eq!(host.status(&little_room, &[]), NvmeStatus::DATA_LENGTH_INVALID);
    assert_eq!(introduce(&mut host, &visitor(1, 1)), NvmeStatus::SUCCESS);
    assert_eq!(
        introduce(&mut host, &visitor(1, 2)),
        NvmeStatus::COMMAND_SEQUENCE,
        "once is enough"
    );
    let mut discovery = Host::connect(&served.socket(), 0);
    discovery.connect_admin(&DISCOVERY_NQN.parse().unwrap(), 0);
    discovery.enable();
    assert_eq!(introduce(&mut discovery, &visitor(1, 3)), NvmeStatus::INVALID_OPCODE);
    served.assert_serves();
}
