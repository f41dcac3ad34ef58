//! Connect, and the admission of hosts.

use std::mem::offset_of;
use std::time::{Duration, Instant};

use aquifer_nvme::proto::command::{Sgl, admin, io};
use aquifer_nvme::proto::fabrics::{
    ANY_CONTROLLER, ConnectData, configuration, connect, property, status,
};
use aquifer_nvme::proto::log::{DiscoveryEntry, DiscoveryHeader, page};
use aquifer_nvme::proto::pdu::digests;
use aquifer_nvme::proto::{DISCOVERY_NQN, Nqn, NvmeStatus};
use aquifer_nvme::target::Limits;
use aquifer_page::Bytes;
use aquifer_transport::Address;
use zerocopy::{FromBytes, IntoBytes};

use super::harness::{STRANGER, Served};
use super::host::{Host, ic_req};
use crate::common::{Raw, at_most, pattern, wait_until};

#[test]
fn a_controller_gets_ready_is_reset_and_shut_down() {
    let served = Served::new(Bytes::mib(4));
    let (mut host, controller) = served.admin();
    assert_eq!(host.property(property::STATUS), u64::from(status::READY));
    assert_eq!(host.property(property::VERSION), 2 << 16);
    assert_eq!(host.property(property::CAPABILITIES) & 0xFFFF, 1023);
    let mut io = served.io(controller, 1, 0);
    io.write(0, &pattern(4096, 1));

    assert_eq!(host.set_property(property::CONFIGURATION, 0), NvmeStatus::SUCCESS);
    assert!(io.is_closed(), "a reset ends I/O queues");
    assert_eq!(served.queues(), 1, "and their threads are gone when it is done");
    assert_eq!(host.property(property::STATUS), 0);
    assert_eq!(host.identify(1, 0).unwrap_err(), NvmeStatus::COMMAND_SEQUENCE);
    let refused =
        Host::connect(&served.socket(), 0).try_connect(&served.subsystem, controller, 1, 0);
    assert_eq!(refused.status().code(), NvmeStatus::COMMAND_SEQUENCE.code());

    host.enable();
    let mut io = served.io(controller, 1, 0);
    assert!(io.read(0, 1) == pattern(4096, 1));
    let shut_down = configuration::START | configuration::SHUTDOWN_NORMAL;
    assert_eq!(host.set_property(property::CONFIGURATION, shut_down), NvmeStatus::SUCCESS);
    assert_eq!(
        host.property(property::STATUS),
        u64::from(status::READY | status::SHUTDOWN_COMPLETE)
    );
    drop(host);
    assert!(io.is_closed(), "without its admin queue no queue lives on");
    wait_until("all queues are gone", || served.queues() == 0);
}

#[test]
fn a_configuration_that_cannot_be_served_is_told_as_fatal() {
    let served = Served::new(Bytes::mib(4));
    let mut host = Host::connect(&served.socket(), 0);
    host.connect_admin(&served.subsystem, 0);
    assert_eq!(
        host.set_property(property::CONFIGURATION, configuration::ENABLE),
        NvmeStatus::SUCCESS
    );
    assert_eq!(host.property(property::STATUS), u64::from(status::FATAL));
    assert_eq!(host.set_property(property::STATUS, 0), NvmeStatus::INVALID_FIELD);
}

#[test]
fn hosts_come_in_only_where_they_may() {
    let served = Served::new(Bytes::mib(4));
    let unknown: Nqn = "nqn.2014-08.org.example:unknown".parse().unwrap();
    let in_data = |offset: usize| u64::from(connect::IN_DATA) | offset as u64;
    let subsystem = in_data(offset_of!(ConnectData, subsystem));
    let controller = in_data(offset_of!(ConnectData, controller_id));

    let mut host = Host::connect(&served.socket(), 0);
    for (what, nqn, id, queue, result) in [
        ("an unknown subsystem", &unknown, ANY_CONTROLLER, 0, subsystem),
        ("a controller of one's choice", &served.subsystem, 5, 0, controller),
        ("an I/O queue without a controller", &served.subsystem, 5, 1, controller),
    ] {
        let completion = host.try_connect(nqn, id, queue, 0);
        assert_eq!(completion.status().code(), NvmeStatus::CONNECT_INVALID.code(), "{what}");
        assert_eq!(completion.result.get(), result, "{what}");
    }
    let mut stranger = Host::connect(&served.socket(), 0);
    stranger.nqn = STRANGER.parse().unwrap();
    let completion = stranger.try_connect(&served.subsystem, ANY_CONTROLLER, 0, 0);
    assert_eq!(completion.status().code(), NvmeStatus::CONNECT_INVALID_HOST.code());

    // The connection serves after all these refusals.
    let id = host.connect_admin(&served.subsystem, 0);
    host.enable();
    let mut impostor = Host::connect(&served.socket(), 0);
    impostor.nqn = "nqn.2014-08.org.example:impostor".parse().unwrap();
    let completion = impostor.try_connect(&served.subsystem, id, 1, 0);
    assert_eq!(
        completion.status().code(),
        NvmeStatus::CONNECT_INVALID_HOST.code(),
        "another host's controller"
    );
    let completion = impostor.try_connect(&served.subsystem, id, 65, 0);
    assert_eq!(completion.status().code(), NvmeStatus::CONNECT_INVALID_HOST.code());
    let mut io = served.io(id, 64, 0);
    io.write(0, &pattern(4096, 1));
    let again = Host::connect(&served.socket(), 0).try_connect(&served.subsystem, id, 64, 0);
    assert_eq!(
        again.status().code(),
        NvmeStatus::COMMAND_SEQUENCE.code(),
        "a queue that there is already"
    );
    let too_many = Host::connect(&served.socket(), 0).try_connect(&served.subsystem, id, 65, 0);
    assert_eq!(
        too_many.status().code(),
        NvmeStatus::CONNECT_INVALID.code(),
        "more queues than there are"
    );
}

#[test]
fn a_malformed_connect_is_refused_with_the_field() {
    let served = Served::new(Bytes::mib(4));
    let mut host = Host::connect(&served.socket(), 0);
    let data = host.connect_data(&served.subsystem, ANY_CONTROLLER);

    let command = host.connect_command(0, 0).with(10, 1);
    assert_eq!(host.status(&command, data.as_bytes()), NvmeStatus::CONNECT_FORMAT);
    let command = host.connect_command(0, 0).with(11, 0);
    let completion = host.execute(&command, data.as_bytes());
    assert_eq!(
        (completion.status().code(), completion.result.get()),
        (NvmeStatus::CONNECT_INVALID.code(), 44)
    );
    let mut command = host.connect_command(0, 0);
    assert_eq!(host.status(&command, &data.as_bytes()[..1000]), NvmeStatus::DATA_LENGTH_INVALID);
    command.sgl = Sgl::transport(1024);
    assert_eq!(host.status(&command, &[]), NvmeStatus::SGL_TYPE_INVALID);
    let mut nameless = data;
    nameless.host = [b'x'; 256];
    let command = host.connect_command(0, 0);
    let completion = host.execute(&command, nameless.as_bytes());
    assert_eq!(completion.result.get(), u64::from(connect::IN_DATA) | 512);
    // Before Connect, no other command works.
    let command = host.command(io::READ, Sgl::transport(4096)).with_blocks(0, 1);
    assert_eq!(host.status(&command, &[]), NvmeStatus::COMMAND_SEQUENCE);
}

#[test]
fn discovery_tells_each_host_what_it_may_see_and_where() {
    let served = Served::new(Bytes::mib(4));
    let other = served.add(Bytes::mib(1));
    let port = served.target.listen(&"127.0.0.1:0".parse().unwrap(), None).unwrap();
    let Address::Tcp { port, .. } = port else { panic!("{port}") };
    let announced = Address::Unix(served.dir.path().join("announced"));
    served.target.listen(&announced, Some(&"192.0.2.7:4420".parse().unwrap())).unwrap();

    let entries = |host: &mut Host| {
        host.connect_admin(&Nqn::discovery(), 0);
        host.enable();
        let header = host.log(page::DISCOVERY, 0, 1024).unwrap();
        let count = DiscoveryHeader::read_from_bytes(&header).unwrap().records.get() as usize;
        let entries = host.log(page::DISCOVERY, 1024, count.max(1) * 1024).unwrap();
        let entries = entries.chunks(1024).take(count).map(|entry| {
            let entry = DiscoveryEntry::read_from_bytes(entry).unwrap();
            let text = |field: &[u8]| String::from_utf8_lossy(field).trim().to_owned();
            (Nqn::from_field(&entry.subsystem).unwrap(), text(&entry.address), text(&entry.service))
        });
        entries.collect::<Vec<_>>()
    };
    let mut all = [served.subsystem.clone(), other];
    all.sort();

    let mut host = Host::connect(&served.socket(), 0);
    assert_eq!(entries(&mut host), [], "a unix socket cannot be told");
    let mut host = Host::connect(&served.dir.path().join("announced"), 0);
    assert_eq!(
        entries(&mut host),
        all.clone().map(|nqn| (nqn, "192.0.2.7".to_owned(), "4420".to_owned()))
    );
    let mut stranger = Host::connect(&served.dir.path().join("announced"), 0);
    stranger.nqn = STRANGER.parse().unwrap();
    assert_eq!(entries(&mut stranger), []);

    // Over TCP: the port through which the host came. `Host` needs a unix socket, so a proxy joins
    // them.
    let socket = proxy(&served, port);
    let mut host = Host::connect(&socket, 0);
    assert_eq!(entries(&mut host), all.map(|nqn| (nqn, "127.0.0.1".to_owned(), port.to_string())));
    // A discovery controller has no I/O and no namespaces.
    assert_eq!(host.identify(2, 0).unwrap_err(), NvmeStatus::INVALID_FIELD);
    let command = host.command(admin::ABORT, Sgl::NONE);
    assert_eq!(host.status(&command, &[]), NvmeStatus::INVALID_OPCODE);
}

/// Opens a unix socket that leads to a TCP port, for one connection.
fn proxy(served: &Served, port: u16) -> std::path::PathBuf {
    let socket = served.dir.path().join("proxy");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        let near = listener.accept().unwrap().0;
        let far = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        let (mut near_in, mut far_in) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        let (mut near, mut far) = (near, far);
        std::thread::spawn(move || std::io::copy(&mut far_in, &mut near));
        std::io::copy(&mut near_in, &mut far)
    });
    socket
}

#[test]
fn a_silent_host_is_disconnected_and_any_command_counts() {
    let served = Served::new(Bytes::mib(4));
    let (mut admin, controller) = served.admin_with(0, 1500);
    let mut io = served.io(controller, 1, 0);
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(3) {
        io.read(0, 1);
        std::thread::sleep(Duration::from_millis(20));
    }
    let command = admin.command(admin::KEEP_ALIVE, Sgl::NONE);
    assert_eq!(admin.status(&command, &[]), NvmeStatus::SUCCESS);
    assert!(admin.is_closed() && io.is_closed());
    wait_until("all queues are gone", || served.queues() == 0);
    served.assert_serves();
}

#[test]
fn digests_and_alignment_are_as_the_host_wants_them() {
    let served = Served::new(Bytes::mib(4));
    for wanted in 0..=digests::HEADER | digests::DATA {
        let (mut admin, controller) = served.admin_with(wanted, 0);
        assert_eq!(admin.identify(1, 0).unwrap().len(), 4096);
        let mut io = served.io(controller, 1, wanted);
        io.write(1, &pattern(8192, 1));
        assert!(io.read(1, 2) == pattern(8192, 1));
        assert!(io.read(0, 256)[4096..12288] == pattern(8192, 1));
    }
    let mut host = Host::silent(&served.socket());
    host.put(ic_req(digests::HEADER, 31).as_bytes());
    let _: aquifer_nvme::proto::pdu::IcResp = host.take();
    host.shape = aquifer_nvme::proto::pdu::Shape::new(digests::HEADER, 31);
    host.connect_admin(&served.subsystem, 0);
    host.enable();
    assert_eq!(host.identify(1, 0).unwrap().len(), 4096);
}

#[test]
fn with_flow_control_each_completion_tells_the_queue_head() {
    let served = Served::new(Bytes::mib(4));
    let (_admin, controller) = served.admin();
    let mut io = Host::connect(&served.socket(), 0);
    io.flow_control = true;
    let completion = io.try_connect(&served.subsystem, controller, 1, 0);
    assert_eq!(completion.queue_head.get(), 1);
    for round in 2..70 {
        let command = io.command(io::FLUSH, Sgl::NONE);
        assert_eq!(io.execute(&command, &[]).queue_head.get(), round % 32);
    }
    assert!(io.read(0, 4) == [0; 16384]);
    assert!(io.read(0, 64) == [0; 64 * 4096]);
}

#[test]
fn a_host_slow_to_connect_is_disconnected_and_makes_room() {
    let limits =
        Limits { handshake: Duration::from_secs(2), connections: at_most(5), ..Limits::default() };
    let served = Served::with(Bytes::mib(1), Bytes::mib(1), limits);
    let (mut steady, _) = served.admin();
    let mut silent = Host::silent(&served.socket());
    let mut slow = Host::connect(&served.socket(), 0);
    assert!(silent.is_closed() && slow.is_closed());
    let mut crowd: Vec<_> = (0..20).map(|_| Host::silent(&served.socket())).collect();
    served.assert_serves();
    assert!(crowd[0].is_closed());
    assert_eq!(steady.property(property::STATUS), u64::from(status::READY));
}

#[test]
fn a_host_that_only_discovers_is_given_up_when_it_says_nothing() {
    let limits = Limits { discovery: Duration::from_millis(200), ..Limits::default() };
    let served = Served::with(Bytes::mib(1), Bytes::mib(1), limits);
    let mut host = Host::connect(&served.socket(), 0);
    // Without a keep alive timeout.
    host.connect_admin(&DISCOVERY_NQN.parse().unwrap(), 0);
    assert!(host.is_closed());
    let (mut steady, _) = served.admin();
    assert_eq!(steady.property(property::STATUS), u64::from(status::READY));
}

#[test]
fn a_lease_that_is_closed_has_no_queues_left() {
    let served = Served::new(Bytes::mib(4));
    let (mut admin, controller) = served.admin();
    let mut io = served.io(controller, 1, 0);
    served.registry.namespaces.lock().unwrap().clear();
    served.target.close_lease(served.lease.id());
    assert_eq!(served.queues(), 0);
    assert!(admin.is_closed() && io.is_closed());
}
