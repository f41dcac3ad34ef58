//! The checks of the ways in which a volume can become a block device here.

use aquifer_blockdev::BackendKind;
use aquifer_blockdev::backend::{Probe, choose, probe};

use super::Check;

pub(super) fn checks() -> Vec<Check> {
    let mut checks = vec![chosen()];
    checks.extend(probe().into_iter().map(backend));
    checks
}

fn chosen() -> Check {
    const NAME: &str = "block device";
    match choose(BackendKind::Auto) {
        Ok(backend) => Check::ok(NAME, format!("{} would be used", backend.kind())),
        Err(error) => {
            let help = "load FUSE and loop, the nbd module, or the ublk_drv module";
            Check::missing(NAME, error.to_string(), help).essential()
        }
    }
}

/// Checks one backend; it is never essential by itself, as there may be others.
fn backend(probe: Probe) -> Check {
    let name = format!("backend {}", probe.kind);
    match probe.missing {
        None => Check::ok(name, "can be used"),
        Some(missing) => {
            let (found, help) =
                missing.split_once("; ").unwrap_or((&missing, "no remedy is known"));
            Check::missing(name, found, help)
        }
    }
}
