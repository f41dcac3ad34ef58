//! Admission of hosts, and the errors that refused hosts get.

use std::sync::Arc;

use aquifer_nvme::auth::{Secret, Secrets};
use aquifer_nvme::initiator::{Connection, Failure, NvmeError, Target};
use aquifer_nvme::proto::Nqn;
use aquifer_nvme::target::Limits;
use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_transport::{Address, ConnectionLimits};

use super::{read, target};
use crate::common::{TIMEOUT, pattern, wait_until};
use crate::nvme_target::harness::{STRANGER, Served};

const HOST: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
/// The same key, bound to its owner's name.
const CONTROLLER: &str = "DHHC-1:02:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

fn secrets(host: &str, controller: Option<&str>) -> Option<Secrets> {
    let secret = |text: &str| text.parse::<Secret>().unwrap();
    Some(Secrets { host: secret(host), controller: controller.map(secret) })
}

fn refused(target: Target) -> NvmeError {
    Connection::connect(Arc::new(target), TIMEOUT).unwrap_err()
}

#[test]
fn hosts_that_prove_themselves_get_in_and_controllers_must_too() {
    let served = Served::new(Bytes::mib(4));
    *served.registry.secrets.lock().unwrap() = secrets(HOST, Some(CONTROLLER));
    for controller in [None, Some(CONTROLLER)] {
        for digests in [false, true] {
            let target = Target {
                secrets: secrets(HOST, controller),
                header_digest: digests,
                data_digest: digests,
                ..target(&served)
            };
            let mut connection = Connection::connect(Arc::new(target), TIMEOUT).unwrap();
            connection.write(0, &pattern(PAGE_SIZE, 1)).unwrap();
            assert!(read(&mut connection, 0, PAGE_SIZE) == pattern(PAGE_SIZE, 1));
        }
    }
}

#[test]
fn only_a_host_that_fails_repeatedly_must_pause() {
    let connections = ConnectionLimits { exempts_loopback: false, ..ConnectionLimits::default() };
    let limits = Limits { connections, ..Limits::default() };
    let served = Served::with(Bytes::mib(4), Bytes::mib(4), limits);
    *served.registry.secrets.lock().unwrap() = secrets(HOST, None);
    let address = served.target.listen(&"127.0.0.1:0".parse().unwrap(), None).unwrap();
    let over_tcp = |secret| {
        let target =
            Target { address: address.clone(), secrets: secrets(secret, None), ..target(&served) };
        Connection::connect(Arc::new(target), TIMEOUT)
    };
    over_tcp(CONTROLLER).unwrap_err();
    over_tcp(HOST).expect("one failure costs nothing");
    // Repeats on a machine so slow that the pause ends before the attempt.
    let is_refused = (0..20).any(|_| {
        (0..20).for_each(|_| _ = over_tcp(CONTROLLER).unwrap_err());
        over_tcp(HOST).is_err()
    });
    assert!(is_refused, "a host that fails again and again is refused whatever it knows");
    let other = Target { secrets: secrets(HOST, None), ..target(&served) };
    Connection::connect(Arc::new(other), TIMEOUT).unwrap();
    wait_until("the pause is over", || over_tcp(HOST).is_ok());
}

#[test]
fn a_wrong_or_missing_secret_is_reported() {
    let served = Served::new(Bytes::mib(4));
    *served.registry.secrets.lock().unwrap() = secrets(HOST, None);
    let with = |secrets| refused(Target { secrets, ..target(&served) });
    for (error, why) in [
        (with(None), "give the secret of host"),
        (with(secrets(CONTROLLER, None)), "rejects this host's secret"),
        // The target has no controller secret, so it cannot prove its name.
        (with(secrets(HOST, Some(CONTROLLER))), "rejects"),
    ] {
        assert!(matches!(error.failure, Failure::Authentication(_)), "{error}");
        assert!(error.to_string().contains(why) && error.ends_connection(), "{error}");
    }
    *served.registry.secrets.lock().unwrap() = secrets(HOST, Some(CONTROLLER));
    let error = with(secrets(HOST, Some(HOST)));
    assert!(error.to_string().contains("its secret is wrong"), "{error}");
    *served.registry.secrets.lock().unwrap() = None;
    let error = with(secrets(HOST, Some(CONTROLLER)));
    assert!(error.to_string().contains("does not authenticate"), "{error}");
    wait_until("all of them are gone", || served.queues() == 0);
}

#[test]
fn missing_and_foreign_subsystems_are_refused_by_name() {
    let served = Served::new(Bytes::mib(4));
    let other: Nqn = "nqn.2014-08.org.example:other".parse().unwrap();
    let host: Nqn = STRANGER.parse().unwrap();
    let nobody = Address::Unix(served.dir.path().join("nobody"));
    for (target, why) in [
        (Target { subsystem: other.clone(), ..target(&served) }, "no such subsystem"),
        (Target { host, ..target(&served) }, "is not allowed"),
        (Target { namespace: 2, ..target(&served) }, "no namespace 2"),
        (Target { subsystem: Nqn::discovery(), ..target(&served) }, "discovery"),
        (Target { address: nobody, ..target(&served) }, "cannot connect"),
    ] {
        let name = target.subsystem.to_string();
        let error = refused(target).to_string();
        assert!(
            error.contains(why) && error.contains(&name) && error.contains("nvme+unix://"),
            "{error}"
        );
    }
    wait_until("all of them are gone", || served.queues() == 0);
}
