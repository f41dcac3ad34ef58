//! The names that a shell completes: of VMs, regions, groups, volumes, peers and lenders.

use std::collections::BTreeSet;
use std::env;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use aquifer_agent::config::{Config, PeerConfig};
use aquifer_blockdev::nvme::initiator::Record;
use aquifer_blockdev::process::client as volumes;
use aquifer_group::Agreements;
use aquifer_nbd::Uri;
use aquifer_region::process::client as regions;
use aquifer_transport::Address;
use aquifer_vm::definition::Definitions;
use aquifer_vm::process::client as vms;
use clap::Arg;
use clap_complete::{ArgValueCandidates, CompletionCandidate};

use super::group::{GROUPS, GROUPS_VARIABLE};
use super::serve::CONFIG;
use super::vm::{VM_DIR, VM_DIR_VARIABLE};
use super::{RUN_DIR, RUN_DIR_VARIABLE};

/// Finds names of this host; finds none where this user may not look.
type Find = fn() -> Vec<String>;

/// Lets shells complete the argument of the command that `words` name, if its value is a name.
pub(super) fn completed(argument: Arg, words: &[&str]) -> Arg {
    let Some(find) = source(words, argument.get_id().as_str()) else { return argument };
    let candidates = move || find().into_iter().map(CompletionCandidate::new).collect();
    argument.add(ArgValueCandidates::new(candidates))
}

fn source(words: &[&str], argument: &str) -> Option<Find> {
    let find: Find = match (words, argument) {
        // These make a new name.
        (["vm", "adopt"] | [_, "create"], "name") => return None,
        (["vm", _], "name") => all_vms,
        (["region", _], "name") | (_, "heap") => all_regions,
        (["group" | "serve", _], "name") | (_, "group") => all_groups,
        (["volume", "detach"], "which") => attached,
        (["host", "return"], "volume") => all_volumes,
        (["volume", "attach"], "uris") | (_, "lender" | "lenders") => lenders,
        (["vm", "migrate"], "to") | (_, "lender_host") => peer_names,
        (["why"], "name") => hosts_and_vms,
        _ => return None,
    };
    Some(find)
}

/// Returns the value that the line under completion gives an option, else that of the variable. The
/// words of that line are the last arguments of this process.
fn given(option: &str, variable: &str, default: &str) -> PathBuf {
    let words: Vec<OsString> = env::args_os().collect();
    let value = words.windows(2).rfind(|pair| pair[0] == option).map(|pair| pair[1].clone());
    let value = value.or_else(|| env::var_os(variable)).filter(|value| !value.is_empty());
    value.unwrap_or_else(|| OsStr::new(default).to_owned()).into()
}

fn run_dir() -> PathBuf {
    given("--run-dir", RUN_DIR_VARIABLE, RUN_DIR)
}

fn all_vms() -> Vec<String> {
    let all = vms::list(&run_dir()).unwrap_or_default();
    let defined = Definitions::of(&given("--vm-dir", VM_DIR_VARIABLE, VM_DIR)).names();
    let names = all.iter().map(|files| files.name().clone());
    let names: BTreeSet<_> = names.chain(defined.unwrap_or_default()).collect();
    names.iter().map(ToString::to_string).collect()
}

fn all_regions() -> Vec<String> {
    let all = regions::list(&run_dir().join("regions")).unwrap_or_default();
    all.iter().map(|files| files.name().to_string()).collect()
}

fn all_groups() -> Vec<String> {
    let all = Agreements::of(&given("--groups", GROUPS_VARIABLE, GROUPS)).each();
    all.unwrap_or_default().iter().map(|(name, _)| name.to_string()).collect()
}

fn all_volumes() -> Vec<String> {
    let all = volumes::list(&run_dir()).unwrap_or_default();
    all.iter().map(ToString::to_string).collect()
}

/// Returns the devices of all volumes, and the ids of those without a device.
fn attached() -> Vec<String> {
    let run_dir = run_dir();
    let served = volumes::list(&run_dir).unwrap_or_default().into_iter().map(|id| {
        volumes::record(&run_dir, id)
            .map_or_else(|_| id.to_string(), |record| record.device.display().to_string())
    });
    let direct = Record::all(&run_dir).unwrap_or_default().into_iter();
    let direct = direct.map(|record| {
        record.device.map_or_else(|| record.id.to_string(), |path| path.display().to_string())
    });
    served.chain(direct).collect()
}

fn peers(config: &Path) -> Vec<PeerConfig> {
    Config::load(config).map_or_else(|_| Vec::new(), |config| config.peers)
}

fn peer_names() -> Vec<String> {
    peers(Path::new(CONFIG)).into_iter().map(|peer| peer.name.to_string()).collect()
}

fn hosts_and_vms() -> Vec<String> {
    peer_names().into_iter().chain(all_vms()).collect()
}

/// Returns the default URI of an export on each peer, and of the one on this host.
fn lenders() -> Vec<String> {
    let socket = run_dir().join("export.sock");
    let here = socket.exists().then(|| {
        let address = Address::Unix(socket);
        Uri { secure: false, address, export: String::new() }.to_string()
    });
    here.into_iter().chain(exports(&peers(Path::new(CONFIG)))).collect()
}

fn exports(peers: &[PeerConfig]) -> Vec<String> {
    let host = |peer: &PeerConfig| {
        peer.address.rsplit_once(':').map(|(host, _)| format!("nbds://{host}/"))
    };
    peers.iter().filter_map(host).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_offered_as_lenders() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("agent.toml");
        let text = "host = 'a'\n[[peer]]\nname = 'b'\naddress = 'b.example:7070'\n\
                    [[peer]]\nname = 'c'\naddress = '[2001:db8::1]:7070'\n";
        std::fs::write(&config, text).unwrap();
        assert_eq!(exports(&peers(&config)), ["nbds://b.example/", "nbds://[2001:db8::1]/"]);
        assert_eq!(exports(&peers(dir.path())), [""; 0]);
    }

    #[test]
    fn every_name_of_a_known_thing_can_be_completed() {
        let is_completed = |line: &str, argument: &str| {
            source(&line.split(' ').collect::<Vec<_>>(), argument).is_some()
        };
        for line in ["vm show", "region rm", "group set", "serve dedup", "serve disk-cache"] {
            assert!(is_completed(line, "name"), "{line}");
        }
        for line in ["vm create", "vm adopt", "region create", "group create", "run"] {
            assert!(!is_completed(line, "name"), "{line}");
        }
    }
}
