//! Asynchronous events.

use aquifer_nvme::proto::command::{Sgl, admin};
use aquifer_nvme::proto::feature::{event, id};
use aquifer_nvme::proto::identify::{Namespace, controller, what};
use aquifer_nvme::proto::log::{DiscoveryHeader, page};
use aquifer_nvme::proto::{Nqn, NvmeStatus};
use aquifer_page::{Bytes, PAGE_SIZE};
use zerocopy::FromBytes;

use super::harness::Served;
use super::host::Host;
use crate::common::pattern;

fn want(host: &mut Host, events: u32) {
    let command = host.command(admin::SET_FEATURES, Sgl::NONE).with(10, id::ASYNC_EVENTS.into());
    assert_eq!(host.status(&command.with(11, events), &[]), NvmeStatus::SUCCESS);
}

/// Sends an asynchronous event request and returns its identifier.
fn ask(host: &mut Host) -> u16 {
    let command = host.command(admin::ASYNC_EVENT_REQUEST, Sgl::NONE);
    host.send(&command, &[]);
    command.id.get()
}

#[test]
fn a_resized_namespace_is_told_once_until_its_log_is_read() {
    let served = Served::new(Bytes::mib(8));
    let (mut host, id) = served.admin();
    let mut io = served.io(id, 1, 0);
    want(&mut host, controller::NAMESPACE_ATTRIBUTE_NOTICES);
    let first = ask(&mut host);
    let second = ask(&mut host);
    io.write(1024, &pattern(PAGE_SIZE, 1));
    io.write(1023, &pattern(PAGE_SIZE, 2));

    served.namespace.resize(Bytes::mib(4)).unwrap();
    let told = host.completion();
    assert_eq!(told.command_id.get(), second);
    assert_eq!(told.result.get(), u64::from(event::NAMESPACE_CHANGED));
    let namespace =
        Namespace::read_from_bytes(&host.identify(what::NAMESPACE, 1).unwrap()).unwrap();
    assert_eq!(namespace.size.get(), 1024);
    assert_eq!(served.lease.stored(), Bytes::kib(4), "what was cut off is given back");

    // No second event before the host reads the log.
    served.namespace.resize(Bytes::mib(8)).unwrap();
    assert_eq!(host.identify(what::NAMESPACE, 1).unwrap()[..2], [0, 8]);
    assert_eq!(host.log(page::CHANGED_NAMESPACES, 0, 8).unwrap(), [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(host.log(page::CHANGED_NAMESPACES, 0, 8).unwrap(), [0; 8]);
    assert!(io.read(1024, 1) == [0; PAGE_SIZE]);
    served.namespace.resize(Bytes::mib(6)).unwrap();
    let told = host.completion();
    assert_eq!(
        (told.command_id.get(), told.result.get()),
        (first, u64::from(event::NAMESPACE_CHANGED))
    );

    for size in [Bytes::ZERO, Bytes(4097), Bytes::mib(9)] {
        assert!(
            served
                .namespace
                .resize(size)
                .unwrap_err()
                .to_string()
                .contains("give a positive multiple")
        );
    }
    assert_eq!(served.namespace.size(), Bytes::mib(6));
}

#[test]
fn an_event_that_is_not_enabled_waits_until_it_is() {
    let served = Served::new(Bytes::mib(8));
    let (mut host, _) = served.admin();
    let request = ask(&mut host);
    served.namespace.resize(Bytes::mib(4)).unwrap();
    assert_eq!(host.identify(what::NAMESPACE, 1).unwrap()[..2], [0, 4]);
    want(&mut host, controller::NAMESPACE_ATTRIBUTE_NOTICES);
    assert_eq!(host.completion().command_id.get(), request);
}

#[test]
fn requests_are_limited_and_can_be_aborted() {
    let served = Served::new(Bytes::mib(8));
    let (mut host, _) = served.admin();
    let requests: Vec<_> = (0..4).map(|_| ask(&mut host)).collect();
    let command = host.command(admin::ASYNC_EVENT_REQUEST, Sgl::NONE);
    assert_eq!(host.status(&command, &[]), NvmeStatus::ASYNC_LIMIT);

    let abort = host.command(admin::ABORT, Sgl::NONE).with(10, u32::from(requests[1]) << 16);
    host.send(&abort, &[]);
    let aborted = host.completion();
    assert_eq!(
        (aborted.command_id.get(), aborted.status()),
        (requests[1], NvmeStatus::ABORT_REQUESTED)
    );
    assert_eq!((host.completion().result.get(), ask(&mut host)), (0, abort.id.get() + 1));
    let again = host.execute(&abort, &[]);
    assert_eq!(again.result.get(), 1, "it is not there any more");
}

#[test]
fn hosts_that_wait_for_it_are_told_of_new_subsystems() {
    let served = Served::new(Bytes::mib(4));
    let mut host = Host::connect(&served.socket(), 0);
    host.connect_admin(&Nqn::discovery(), 0);
    host.enable();
    want(&mut host, controller::DISCOVERY_LOG_NOTICES);
    let request = ask(&mut host);
    let generation = |host: &mut Host| {
        let header = host.log(page::DISCOVERY, 0, 1024).unwrap();
        DiscoveryHeader::read_from_bytes(&header).unwrap().generation.get()
    };
    let before = generation(&mut host);
    served.add(Bytes::mib(1));
    served.target.subsystems_changed();
    let told = host.completion();
    assert_eq!(
        (told.command_id.get(), told.result.get()),
        (request, u64::from(event::DISCOVERY_CHANGED))
    );
    assert!(generation(&mut host) > before);
}
