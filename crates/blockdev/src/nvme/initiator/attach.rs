//! Attaching a subsystem as a block device, with or without swap, and detaching it.

use std::fs::OpenOptions;
use std::path::Path;
use std::time::Duration;

use aquifer_page::{Bytes, VolumeId};

use super::super::{NvmeError, Root, SubsystemUri, network};
use super::record::{Held, Record};
use super::{Controller, HostIdentity, Options, connect};
use crate::backend::exclusive;
use crate::swap::{self, SwapError};
use crate::{safety, sys};

/// Time that the kernel may take to find the namespace of a connected subsystem.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(30);

/// Parameters of an attachment.
#[derive(Clone, Debug)]
pub struct Wish {
    /// Id under which the attachment is recorded.
    pub id: VolumeId,
    /// The subsystem to connect to.
    pub uri: SubsystemUri,
    /// Identity that this host presents to the lender.
    pub host: HostIdentity,
    /// Parameters of the connection.
    pub options: Options,
    /// Swap to the device.
    pub swap: bool,
    /// Swap priority, 0 to 32767; `None` leaves it to the kernel.
    pub priority: Option<u16>,
    /// Swaps even over a network that is known to hang hosts.
    pub force: bool,
    /// Data of the caller, kept in the record.
    pub note: serde_json::Value,
}

/// Attaches a subsystem, and swaps to it if `wish.swap` is set. Swap overwrites the content of the
/// device.
///
/// After a crash of the caller, the [`Record`] remains.
///
/// # Errors
/// Fails if swap over this network is dangerous, the kernel cannot connect, no block device
/// appears, or swapon fails. The function then undoes its steps; the error says so if it cannot.
pub fn attach(root: &Root, state: &Path, wish: &Wish) -> Result<Record, NvmeError> {
    let address = wish.uri.resolve()?;
    if wish.swap {
        prepare_for_swap(root, address.ip(), wish.force)?;
    }
    let record = Record {
        id: wish.id,
        uri: wish.uri.clone(),
        address,
        host: wish.host.clone(),
        swap: wish.swap,
        device: None,
        controller: None,
        capacity: Bytes::ZERO,
        note: wish.note.clone(),
    };
    let mut held = Held::new(state, record)?;
    match bring_up(root, &mut held, wish) {
        Ok(()) => Ok(held.record),
        Err(error) => Err(undo(root, held, error)),
    }
}

fn prepare_for_swap(root: &Root, lender: std::net::IpAddr, force: bool) -> Result<(), NvmeError> {
    if let Some(danger) = network::danger(root, lender).filter(|_| !force) {
        return Err(NvmeError::new(danger.why()).help(format!("{}, or use --force", danger.help())));
    }
    if let Err(error) = safety::fill_reserve() {
        tracing::warn!(%error, "the memory reserve for swap is too small");
    }
    Ok(())
}

fn bring_up(root: &Root, held: &mut Held, wish: &Wish) -> Result<(), NvmeError> {
    let controller = connect(root, &wish.uri, held.record.address, &wish.host, &wish.options)?;
    held.record.controller = Some(controller.name().to_owned());
    let device = controller.wait_for_device(DEVICE_TIMEOUT)?;
    held.record.capacity = controller.size(&device);
    held.record.device = Some(device.clone());
    held.write()?;
    if wish.swap {
        let id = held.record.id;
        let on = swap::format(&device, held.record.capacity, &format!("aquifer-{id}"), id.0);
        on.and_then(|()| swap::on(&device, wish.priority))
            .map_err(|error| NvmeError::new(error.to_string()))?;
    }
    Ok(())
}

/// Undoes the steps of a failed attach. Leaves a connection alone that this attach did not make.
fn undo(root: &Root, held: Held, error: NvmeError) -> NvmeError {
    let deleted = match &held.record.controller {
        Some(name) => Controller::new(root, name).delete(),
        None => Ok(()),
    };
    match deleted.and_then(|()| held.remove()) {
        Ok(()) => error,
        Err(left) => NvmeError { why: format!("{}; and {left}", error.why), ..error },
    }
}

/// Detaches a subsystem: turns swap off through `off`, disconnects and removes the record. Parts
/// that are gone already are no error.
///
/// If memory runs out during swapoff, the kernel kills the calling process first. A process that
/// must survive therefore lets another process do it in `off`.
///
/// # Errors
/// Fails if the swapped-out pages do not fit into memory, or if the device is otherwise in use.
/// Also fails if swapped-out pages are on a lender that does not answer, unless `force` gives them
/// up. The subsystem then stays attached.
pub fn detach(
    root: &Root,
    state: &Path,
    id: VolumeId,
    force: bool,
    off: impl FnOnce(&Path) -> Result<(), SwapError>,
) -> Result<(), NvmeError> {
    let held = Held::take(state, id)?;
    let Record { uri, host, .. } = &held.record;
    let controllers = Controller::find(root, &uri.nqn, &host.nqn)?;
    // The device name in the record is not reliable: once the controller is gone, the kernel may
    // reuse that name.
    if let Some(device) =
        controllers.iter().find_map(|controller| controller.device().ok().flatten())
    {
        swap_off(&device, &controllers, force, off)?;
        exclusive::open(&root.path(&device)).map_err(|error| NvmeError::new(error.to_string()))?;
        if held.record.swap && answers(&controllers) {
            give_back(&device, held.record.capacity);
        }
    }
    controllers.iter().try_for_each(Controller::delete)?;
    held.remove()
}

fn swap_off(
    device: &Path,
    controllers: &[Controller],
    force: bool,
    off: impl FnOnce(&Path) -> Result<(), SwapError>,
) -> Result<(), NvmeError> {
    let used = swap::usage(device).map_err(NvmeError::io("cannot read /proc/swaps"))?;
    let Some(used) = used else { return Ok(()) };
    if used > Bytes::ZERO && !answers(controllers) && !force {
        let why = format!("the lender does not answer, and holds {used} of swapped-out pages");
        return Err(NvmeError::new(why)
            .help("wait for the lender to come back; --force discards these pages"));
    }
    swap::check_room(device)
        .and_then(|_| off(device))
        .map_err(|error| NvmeError::new(error.to_string()))
}

fn answers(controllers: &[Controller]) -> bool {
    controllers.iter().any(|controller| controller.state() == "live")
}

/// Discards the whole device, so that the lender frees its pages. The kernel itself discards swap
/// in large pieces and misses some. A lender that does not support discards refuses, which is
/// harmless.
fn give_back(device: &Path, capacity: Bytes) {
    let discarded =
        OpenOptions::new().write(true).open(device).and_then(|file| sys::discard(file, capacity.0));
    if let Err(error) = discarded {
        tracing::debug!(%error, "cannot discard the pages at the lender");
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn wish(swap: bool) -> Wish {
        Wish {
            id: VolumeId::random(),
            uri: "nvme+tcp://10.77.0.2:4420/nqn.2014-08.org.example:a".parse().unwrap(),
            host: HostIdentity {
                nqn: "nqn.2014-08.org.example:h".parse().unwrap(),
                id: "an-id".to_owned(),
            },
            options: Options::default(),
            swap,
            priority: Some(5),
            force: false,
            note: serde_json::Value::Null,
        }
    }

    fn put(root: &Root, path: &str, text: &str) {
        let path = root.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn a_connect_that_fails_leaves_no_record() {
        let dir = tempfile::tempdir().unwrap();
        let (root, state) = (Root::at(dir.path()), dir.path().join("state"));
        attach(&root, &state, &wish(false)).unwrap_err();
        assert_eq!(Record::all(&state).unwrap(), []);
    }

    #[test]
    fn swap_over_a_dangerous_network_is_refused_with_the_way_out() {
        let dir = tempfile::tempdir().unwrap();
        let (root, state) = (Root::at(dir.path()), dir.path().join("state"));
        put(&root, "/sys/class/net/eth0/mtu", "9000");
        put(&root, "/proc/sys/vm/min_free_kbytes", "1700");
        put(
            &root,
            "/proc/net/route",
            "head\neth0\t00000000\t00000000\t0001\t0\t0\t0\t00000000\t0\t0\t0\n",
        );
        let help = attach(&root, &state, &wish(true)).unwrap_err().help.unwrap();
        assert!(
            help.contains("sysctl vm.min_free_kbytes=16384") && help.contains("--force"),
            "{help}"
        );
        assert!(!attach(&root, &state, &wish(false)).unwrap_err().help.unwrap().contains("sysctl"));
    }

    #[test]
    fn leftovers_of_a_crash_are_found_by_name_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (root, state) = (Root::at(dir.path()), dir.path().join("state"));
        let Wish { id, uri, host, .. } = wish(false);
        let address = uri.resolve().unwrap();
        let record = Record {
            id,
            uri,
            address,
            host,
            swap: false,
            device: None,
            controller: None,
            capacity: Bytes::ZERO,
            note: serde_json::Value::Null,
        };
        let held = Held::new(&state, record.clone()).unwrap();
        let error = detach(&root, &state, id, false, |_| Ok(())).unwrap_err();
        assert!(error.why.contains("another process"), "{error}");
        drop(held);

        for (attribute, text) in
            [("subsysnqn", "nqn.2014-08.org.example:a"), ("hostnqn", "nqn.2014-08.org.example:h")]
        {
            put(&root, &format!("/sys/class/nvme/nvme3/{attribute}"), text);
        }
        // Imitates the kernel, which removes the controller on request.
        let kernel = root.path("/sys/class/nvme/nvme3");
        let order = kernel.join("delete_controller");
        let watcher = std::thread::spawn(move || {
            while !order.exists() {
                std::thread::yield_now();
            }
            fs::remove_dir_all(kernel).unwrap();
        });
        assert_eq!(Record::all(&state).unwrap(), [record]);
        detach(&root, &state, id, false, |_| Ok(())).unwrap();
        watcher.join().unwrap();
        assert_eq!(Record::all(&state).unwrap(), []);
    }
}
