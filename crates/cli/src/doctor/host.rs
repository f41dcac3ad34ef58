//! The checks of the kernel, and of this process's rights.

use super::Check;

pub(super) fn checks() -> Vec<Check> {
    vec![root(), capability(), kernel()]
}

fn root() -> Check {
    if rustix::process::geteuid().is_root() {
        Check::ok("root", "running as root")
    } else {
        let found = format!("running as user {}", rustix::process::geteuid().as_raw());
        Check::missing(
            "root",
            found,
            "run as root: only root may manage swap, cgroups and block devices",
        )
        .essential()
    }
}

/// Checks CAP_SYS_RESOURCE, which containers and service managers most often take away from root.
fn capability() -> Check {
    const NAME: &str = "swap path";
    let has = rustix::thread::capabilities(None)
        .is_ok_and(|held| held.effective.contains(rustix::thread::CapabilitySet::SYS_RESOURCE));
    if has {
        return Check::ok(
            NAME,
            "processes that serve swap can be protected from the OOM killer and from deadlock",
        );
    }
    Check::warn(
        NAME,
        "without CAP_SYS_RESOURCE the OOM killer may kill processes that serve swap, \
         and they may deadlock by swapping to themselves",
        "run with CAP_SYS_RESOURCE (containers: --cap-add SYS_RESOURCE)",
    )
}

/// The oldest kernel with all calls of the device backends. LOOP_CONFIGURE came with 5.8; 5.10 is
/// the next release that is still maintained.
const OLDEST: (u32, u32) = (5, 10);

fn kernel() -> Check {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    match version(&release) {
        Some(version) if version >= OLDEST => Check::ok("kernel", format!("Linux {release}")),
        _ => {
            let found = format!("Linux {release} is older than {}.{}", OLDEST.0, OLDEST.1);
            Check::missing("kernel", found, "install a newer kernel").essential()
        }
    }
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_releases_of_every_distribution_are_understood() {
        for (release, expected) in [
            ("6.1.0-18-amd64", Some((6, 1))),
            ("5.10", Some((5, 10))),
            ("6.18.44-fc", Some((6, 18))),
            ("weird", None),
        ] {
            assert_eq!(version(release), expected, "{release}");
        }
    }
}
