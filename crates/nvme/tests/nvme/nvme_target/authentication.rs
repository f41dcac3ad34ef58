//! Authentication of hosts.

use aquifer_nvme::auth::{Exchange, Group, Hash, Response, Secret, Secrets, Side};
use aquifer_nvme::proto::auth::{
    Challenge, DH_HMAC_CHAP, Failure, Negotiate, Protocol, Reply, Start, Success, failure, message,
};
use aquifer_nvme::proto::command::{FABRICS, Sgl, io};
use aquifer_nvme::proto::fabrics::{
    ANY_CONTROLLER, AUTHENTICATION_PROTOCOL, configuration, connect, kind, property,
};
use aquifer_nvme::proto::{Command, DISCOVERY_NQN, NvmeStatus};
use aquifer_nvme::target::Limits;
use aquifer_page::Bytes;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::harness::Served;
use super::host::Host;
use crate::common::{Raw, at_most, pattern, wait_until};

const HOST: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
/// The same key, bound to its owner's name.
const CONTROLLER: &str = "DHHC-1:02:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
const TRANSACTION: u16 = 0x1234;

fn secret(text: &str) -> Secret {
    text.parse().unwrap()
}

fn served(controller: bool) -> Served {
    served_up_to(Limits::default().largest_group, controller)
}

fn served_up_to(largest_group: Group, controller: bool) -> Served {
    let limits = Limits { largest_group, ..Limits::default() };
    let served = Served::with(Bytes::mib(4), Bytes::mib(4), limits);
    let controller = controller.then(|| secret(CONTROLLER));
    *served.registry.secrets.lock().unwrap() = Some(Secrets { host: secret(HOST), controller });
    served
}

fn send(host: &mut Host, message: &[u8]) -> NvmeStatus {
    let id = host.id();
    let sgl = Sgl::in_capsule(message.len() as u32);
    let command = Command::new(FABRICS, id, kind::AUTHENTICATION_SEND.into(), sgl);
    let command = command.with(10, AUTHENTICATION_PROTOCOL).with(11, message.len() as u32);
    host.status(&command, message)
}

fn receive(host: &mut Host) -> Vec<u8> {
    let id = host.id();
    let command =
        Command::new(FABRICS, id, kind::AUTHENTICATION_RECEIVE.into(), Sgl::transport(4096));
    host.fetch(&command.with(10, AUTHENTICATION_PROTOCOL).with(11, 4096), 4096).unwrap()
}

fn negotiation(hashes: &[u8], groups: &[u8]) -> Vec<u8> {
    let mut negotiate = Negotiate::new_zeroed();
    negotiate.start = Start::new(message::NEGOTIATE, TRANSACTION);
    negotiate.protocols = 1;
    let mut protocol = Protocol::new_zeroed();
    protocol.id = DH_HMAC_CHAP;
    (protocol.hash_count, protocol.group_count) = (hashes.len() as u8, groups.len() as u8);
    protocol.hashes[..hashes.len()].copy_from_slice(hashes);
    protocol.groups[..groups.len()].copy_from_slice(groups);
    [negotiate.as_bytes(), protocol.as_bytes()].concat()
}

/// Negotiates, and answers the challenge by `proof`, with a challenge to the controller if given.
/// Returns the controller's last message and the response that it should contain.
fn prove(
    served: &Served,
    host: &mut Host,
    (hash, group): (Hash, Group),
    proof: &Secret,
    challenge: Option<&[u8]>,
) -> (Vec<u8>, Vec<u8>) {
    assert_eq!(send(host, &negotiation(&[hash.id()], &[group.id()])), NvmeStatus::SUCCESS);
    let asked = receive(host);
    let (head, rest) = Challenge::read_from_prefix(&asked).unwrap();
    assert_eq!(
        (head.start.message, head.start.transaction.get()),
        (message::CHALLENGE, TRANSACTION)
    );
    assert_eq!((head.hash, head.group), (hash.id(), group.id()));
    let exchange = Exchange::begin(group);
    let exponential = exchange.as_ref().map(Exchange::exponential).unwrap_or_default();
    let theirs = &rest[hash.length()..][..head.exponential.get().into()];
    let key = exchange.map(|exchange| exchange.key(theirs).unwrap());
    let mut response = Response {
        side: Side::Host,
        hash,
        secret: proof,
        challenge: &rest[..hash.length()],
        key: key.as_deref(),
        sequence: head.sequence.get(),
        transaction: TRANSACTION,
        secure_channel: 0,
        host: &host.nqn.clone(),
        subsystem: &served.subsystem,
    };
    let mut reply = Reply::new_zeroed();
    reply.start = Start::new(message::REPLY, TRANSACTION);
    reply.hash_length = hash.length() as u8;
    reply.challenged = challenge.is_some().into();
    reply.exponential = (exponential.len() as u16).into();
    reply.sequence = 77.into();
    let nothing = vec![0; hash.length()];
    let bytes =
        [reply.as_bytes(), &response.value(), challenge.unwrap_or(&nothing), &exponential].concat();
    assert_eq!(send(host, &bytes), NvmeStatus::SUCCESS);
    let controller = secret(CONTROLLER);
    (response.side, response.secret, response.sequence) = (Side::Controller, &controller, 77);
    response.challenge = challenge.unwrap_or(&nothing);
    (receive(host), response.value())
}

/// Authenticates the host by the right secret.
fn authenticate(served: &Served, host: &mut Host) {
    let (success, _) = prove(served, host, (Hash::Sha256, Group::Null), &secret(HOST), None);
    assert_eq!(success[..2], message::SUCCESS1);
}

fn connected(served: &Served) -> (Host, u16) {
    let mut host = Host::connect(&served.socket(), 0);
    let completion = host.try_connect(&served.subsystem, ANY_CONTROLLER, 0, 0);
    let result = completion.result.get() as u32;
    assert!(result & connect::AUTHENTICATION_REQUIRED != 0);
    (host, result as u16)
}

#[test]
fn both_ends_authenticate_by_every_hash_and_group() {
    let served = served_up_to(Group::Ffdhe8192, true);
    let all = Hash::ALL.map(|hash| (hash, Group::Null)).into_iter();
    let all = all.chain(Group::ALL.map(|group| (Hash::Sha384, group)));
    for (hash, group) in all {
        for bidirectional in [false, true] {
            let (mut host, _) = connected(&served);
            let challenge = pattern(hash.length(), 5);
            let challenge = bidirectional.then_some(&challenge[..]);
            let (last, proof) = prove(&served, &mut host, (hash, group), &secret(HOST), challenge);
            let (success, rest) = Success::read_from_prefix(&last).unwrap();
            assert_eq!(success.start.message, message::SUCCESS1, "{hash:?} {group:?}");
            assert_eq!(success.responded == 1, bidirectional);
            if bidirectional {
                assert_eq!(rest[..hash.length()], proof, "{hash:?} {group:?}");
                let mut done = Success::new_zeroed();
                done.start = Start::new(message::SUCCESS2, TRANSACTION);
                assert_eq!(send(&mut host, done.as_bytes()), NvmeStatus::SUCCESS);
            }
            host.enable();
        }
    }
}

#[test]
fn groups_that_cost_too_much_are_not_for_hosts_to_choose() {
    let served = served(false);
    for group in [Group::Ffdhe6144, Group::Ffdhe8192] {
        let (mut host, _) = connected(&served);
        assert_eq!(send(&mut host, &negotiation(&[1], &[group.id()])), NvmeStatus::SUCCESS);
        let last = receive(&mut host);
        assert_failed(host, &last, failure::NO_GROUP);
    }
    // A host that also offers smaller groups gets one of those.
    let (mut host, _) = connected(&served);
    let groups = Group::ALL.map(Group::id);
    assert_eq!(send(&mut host, &negotiation(&[1], &groups)), NvmeStatus::SUCCESS);
    let asked = receive(&mut host);
    assert_eq!(Challenge::read_from_prefix(&asked).unwrap().0.group, Group::Ffdhe2048.id());
}

#[test]
fn every_queue_must_be_authenticated_before_it_is_of_use() {
    let served = served(false);
    let (mut admin, controller) = connected(&served);
    let start = configuration::START;
    assert_eq!(
        admin.set_property(property::CONFIGURATION, start),
        NvmeStatus::AUTHENTICATION_REQUIRED
    );
    assert_eq!(admin.identify(1, 0).unwrap_err(), NvmeStatus::AUTHENTICATION_REQUIRED);
    authenticate(&served, &mut admin);
    admin.enable();
    let mut io = Host::connect(&served.socket(), 0);
    let completion = io.try_connect(&served.subsystem, controller, 1, 0);
    assert!(completion.result.get() as u32 & connect::AUTHENTICATION_REQUIRED != 0);
    let write = io.command(io::WRITE, Sgl::in_capsule(4096)).with_blocks(0, 1);
    assert_eq!(io.status(&write, &pattern(4096, 1)), NvmeStatus::AUTHENTICATION_REQUIRED);
    assert_eq!(served.lease.stored(), Bytes::ZERO);
    authenticate(&served, &mut io);
    io.write(0, &pattern(4096, 1));
    assert!(io.read(0, 1) == pattern(4096, 1));
}

#[test]
fn unproved_hosts_make_room_and_count_for_nothing() {
    let limits = Limits { connections: at_most(4), ..Limits::default() };
    let served = Served::with(Bytes::mib(4), Bytes::mib(4), limits);
    *served.registry.secrets.lock().unwrap() =
        Some(Secrets { host: secret(HOST), controller: None });
    let mut looking: Vec<_> = (0..2).map(|_| discover(&served)).collect();
    let mut strangers: Vec<_> = (0..2).map(|_| connected(&served).0).collect();
    assert_eq!(served.queues(), 0);
    let (mut admin, controller) = connected(&served);
    authenticate(&served, &mut admin);
    admin.enable();
    let mut io = Host::connect(&served.socket(), 0);
    io.try_connect(&served.subsystem, controller, 1, 0);
    authenticate(&served, &mut io);
    io.write(0, &pattern(4096, 1));
    assert!(looking.iter_mut().all(Raw::is_closed));
    assert_eq!(served.queues(), 2);
    // Closing a lease ends all its connections, authenticated or not.
    served.registry.namespaces.lock().unwrap().clear();
    served.target.close_lease(served.lease.id());
    assert!(strangers.iter_mut().all(Raw::is_closed) && io.is_closed());
}

fn discover(served: &Served) -> Host {
    let mut host = Host::connect(&served.socket(), 0);
    host.connect_admin(&DISCOVERY_NQN.parse().unwrap(), 0);
    host.enable();
    host
}

fn assert_failed(mut host: Host, last: &[u8], explanation: u8) {
    let (told, _) = Failure::read_from_prefix(last).unwrap();
    assert_eq!((told.start.message, told.explanation), (message::FAILURE1, explanation));
    assert!(host.is_closed());
}

#[test]
fn an_unproved_host_gets_the_reason_and_stays_out() {
    let served = served(false);
    let chap = (Hash::Sha256, Group::Null);
    let (mut host, _) = connected(&served);
    let (last, _) = prove(&served, &mut host, chap, &secret(CONTROLLER), None);
    assert_failed(host, &last, failure::FAILED);
    let (mut host, _) = connected(&served);
    let (last, _) = prove(&served, &mut host, chap, &secret(HOST), Some(&[1; 32]));
    assert_failed(host, &last, failure::FAILED);

    let success = [&message::SUCCESS2[..], &[0; 14]].concat();
    let reply = [&message::REPLY[..], &[0; 14]].concat();
    let none = negotiation(&[], &[0]);
    let unknown = negotiation(&[1], &[99]);
    let mut secure = negotiation(&[1], &[0]);
    secure[6] = 1;
    for (what, message, explanation) in [
        ("success at once", &success, failure::MESSAGE),
        ("a reply to no challenge", &reply, failure::MESSAGE),
        ("no hash", &none, failure::NO_HASH),
        ("no group", &unknown, failure::NO_GROUP),
        ("a secure channel", &secure, failure::NO_SECURE_CHANNEL),
        ("a negotiation that is cut", &secure[..5].to_vec(), failure::PAYLOAD),
        ("nonsense", &vec![0x55; 8000], failure::MESSAGE),
    ] {
        let (mut host, _) = connected(&served);
        assert_eq!(send(&mut host, message), NvmeStatus::SUCCESS, "{what}");
        let last = receive(&mut host);
        assert_failed(host, &last, explanation);
    }
    wait_until("all of them are gone", || served.queues() == 0);
}

#[test]
fn no_detour_leads_past_the_proof() {
    let served = served(true);
    // The host fetches the challenge into too little room.
    let (mut host, _) = connected(&served);
    assert_eq!(send(&mut host, &negotiation(&[1], &[0])), NvmeStatus::SUCCESS);
    let id = host.id();
    let short = Command::new(FABRICS, id, kind::AUTHENTICATION_RECEIVE.into(), Sgl::transport(20));
    let short = short.with(10, AUTHENTICATION_PROTOCOL).with(11, 20);
    assert_eq!(host.status(&short, &[]), NvmeStatus::INVALID_FIELD);
    assert_eq!(host.identify(1, 0).unwrap_err(), NvmeStatus::AUTHENTICATION_REQUIRED);
    assert_eq!(host.status(&short, &[]), NvmeStatus::COMMAND_SEQUENCE);
    let success = [&message::SUCCESS2[..], &[0; 14]].concat();
    assert_eq!(send(&mut host, &success), NvmeStatus::SUCCESS);
    assert_eq!(host.identify(1, 0).unwrap_err(), NvmeStatus::AUTHENTICATION_REQUIRED);
    // The host gives up.
    let (mut host, _) = connected(&served);
    let failure = [&message::FAILURE2[..], &[0; 6]].concat();
    assert_eq!(send(&mut host, &failure), NvmeStatus::SUCCESS);
    assert!(host.is_closed());
}
