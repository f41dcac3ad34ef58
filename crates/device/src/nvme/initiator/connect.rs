use std::fs::OpenOptions;
use std::io::{self, Read as _, Write as _};
use std::net::SocketAddr;
use std::time::Duration;

use super::super::{NvmeError, Root, SubsystemUri};
use super::kernel_log::KernelLog;
use super::refusal::{explain, no_initiator};
use super::{Controller, HostIdentity};

const FABRICS: &str = "/dev/nvme-fabrics";

/// How often the kernel tries to reach a lender that is gone.
const RECONNECT_DELAY: Duration = Duration::from_secs(1);

/// How long either side may be silent until the other takes it for gone. The kernel's default is 5 s; a host that is short of
/// memory can be slower than that without anything being wrong, and would lose its connection when it needs it most.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// How a subsystem is attached.
///
/// # Swap
/// With the kernel's defaults a lender that cannot be reached for 600 s loses its block device for good, and with it whatever
/// was swapped out, even if the lender comes back. So `ctrl_loss_tmo` is -1: the device stays, the kernel tries each second
/// (`reconnect_delay`) for as long as it takes, and what is swapped out is there again as soon as the lender is. What waits
/// meanwhile fails after [`Self::patience`] (`fast_io_fail_tmo`): a read of swap with SIGBUS in the program that needs it, a write
/// by keeping the page in memory. `keep_alive_tmo` of 15 s is how long it takes to notice. A lender that comes back without the
/// pages must come back with another NQN, as ours do.
#[derive(Clone)]
pub struct Options {
    /// How many I/O queues, hence connections. More serve more processors at a time, each takes buffers.
    pub queues: usize,
    /// How long I/O waits for a lender that was noticed to be gone; without end, if there is none. Whole seconds.
    pub patience: Option<Duration>,
    /// This host's secret, in the form `DHHC-1:…:`.
    pub secret: Option<String>,
    /// The lender's secret, if it is to prove itself.
    pub lender_secret: Option<String>,
}

impl std::fmt::Debug for Options {
    /// Without the secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { queues, patience, secret, .. } = self;
        let secret = secret.as_ref().map(|_| "…");
        f.debug_struct("Options")
            .field("queues", queues)
            .field("patience", patience)
            .field("secret", &secret)
            .finish_non_exhaustive()
    }
}

/// Most queues that a device gets without being asked: swap is a few processors' work at a time.
const MOST_QUEUES: usize = 4;

impl Default for Options {
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let patience = Some(Duration::from_secs(8));
        Self { queues: processors.min(MOST_QUEUES), patience, secret: None, lender_secret: None }
    }
}

/// Has the kernel connect to the subsystem at `address`, to where the host of `uri` was resolved. Returns when the connection
/// stands; its block device may come a little later ([`Controller::wait_for_device`]).
///
/// # Errors
/// If the kernel has no such initiator, the lender cannot be reached or refuses, or the connection stands already.
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
        NvmeError::new(format!("{FABRICS} gives an answer that is not understood: {answer:?}"))
    })
}

/// The line that says all of it. The kernel has no way to write a comma in a value.
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
        options.patience.map(|patience| ("fast_io_fail_tmo", patience.as_secs().to_string())),
    );
    values.extend(options.secret.clone().map(|secret| ("dhchap_secret", secret)));
    values.extend(options.lender_secret.clone().map(|secret| ("dhchap_ctrl_secret", secret)));
    if let Some((name, value)) = values.iter().find(|(_, value)| value.contains([',', '\n'])) {
        return Err(NvmeError::new(format!("the kernel takes no comma in {name}: {value}")));
    }
    Ok(values.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(","))
}

/// The number in `instance=N,cntlid=M`.
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
            patience: Some(Duration::from_secs(9)),
            secret,
            lender_secret: None,
        };
        assert_eq!(
            line(&uri, address, &host, &options).unwrap(),
            "nqn=nqn.2014-08.org.example:a,transport=rdma,traddr=fd00::2,trsvcid=4421,hostnqn=nqn.2014-08.org.example:h,\
             hostid=an-id,nr_io_queues=2,keep_alive_tmo=15,reconnect_delay=1,ctrl_loss_tmo=-1,fast_io_fail_tmo=9,\
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
