//! Tests of `aquifer volume attach`, `detach` and `run --lender` as programs, over real exports.

mod copies;

use std::fs::{self, OpenOptions};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use aquifer_cli::cgroup::Hierarchy;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::{
    Export, aquifer, done, init_two, lacks_cgroups, lacks_devices, serve, stderr, stdout,
    wait_until,
};

/// A run directory; its drop detaches all volumes in it.
struct Dir(tempfile::TempDir);

impl Dir {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Runs `aquifer` with these words to its end.
    fn aquifer(&self, words: &[&str]) -> Output {
        aquifer(self.path()).args(words).output().unwrap()
    }

    /// Runs `aquifer volume attach`, which must succeed.
    fn attach(&self, words: &[&str]) -> Value {
        done(self.path(), &[&["volume", "attach"], words].concat())
    }

    /// Returns the files of volumes that are left.
    fn volumes(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.path().join("volumes")).into_iter().flatten();
        entries.map(|entry| entry.unwrap().path()).collect()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let records = self
            .volumes()
            .into_iter()
            .filter(|path| path.extension().is_some_and(|it| it == "json"));
        for record in records {
            let id = record.file_stem().unwrap().to_string_lossy().into_owned();
            let _ = aquifer(self.path()).args(["volume", "detach", "--force", &id]).output();
        }
    }
}

fn swaps() -> String {
    fs::read_to_string("/proc/swaps").unwrap()
}

fn device(attached: &Value) -> &str {
    attached["device"].as_str().unwrap()
}

#[test]
fn a_device_returns_its_data_and_detaching_frees_it() {
    if lacks_devices() {
        return;
    }
    // Dropped in reverse order: volumes before their exports.
    let served = tempfile::tempdir().unwrap();
    let export = serve(served.path(), &["130M"]);
    let dir = Dir::new();
    let attached = dir.attach(&[export.uri()]);
    assert_eq!(attached["capacity"], 128 << 20, "the capacity must be whole extents");
    assert_eq!(attached["swap"], false);

    assert_device_keeps_data(device(&attached), 65 << 20);

    let output = dir.aquifer(&["volume", "detach", device(&attached)]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(dir.volumes(), [] as [PathBuf; 0]);
    assert_eq!(stored(&export), 0, "the lender must have its memory back");
}

/// Asserts that data written to the device at an offset is read back from there.
fn assert_device_keeps_data(device: &str, offset: u64) {
    let block = OpenOptions::new().read(true).write(true).open(device).unwrap();
    let pattern: Vec<u8> = (0..3 << 20).map(|n: u32| (n * 7 / 3) as u8).collect();
    block.write_all_at(&pattern, offset).unwrap();
    block.sync_all().unwrap();
    let mut back = vec![0; pattern.len()];
    block.read_exact_at(&mut back, offset).unwrap();
    assert!(back == pattern);
}

/// Returns the bytes for which the export needs memory.
fn stored(export: &Export) -> u64 {
    let output = Command::new("nbdinfo")
        .args(["--map", "--totals", "--json", export.uri()])
        .output()
        .unwrap();
    let kinds: Vec<Value> = serde_json::from_str(&stdout(&output)).unwrap();
    kinds.iter().filter(|kind| kind["type"] == 0).map(|kind| kind["size"].as_u64().unwrap()).sum()
}

#[test]
fn a_host_with_the_secret_uses_a_namespace_like_an_export() {
    if lacks_devices() {
        return;
    }
    const SECRET: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
    const HOST: &str = "nqn.2014-08.org.example:host";
    let served = tempfile::tempdir().unwrap();
    let secret = served.path().join("secret");
    // The second line is the lender's secret.
    fs::write(&secret, format!("{SECRET}\n{SECRET}\n")).unwrap();
    let secret = secret.to_str().unwrap();
    let words = ["130M", "--nvme", "127.0.0.1:0", "--allow-host", HOST, "--dhchap-secret", secret];
    let export = serve(served.path(), &words);
    let (address, nqn) = (&export.ready["nvme"]["addresses"][0], &export.ready["nvme"]["nqn"]);
    let uri = format!("nvme+tcp://{}/{}", address.as_str().unwrap(), nqn.as_str().unwrap());
    let dir = Dir::new();
    let output = dir.aquifer(&["volume", "attach", &uri, "--host-nqn", HOST]);
    assert!(stderr(&output).contains("authentication failed"), "{}", stderr(&output));
    let output = dir.aquifer(&[
        "volume",
        "attach",
        &uri,
        "--dhchap-secret",
        secret,
        "--host-nqn",
        "nqn.2014-08.org.example:other",
    ]);
    assert!(stderr(&output).contains("is not allowed to use it"), "{}", stderr(&output));
    let trust = [&uri, "--dhchap-secret", secret, "--host-nqn", HOST];
    let attached = dir.attach(&trust);
    assert_eq!(attached["capacity"], 128 << 20, "the capacity must be whole extents");
    assert_device_keeps_data(device(&attached), 63 << 20);
    let output = dir.aquifer(&[&["volume", "attach"], &trust[..]].concat());
    assert!(
        stderr(&output).contains("a volume of 'aquifer volume attach' on "),
        "{}",
        stderr(&output)
    );
    let output = dir.aquifer(&["volume", "detach", device(&attached)]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(dir.volumes(), [] as [PathBuf; 0]);
}

#[test]
fn swap_goes_on_and_off_with_it() {
    if lacks_devices() {
        return;
    }
    let served = tempfile::tempdir().unwrap();
    let export = serve(served.path(), &["64M"]);
    let dir = Dir::new();
    // The lowest priority, so that no other test of this machine swaps to it first.
    let attached = dir.attach(&[export.uri(), "--swap", "--priority", "0"]);
    assert!(swaps().contains(device(&attached)));
    let output = dir.aquifer(&["volume", "detach", "--all", "--json"]);
    let answer: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(answer["detached"][0], attached["volume"]);
    assert_eq!(dir.volumes(), [] as [PathBuf; 0]);
}

#[test]
fn an_export_serves_one_volume_only() {
    if lacks_devices() || lacks_cgroups() {
        return;
    }
    let served = tempfile::tempdir().unwrap();
    let export = serve(served.path(), &["64M"]);
    serves_one_volume_only(export.uri());
    drop(export);
    let export = serve(served.path(), &["64M", "--nvme", "127.0.0.1:0"]);
    serves_one_volume_only(export.ready["nvme"]["uris"][0].as_str().unwrap());
}

fn serves_one_volume_only(uri: &str) {
    let dir = Dir::new();
    dir.attach(&[uri]);
    // For any use, and also on another host, which does not know the first volume.
    let other = Dir::new();
    for words in [
        &["volume", "attach", uri][..],
        &["run", "--local", "64M", "--priority", "100", "--lender", uri, "--", "true"],
        &["region", "create", "one", "--size", "32M", "--cache", "8M", "--lender", uri],
    ] {
        for dir in [&dir, &other] {
            let output = dir.aquifer(words);
            let (status, said) = (output.status.code(), stderr(&output));
            assert!(
                status != Some(0) && said.contains("a volume of 'aquifer volume attach' on "),
                "{words:?}: {said}"
            );
            assert!(said.contains("--take-over"), "{said}");
        }
    }
    let detached = dir.aquifer(&["volume", "detach", "--all"]);
    assert!(detached.status.success(), "{}", stderr(&detached));
    other.attach(&[uri]);
    let taken = dir.attach(&[uri, "--take-over"]);
    assert!(Path::new(device(&taken)).exists(), "{taken}");
}

#[test]
fn leftovers_of_a_killed_volume_are_removed() {
    if lacks_devices() {
        return;
    }
    let served = tempfile::tempdir().unwrap();
    let export = serve(served.path(), &["64M"]);
    let dir = Dir::new();
    let attached = dir.attach(&[export.uri()]);
    let pid = Pid::from_raw(attached["pid"].as_i64().unwrap().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    wait_until("the killed volume is detached", || {
        dir.aquifer(&["volume", "detach", device(&attached)]).status.success()
    });
    wait_until("the killed volume's files are gone", || {
        dir.volumes().iter().all(|path| path.extension().unwrap() == "log")
    });
    dir.attach(&[export.uri()]);
}

#[test]
fn tls_admits_the_cluster_and_nobody_else() {
    if lacks_devices() {
        return;
    }
    let served = tempfile::tempdir().unwrap();
    for cluster in ["cluster", "other"] {
        init_two(&served.path().join(cluster));
    }
    let tls = |host: &str| served.path().join(host).join("tls").to_str().unwrap().to_owned();
    let export = serve(served.path(), &["64M", "--nbd", "127.0.0.1:0", "--tls", &tls("cluster/a")]);
    let dir = Dir::new();
    for (identity, lender, why) in [
        ("other/b", "a", "using nbds://"),
        ("cluster/b", "b", "using nbds://"),
        ("nowhere", "a", "nowhere"),
    ] {
        let output = dir.aquifer(&[
            "volume",
            "attach",
            export.uri(),
            "--tls",
            &tls(identity),
            "--lender-host",
            lender,
        ]);
        assert_eq!(output.status.code(), Some(1), "{identity} to {lender}");
        assert!(stderr(&output).contains(why), "{}", stderr(&output));
    }
    let plain = export.uri().replacen("nbds", "nbd", 1);
    assert_eq!(dir.aquifer(&["volume", "attach", &plain]).status.code(), Some(1));
    dir.attach(&[export.uri(), "--tls", &tls("cluster/b"), "--lender-host", "a"]);
}

#[test]
fn a_failed_attach_or_detach_names_its_cause() {
    if lacks_devices() {
        return;
    }
    let served = tempfile::tempdir().unwrap();
    let export = serve(served.path(), &["63M"]);
    let dir = Dir::new();
    for (words, why) in [
        (&["volume", "attach", export.uri()] as &[&str], "63MiB is less than one extent"),
        (&["volume", "attach", "nbd+unix:///?socket=/nowhere"], "nbd+unix:///?socket=/nowhere"),
        (&["volume", "attach", "nbd+unix:///?socket=/nowhere", "--tls", "/"], "--tls is for nbds"),
        (&["volume", "detach", "/dev/nowhere"], "there is no such volume"),
    ] {
        let output = dir.aquifer(words);
        assert_eq!(output.status.code(), Some(1), "{words:?}");
        assert!(stderr(&output).contains(why), "{words:?}: {}", stderr(&output));
    }
    for words in [
        &["volume", "detach"] as &[&str],
        &["volume", "attach", "http://x/"],
        &["volume", "attach", "nbd://x/", "--backend", "floppy"],
        // The kernel's initiator could not take it from its owner.
        &["volume", "attach", "nvme+tcp://x/nqn.x", "--direct", "--take-over"],
    ] {
        assert_eq!(dir.aquifer(words).status.code(), Some(2), "{words:?}");
    }
}

#[test]
fn a_command_runs_with_two_thirds_of_its_memory_at_the_lender() {
    if lacks_devices() || lacks_cgroups() {
        return;
    }
    let served = tempfile::tempdir().unwrap();
    let export = serve(served.path(), &["128M"]);
    let dir = Dir::new();
    let load = [env!("CARGO_BIN_EXE_aquifer"), "load", "--bytes", "72M"];
    let mut run = aquifer(dir.path());
    run.args(["run", "--local", "24M", "--priority", "100", "--lender", export.uri(), "--"])
        .args(load);
    let output = run.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let verdict: Value = serde_json::from_str(stdout(&output).lines().last().unwrap()).unwrap();
    assert_eq!((&verdict["pages_verified"], &verdict["pages_lost"]), (&18432.into(), &0.into()));
    assert_eq!(dir.volumes(), [] as [PathBuf; 0]);
}

#[test]
fn a_killed_runs_swap_is_taken_away_by_the_next_run() {
    if lacks_devices() || lacks_cgroups() {
        return;
    }
    let served = tempfile::tempdir().unwrap();
    let export = serve(served.path(), &["64M"]);
    let dir = Dir::new();
    let mut run = aquifer(dir.path());
    run.args([
        "run",
        "--local",
        "24M",
        "--priority",
        "100",
        "--lender",
        export.uri(),
        "--",
        "sh",
        "-c",
        "echo ready; sleep 600",
    ]);
    let mut run = run.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(run.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    let cgroup = Hierarchy::find().unwrap().root().join(format!("aquifer-run-{}", run.id()));
    run.kill().unwrap();
    run.wait().unwrap();
    assert!(cgroup.exists() && !dir.volumes().is_empty());

    let output = dir.aquifer(&["run", "--local", "24M", "--remote", "0", "--", "true"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!cgroup.exists());
    assert_eq!(dir.volumes(), [] as [PathBuf; 0]);
}
