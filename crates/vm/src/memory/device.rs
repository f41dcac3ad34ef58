//! The device by which a VM's memory is resized, by QEMU's monitor: virtio-mem (Virtual I/O Device
//! specification 1.2, section 5.15).

use std::path::Path;
use std::time::Duration;

use aquifer_page::Bytes;
use serde_json::{Value, json};

use crate::error::VmError;
use crate::qmp::Qmp;

/// Timeout of an answer of QEMU.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to the device.
#[derive(Debug)]
pub(super) struct Device {
    qmp: Qmp,
    pub(super) is: Known,
}

/// The properties of the device that do not change.
#[derive(Clone, Debug)]
pub(super) struct Known {
    /// QEMU's path of the device.
    path: String,
    /// The VM's memory without the device.
    pub(super) boot: Bytes,
    /// The VM's memory with all that the device can plug.
    pub(super) max: Bytes,
    /// The smallest step of a resize.
    pub(super) block: Bytes,
}

impl Device {
    /// Finds the device of the VM with this monitor. `timeout` is the timeout of each answer.
    ///
    /// # Errors
    /// [`VmError::Misuse`] if it has no such device, or several; others if QEMU does not answer.
    pub(super) fn find(monitor: &Path, timeout: Duration) -> Result<Self, VmError> {
        let mut qmp = Qmp::connect(monitor, timeout)?;
        let all = qmp.execute("query-memory-devices", json!({}))?;
        let all: Vec<_> = all.as_array().into_iter().flatten().collect();
        let resizable: Vec<_> =
            all.iter().filter(|device| device["type"] == "virtio-mem").collect();
        let [device] = resizable[..] else {
            let why = match resizable.len() {
                0 => {
                    "cannot resize the VM's memory, as it has no virtio-mem device: start the VM \
                     with 'aquifer vm start --max-memory'"
                }
                _ => "the VM has several virtio-mem devices: Aquifer resizes only VMs with one",
            };
            return Err(VmError::Misuse(why.to_owned()));
        };
        let data = &device["data"];
        let path = match data["id"].as_str() {
            Some(id) => format!("/machine/peripheral/{id}"),
            None => unnamed(&mut qmp)?,
        };
        let summary = qmp.execute("query-memory-size-summary", json!({}))?;
        let number = |value: &Value| Bytes(value.as_u64().unwrap_or(0));
        // Memory plugged by other devices counts as permanent.
        let plugged = number(&summary["plugged-memory"]).saturating_sub(number(&data["size"]));
        let boot = number(&summary["base-memory"]) + plugged;
        let max = boot + number(&data["max-size"]);
        Ok(Self { qmp, is: Known { path, boot, max, block: number(&data["block-size"]) } })
    }

    /// Connects to a device that was found before.
    ///
    /// # Errors
    /// [`VmError::Io`] if QEMU cannot be reached.
    pub(super) fn again(monitor: &Path, is: Known) -> Result<Self, VmError> {
        Ok(Self { qmp: Qmp::connect(monitor, TIMEOUT)?, is })
    }

    /// Returns the VM's current size.
    pub(super) fn size(&mut self) -> Result<Bytes, VmError> {
        let answer =
            self.qmp.execute("qom-get", json!({ "path": self.is.path, "property": "size" }))?;
        Ok(self.is.boot + Bytes(answer.as_u64().unwrap_or(0)))
    }

    /// Asks the guest to have this size.
    pub(super) fn request(&mut self, size: Bytes) -> Result<(), VmError> {
        let value = size.saturating_sub(self.is.boot).0;
        let set = json!({ "path": self.is.path, "property": "requested-size", "value": value });
        self.qmp.execute("qom-set", set).map(drop)
    }

    /// Repeats a request that the guest has not met: its driver retries only when the requested
    /// size changes.
    pub(super) fn request_again(&mut self, size: Bytes) -> Result<(), VmError> {
        let now = self.size()?;
        self.request(now)?;
        self.request(size)
    }

    /// Returns whether the vCPUs run.
    pub(super) fn runs(&mut self) -> Result<bool, VmError> {
        let status = self.qmp.execute("query-status", json!({}))?;
        Ok(status["running"].as_bool().unwrap_or(false))
    }

    /// Returns the monitor.
    pub(super) fn qmp(&mut self) -> &mut Qmp {
        &mut self.qmp
    }
}

fn unnamed(qmp: &mut Qmp) -> Result<String, VmError> {
    by_type(qmp, "child<virtio-mem-pci>")?.ok_or_else(|| {
        VmError::Misuse(
            "QEMU names no path of the VM's virtio-mem device: give the device an id".to_owned(),
        )
    })
}

/// Returns QEMU's path of the first device of this type.
pub(super) fn by_type(qmp: &mut Qmp, wanted: &str) -> Result<Option<String>, VmError> {
    for among in ["/machine/peripheral", "/machine/peripheral-anon"] {
        let all = qmp.execute("qom-list", json!({ "path": among }))?;
        let found = all.as_array().into_iter().flatten().find(|item| item["type"] == wanted);
        if let Some(name) = found.and_then(|item| item["name"].as_str()) {
            return Ok(Some(format!("{among}/{name}")));
        }
    }
    Ok(None)
}
