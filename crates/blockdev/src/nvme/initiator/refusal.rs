//! Explanations of the kernel's refusals to connect.

use std::io;

use super::super::{Module, NvmeError, Root, SubsystemUri};
use super::HostIdentity;

/// Says how to load the initiator's module.
pub(super) fn no_initiator(root: &Root, uri: &SubsystemUri) -> NvmeError {
    let module = uri.transport.initiator_module();
    let why = format!("the kernel's initiator for NVMe over {} is not loaded", uri.transport);
    let help = match Module::find(root, module) {
        Module::Missing => {
            format!("install the kernel's module {module}, then 'modprobe {module}'")
        }
        _ => format!("modprobe {module}"),
    };
    NvmeError::new(why).help(help)
}

/// Explains the error of a connect, with the messages that the kernel logged during it.
pub(super) fn explain(
    root: &Root,
    uri: &SubsystemUri,
    host: &HostIdentity,
    error: &io::Error,
    log: &[String],
) -> NvmeError {
    let said = |text: &str| log.iter().any(|line| line.contains(text));
    let SubsystemUri { host: lender, port, nqn, .. } = uri;
    if said("is not allowed, hostnqn") {
        return NvmeError::new(format!("{lender} does not let this host use {nqn}"))
            .help(format!("on the lender, allow the host {}", host.nqn));
    }
    if said("Connect Invalid Data Parameter, subsysnqn") {
        return NvmeError::new(format!("{lender} has no subsystem {nqn}"))
            .help("check the NQN: an export gets a new one each time it starts");
    }
    if said("authentication required")
        || said("authentication failed")
        || said("authentication setup failed")
    {
        let why = format!("{lender} rejects this host's secret, or demands one: {error}");
        return NvmeError::new(why).help(
            "pass the secret with --dhchap-secret FILE; \
             the kernel needs CONFIG_NVME_AUTH (or CONFIG_NVME_HOST_AUTH)",
        );
    }
    let number = error.raw_os_error();
    let last = log.last().map(|line| format!(" ({line})")).unwrap_or_default();
    let is_loaded = || Module::find(root, uri.transport.initiator_module()) == Module::Loaded;
    match number {
        Some(libc::EINVAL) if !is_loaded() => no_initiator(root, uri),
        Some(libc::EINVAL) => {
            NvmeError::new(format!("the kernel rejects the connection's options{last}")).help(
                "see the kernel's log; --dhchap-secret needs a kernel with NVMe authentication, \
                 and one host ID cannot have two host NQNs",
            )
        }
        Some(libc::EALREADY) => NvmeError::new(format!(
            "this host is already connected to {nqn} at {lender}"
        ))
        .help("run 'aquifer volume detach', or 'nvme disconnect' if another program connected it"),
        Some(libc::ECONNREFUSED | libc::ECONNRESET) => {
            let transport = uri.transport;
            NvmeError::new(format!("no NVMe/{transport} target listens at {lender} port {port}"))
                .help("start 'aquifer serve export --nvme' there, and check address and port")
        }
        Some(libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH) => {
            NvmeError::new(format!("{lender} cannot be reached: {error}"))
                .help("check the network and its firewalls")
        }
        Some(libc::ENODEV | libc::EADDRNOTAVAIL) => {
            NvmeError::new(format!("no RDMA link of this host leads to {lender}: {error}"))
                .help("see 'rdma link'; soft-RoCE: 'rdma link add rxe0 type rxe netdev DEV'")
        }
        Some(libc::EACCES | libc::EPERM) => {
            NvmeError::new(format!("the kernel refuses: {error}")).help("run as root")
        }
        _ => NvmeError::new(format!("the kernel could not connect: {error}{last}"))
            .help("see the kernel's log"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explained(number: i32, log: &[&str], loaded: bool) -> NvmeError {
        let dir = tempfile::tempdir().unwrap();
        if loaded {
            std::fs::create_dir_all(dir.path().join("sys/module/nvme_tcp")).unwrap();
        }
        let uri = "nvme+tcp://b:4420/nqn.2014-08.org.example:a".parse().unwrap();
        let host =
            HostIdentity { nqn: "nqn.2014-08.org.example:h".parse().unwrap(), id: String::new() };
        let log: Vec<_> = log.iter().map(|&line| line.to_owned()).collect();
        explain(&Root::at(dir.path()), &uri, &host, &io::Error::from_raw_os_error(number), &log)
    }

    #[test]
    fn every_refusal_says_what_to_do() {
        let (nqn, host) = ("nqn.2014-08.org.example:a", "nqn.2014-08.org.example:h");
        let not_allowed =
            format!("nvme nvme0: Connect for subsystem {nqn} is not allowed, hostnqn: {host}");
        let no_such = format!("nvme nvme0: Connect Invalid Data Parameter, subsysnqn \"{nqn}\"");
        for (number, log, loaded, expected) in [
            (
                libc::EIO,
                &[not_allowed.as_str()][..],
                true,
                "on the lender, allow the host nqn.2014-08.org.example:h",
            ),
            (libc::EIO, &[&no_such], true, "check the NQN"),
            (libc::EINVAL, &[], false, "modprobe nvme-tcp"),
            (libc::EINVAL, &[], true, "see the kernel's log"),
            (libc::EALREADY, &[], true, "aquifer volume detach"),
            (libc::ECONNREFUSED, &[], true, "aquifer serve export --nvme"),
            (libc::EHOSTUNREACH, &[], true, "check the network"),
            (libc::ENOMEM, &[], true, "see the kernel's log"),
        ] {
            let help = explained(number, log, loaded).help.unwrap();
            assert!(help.contains(expected), "{number} {log:?}: {help}");
        }
    }
}
