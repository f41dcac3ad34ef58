//! Ports of the kernel's NVMe target: the addresses at which it serves subsystems.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use aquifer_nvme::proto::Nqn;

use super::super::{Module, NvmeError, Root, Transport};
use super::configfs::SUBSYSTEMS;
use super::mark;

const PORTS: &str = "/sys/kernel/config/nvmet/ports";

/// Serves a subsystem at an address, through our existing port there or a new one.
pub(super) fn open(
    root: &Root,
    nqn: &Nqn,
    transport: Transport,
    at: SocketAddr,
) -> Result<(), NvmeError> {
    let fail = || NvmeError::io(format!("cannot make a port for {at}"));
    let (ip, port) = (at.ip().to_string(), at.port().to_string());
    let family = if at.is_ipv4() { "ipv4" } else { "ipv6" };
    let attributes = [
        ("addr_trtype", transport.name()),
        ("addr_adrfam", family),
        ("addr_traddr", ip.as_str()),
        ("addr_trsvcid", port.as_str()),
    ];
    let is_at = |dir: &PathBuf| {
        attributes.iter().all(|(name, value)| root.read(dir.join(name)).as_deref() == Some(*value))
    };
    let numbers = root.names(PORTS).map_err(fail())?;
    let ours =
        numbers.iter().filter(|number| is_ours(number)).map(|number| Path::new(PORTS).join(number));
    let dir = match ours.into_iter().find(is_at) {
        Some(dir) => dir,
        None => {
            let dir = make(root)?;
            for (attribute, value) in attributes {
                root.write(dir.join(attribute), value).map_err(fail())?;
            }
            dir
        }
    };
    let linked = root
        .link(Path::new(SUBSYSTEMS).join(nqn.as_str()), dir.join("subsystems").join(nqn.as_str()));
    linked.map_err(|error| {
        // Without a subsystem, no later removal would find the port.
        let _ = remove_if_idle(root, &dir);
        refused(root, transport, at, &error)
    })
}

fn make(root: &Root) -> Result<PathBuf, NvmeError> {
    for number in mark::PORTS {
        let dir = Path::new(PORTS).join(number.to_string());
        match root.make_dir(&dir) {
            Ok(()) => return Ok(dir),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => {
                return Err(NvmeError::io("cannot make a port of the kernel's target")(error));
            }
        }
    }
    Err(NvmeError::new("all port numbers that Aquifer may use in the kernel's target are taken")
        .help("stop some exports"))
}

/// Explains why the kernel refuses to listen.
fn refused(root: &Root, transport: Transport, at: SocketAddr, error: &io::Error) -> NvmeError {
    let module = transport.target_module();
    let why = format!("the kernel does not serve NVMe over {transport} at {at}: {error}");
    let help = match error.raw_os_error() {
        _ if Module::find(root, module) != Module::Loaded => format!("modprobe {module}"),
        Some(libc::EADDRINUSE) => "use another address, or stop the program on it".to_owned(),
        Some(libc::EADDRNOTAVAIL | libc::ENODEV) if transport == Transport::Rdma => {
            "use an address of an RDMA link; soft-RoCE: 'rdma link add rxe0 type rxe netdev DEV'"
                .to_owned()
        }
        Some(libc::EADDRNOTAVAIL) => "use an address of this host".to_owned(),
        _ => "see the kernel's log".to_owned(),
    };
    NvmeError::new(why).help(help)
}

/// Tells whether any port serves a subsystem.
pub(super) fn serves(root: &Root, nqn: &Nqn) -> Result<bool, NvmeError> {
    let numbers =
        root.names(PORTS).map_err(NvmeError::io("cannot read the ports of the kernel's target"))?;
    let link = |number: &String| {
        root.path(Path::new(PORTS).join(number).join("subsystems").join(nqn.as_str()))
    };
    Ok(numbers.iter().any(|number| link(number).is_symlink()))
}

/// Stops serving a subsystem at every port, which disconnects its hosts. Our port goes with its
/// last subsystem.
pub(super) fn close(root: &Root, nqn: &Nqn) -> Result<(), NvmeError> {
    let fail = || NvmeError::io(format!("cannot close the ports of {nqn}"));
    for number in root.names(PORTS).map_err(fail())? {
        let dir = Path::new(PORTS).join(&number);
        let link = dir.join("subsystems").join(nqn.as_str());
        if root.path(&link).is_symlink() {
            root.remove_link(link).map_err(fail())?;
            remove_if_idle(root, &dir).map_err(fail())?;
        }
    }
    Ok(())
}

/// Removes our ports without a subsystem, left by a creator that crashed.
pub(super) fn sweep(root: &Root) -> Result<(), NvmeError> {
    let fail = || NvmeError::io("cannot remove a port that serves nothing");
    for number in root.names(PORTS).map_err(fail())? {
        remove_if_idle(root, &Path::new(PORTS).join(number)).map_err(fail())?;
    }
    Ok(())
}

fn remove_if_idle(root: &Root, dir: &Path) -> io::Result<()> {
    let ours = dir.file_name().is_some_and(|number| is_ours(&number.to_string_lossy()));
    if ours && root.names(dir.join("subsystems"))?.is_empty() {
        root.remove_dir(dir)
    } else {
        Ok(())
    }
}

fn is_ours(number: &str) -> bool {
    number.parse().is_ok_and(|number| mark::PORTS.contains(&number))
}
