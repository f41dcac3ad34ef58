//! Connecting the kernel's initiator to a subsystem.

use std::fs::OpenOptions;
use std::io::{self, Read as _, Write as _};
use std::net::SocketAddr;
use std::time::Duration;

use super::super::{NvmeError, Root, SubsystemUri};
use super::kernel_log::KernelLog;
use super::refusal::{explain, no_initiator};
use super::{Controller, HostIdentity};

const FABRICS: &str = "/dev/nvme-fabrics";

/// Interval at which the kernel retries to reach a lost lender.
const RECONNECT_DELAY: Duration = Duration::from_secs(1);

/// Time without traffic after which either side gives up the other. The kernel's default is 5 s. A
/// host under memory pressure can be slower than that, and would lose the connection when it needs
/// it most.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Parameters of a connection.
///
/// # Swap
/// With the kernel's defaults, a block device is removed for good once its lender has been
/// unreachable for 600 s. All swapped-out pages are then lost, even if the lender comes back. So
/// `ctrl_loss_tmo` is -1: the device stays, and the kernel reconnects every second
/// (`reconnect_delay`) without limit. The pages are available again as soon as the lender is.
///
/// Pending I/O fails after [`Self::io_timeout`] (`fast_io_fail_tmo`). If a read of swap fails, the
/// program gets SIGBUS; if a write fails, the page stays in memory. Detecting a lost lender takes
/// up to 15 s (`keep_alive_tmo`). A lender that comes back without the pages must use another NQN,
/// as ours do.
#[derive(Clone)]
pub struct Options {
    /// Number of I/O queues, each a connection. More queues serve more processors at a time, but
    /// each takes buffers.
    pub queues: usize,
    /// Timeout of I/O once the lender is known to be lost; `None` waits forever. The kernel gets
    /// whole seconds.
    pub io_timeout: Option<Duration>,
    /// This host's secret, in the form `DHHC-1:…:`.
    pub secret: Option<String>,
    /// The lender's secret; if set, the lender must authenticate itself too.
    pub lender_secret: Option<String>,
}

impl std::fmt::Debug for Options {
    /// Leaves out the secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { queues, io_timeout, secret, .. } = self;
        let secret = secret.as_ref().map(|_| "…");
        f.debug_struct("Options")
            .field("queues", queues)
            .field("io_timeout", io_timeout)
            .field("secret", &secret)
            .finish_non_exhaustive()
    }
}

/// Default limit of queues: swap keeps only a few processors busy at a time.
const MOST_QUEUES: usize = 4;

impl Default for Options {
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let io_timeout = Some(Duration::from_secs(8));
        Self { queues: processors.min(MOST_QUEUES), io_timeout, secret: None, lender_secret: None }
    }
}

/// Makes the kernel connect to the subsystem at `address`, the resolved host of `uri`. Returns once
/// the connection is established. The block device may appear later
/// ([`Controller::wait_for_device`]).
///
/// # Errors
/// Fails if the kernel has no such initiator, the lender is unreachable or refuses, or the
/// connection exists already.
pub fn connect(
    root: &Root,
    uri: &SubsystemUri,
    address: SocketAddr,
    host: &HostIdentity,
    options: &Options,
) -> Result<Controller, NvmeError> {
    let line = line(uri, address, host, options)?;
    let log = KernelLog::from_now(root);
    let mut file = match OpenOptions::new().read(true).write(true).open(root.path(FABRICS)) {
        Ok(file) => file,
        Err(error)
            if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV | libc::ENXIO)) =>
        {
            return Err(no_initiator(root, uri));
        }
        Err(error) => return Err(NvmeError::io(format_args!("cannot open {FABRICS}"))(error)),
    };
    let mut answer = String::new();
    let written = file.write(line.as_bytes()).and_then(|count| {
        if count < line.len() {
            Err(io::ErrorKind::WriteZero.into())
        } else {
            file.read_to_string(&mut answer)
        }
    });
    written.map_err(|error| explain(root, uri, host, &error, &log.nvme_lines()))?;
    let controller =
        instance(&answer).map(|instance| Controller::new(root, &format!("nvme{instance}")));
    controller.ok_or_else(|| {
        NvmeError::new(format!("cannot understand the answer of {FABRICS}: {answer:?}"))
    })
}

/// Builds the line of options. The kernel has no escape for a comma in a value.
fn line(
    uri: &SubsystemUri,
    address: SocketAddr,
    host: &HostIdentity,
    options: &Options,
) -> Result<String, NvmeError> {
    let mut values = vec![
        ("nqn", uri.nqn.to_string()),
        ("transport", uri.transport.to_string()),
        ("traddr", address.ip().to_string()),
        ("trsvcid", address.port().to_string()),
        ("hostnqn", host.nqn.to_string()),
        ("hostid", host.id.clone()),
        ("nr_io_queues", options.queues.to_string()),
        ("keep_alive_tmo", KEEP_ALIVE.as_secs().to_string()),
        ("reconnect_delay", RECONNECT_DELAY.as_secs().to_string()),
        ("ctrl_loss_tmo", "-1".to_owned()),
    ];
    values.extend(
        options.io_timeout.map(|io_timeout| ("fast_io_fail_tmo", io_timeout.as_secs().to_string())),
    );
    values.extend(options.secret.clone().map(|secret| ("dhchap_secret", secret)));
    values.extend(options.lender_secret.clone().map(|secret| ("dhchap_ctrl_secret", secret)));
    if let Some((name, value)) = values.iter().find(|(_, value)| value.contains([',', '\n'])) {
        return Err(NvmeError::new(format!("the kernel accepts no comma in {name}: {value}")));
    }
    Ok(values.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(","))
}

/// Returns the number N of `instance=N,cntlid=M`.
fn instance(answer: &str) -> Option<u32> {
    answer.split(',').find_map(|part| part.trim().strip_prefix("instance=")?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts() -> (SubsystemUri, SocketAddr, HostIdentity) {
        let uri = "nvme+rdma://b:4421/nqn.2014-08.org.example:a".parse().unwrap();
        let host = HostIdentity {
            nqn: "nqn.2014-08.org.example:h".parse().unwrap(),
            id: "an-id".to_owned(),
        };
        (uri, "[fd00::2]:4421".parse().unwrap(), host)
    }

    #[test]
    fn the_kernel_is_told_everything_in_one_line() {
        let (uri, address, host) = parts();
        let secret = Some("DHHC-1:00:a:".to_owned());
        let options = Options {
            queues: 2,
            io_timeout: Some(Duration::from_secs(9)),
            secret,
            lender_secret: None,
        };
        assert_eq!(
            line(&uri, address, &host, &options).unwrap(),
            "nqn=nqn.2014-08.org.example:a,transport=rdma,traddr=fd00::2,trsvcid=4421,\
             hostnqn=nqn.2014-08.org.example:h,hostid=an-id,nr_io_queues=2,\
             keep_alive_tmo=15,reconnect_delay=1,ctrl_loss_tmo=-1,fast_io_fail_tmo=9,\
             dhchap_secret=DHHC-1:00:a:"
        );
        assert!(!format!("{options:?}").contains("DHHC"));
    }

    #[test]
    fn no_value_can_become_another_option() {
        let (uri, address, host) = parts();
        let host = HostIdentity { id: "x,ctrl_loss_tmo=0".to_owned(), ..host };
        assert!(line(&uri, address, &host, &Options::default()).is_err());
    }

    #[test]
    fn the_kernels_answer_is_understood() {
        assert_eq!(instance("instance=3,cntlid=1\n"), Some(3));
        assert_eq!(instance(""), None);
    }

    #[test]
    fn a_host_without_the_module_is_told_which() {
        let (uri, address, host) = parts();
        let dir = tempfile::tempdir().unwrap();
        let error =
            connect(&Root::at(dir.path()), &uri, address, &host, &Options::default()).unwrap_err();
        assert!(error.help.unwrap().contains("modprobe nvme-rdma"));
    }
}
