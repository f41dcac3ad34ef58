//! The check whether lending can leave room on the network for the host's own programs.

use aquifer_procfs::link_speed;

use super::Check;

pub(super) fn check() -> Check {
    let interfaces = std::fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
    let names = interfaces.filter_map(|entry| entry.file_name().into_string().ok());
    let up = |name: &String| {
        name != "lo"
            && super::read(&format!("/sys/class/net/{name}/operstate")).as_deref() == Some("up")
    };
    let speed = |name: String| {
        let speed = super::read(&format!("/sys/class/net/{name}/speed"));
        (speed.and_then(|speed| link_speed(&speed)).is_some(), name)
    };
    of(names.filter(up).map(speed).collect())
}

/// Makes the check of the interfaces that are up, each with whether its speed is known.
fn of(mut interfaces: Vec<(bool, String)>) -> Check {
    const NAME: &str = "network share";
    interfaces.sort();
    let names = |known: bool| {
        let of_kind = interfaces.iter().filter(|(is_known, _)| *is_known == known);
        of_kind.map(|(_, name)| name.as_str()).collect::<Vec<_>>().join(", ")
    };
    match (names(true), names(false)) {
        (known, unknown) if unknown.is_empty() => {
            let which = if known.is_empty() { "no interface is up".to_owned() } else { known };
            Check::ok(NAME, format!("lending can follow the load of every link: {which}"))
        }
        (_, unknown) => Check::warn(
            NAME,
            format!(
                "the speed of {unknown} is unknown: lending over it cannot leave room for this \
                 host's own traffic"
            ),
            "if the network is a bottleneck, set host_bytes in [lend.limits]",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;

    #[test]
    fn an_interface_without_a_speed_is_named() {
        let check = of(vec![(true, "eth0".to_owned()), (false, "ens3".to_owned())]);
        assert_eq!(check.verdict, Verdict::Warn);
        assert!(check.found.contains("ens3") && !check.found.contains("eth0"), "{check:?}");
        assert_eq!(of(vec![(true, "eth0".to_owned())]).verdict, Verdict::Ok);
        assert_eq!(of(Vec::new()).verdict, Verdict::Ok);
    }
}
