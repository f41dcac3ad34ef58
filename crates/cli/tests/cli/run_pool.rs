//! Tests of `aquifer run` with memory in the pool: the place of its pages, and its messages about
//! lenders.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};

use aquifer_blockdev::swap::swaps;
use aquifer_store::tmpfs::stores;
use rustix::process::Signal;
use serde_json::Value;

use crate::agents::framework::{Answer, Cluster, Spec, lacks_rights, the_kernels_swap};
use crate::common::{Export, aquifer, lacks_cgroups, lacks_devices, serve, stderr, stdout};

/// Returns a run that swaps to `export`, with these words added, up to its command.
fn run(dir: &Path, export: &Export, words: &[&str]) -> Command {
    let mut run = aquifer(dir);
    run.args(["run", "--local", "24M", "--lender", export.uri()]).args(words).arg("--");
    run
}

/// Returns the devices of the volumes in a run directory.
fn devices(dir: &Path) -> Vec<PathBuf> {
    let files =
        fs::read_dir(dir.join("volumes")).into_iter().flatten().map(|entry| entry.unwrap().path());
    let records = files.filter(|path| path.extension().is_some_and(|it| it == "json"));
    let record = |path: PathBuf| serde_json::from_slice::<Value>(&fs::read(path).unwrap()).unwrap();
    records.map(|path| record(path)["device"].as_str().unwrap().into()).collect()
}

/// Returns the priority of the swap on a device.
fn priority(device: &Path) -> i32 {
    swaps().unwrap().into_iter().find(|swap| swap.path == device).unwrap().priority
}

/// Returns whether this test cannot run here: pages of its run would go to other swap, too.
fn lacks_priorities() -> bool {
    let lacks = swaps().unwrap().iter().any(|swap| swap.priority == 32_767);
    if lacks {
        eprintln!("skipped: this host has swap of the highest priority");
    }
    lacks
}

/// Takes the right to swap; `None` if this test cannot run here.
fn swap_of_its_own() -> Option<File> {
    if lacks_devices() || lacks_cgroups() {
        return None;
    }
    let swap = the_kernels_swap();
    (!lacks_priorities()).then_some(swap)
}

/// A run with a command that waits until the drop.
struct Waiting {
    child: Child,
    _input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Waiting {
    fn start(dir: &Path, export: &Export, words: &[&str]) -> Self {
        let mut run = run(dir, export, words);
        run.args(["sh", "-c", "echo ready; read end"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = run.spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, _input: input, output }
    }

    fn is_ready(&mut self) {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ = self._input.write_all(b"end\n");
        let _ = self.child.wait();
    }
}

/// Swap that belongs to no run; its drop removes it.
struct OtherSwap {
    dir: tempfile::TempDir,
    device: PathBuf,
    _export: Export,
}

impl OtherSwap {
    fn on(priority: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let export = serve(dir.path(), &["64M"]);
        let mut attach = aquifer(dir.path());
        attach.args(["volume", "attach", "--json", export.uri(), "--swap", "--priority", priority]);
        let output = attach.output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let attached: Value = serde_json::from_str(&stdout(&output)).unwrap();
        let device = attached["device"].as_str().unwrap().into();
        Self { dir, device, _export: export }
    }
}

impl Drop for OtherSwap {
    fn drop(&mut self) {
        let _ = aquifer(self.dir.path())
            .args(["volume", "detach", "--force"])
            .arg(&self.device)
            .output();
    }
}

#[test]
fn a_runs_swap_goes_before_all_other_swap() {
    let Some(_swap) = swap_of_its_own() else { return };
    let dir = tempfile::tempdir().unwrap();
    let [first, second] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let exports = [&first, &second].map(|dir| serve(dir.path(), &["64M"]));
    let other = OtherSwap::on("300");
    // Both runs choose at once.
    let mut runs = [0, 1].map(|number| Waiting::start(dir.path(), &exports[number], &[]));
    runs.iter_mut().for_each(Waiting::is_ready);
    let own: Vec<_> = devices(dir.path()).iter().map(|device| priority(device)).collect();
    assert_eq!(own.len(), 2);
    assert!(own[0] != own[1] && own.iter().all(|own| *own > priority(&other.device)), "{own:?}");
}

#[test]
fn a_run_refuses_to_share_with_swap_of_the_highest_priority() {
    if lacks_devices() || lacks_cgroups() {
        return;
    }
    let _swap = the_kernels_swap();
    let dir = tempfile::tempdir().unwrap();
    let served = tempfile::tempdir().unwrap();
    let export = serve(served.path(), &["64M"]);
    let other = OtherSwap::on("32767");
    let refused = run(dir.path(), &export, &[]).arg("true").output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    let (said, device) = (stderr(&refused), other.device.display().to_string());
    for word in [device.as_str(), "32767", "--priority", &format!("swapoff {device}")] {
        assert!(said.contains(word), "{word}: {said}");
    }
    assert_eq!(devices(dir.path()), [] as [PathBuf; 0]);

    let mut run = Waiting::start(dir.path(), &export, &["--priority", "7"]);
    run.is_ready();
    assert_eq!(priority(&devices(dir.path())[0]), 7);
}

#[test]
fn the_agent_swaps_at_the_priority_that_a_run_chose() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::that_swaps([Spec::new("a"), Spec::new("b")]);
    let words = [
        "run",
        "--local",
        "24M",
        "--remote",
        "64M",
        "--priority",
        "50",
        "--",
        "cat",
        "/proc/swaps",
    ];
    let said = Answer::of(&mut cluster["a"].aquifer(&words)).stdout;
    let priorities: Vec<_> =
        said.lines().filter_map(|line| line.split_whitespace().last()).collect();
    assert!(priorities.contains(&"50"), "{said}");
}

/// A program that fills memory, most of which is then swapped out. It touches all of it for each
/// line that it reads.
const TOUCH_SCRIPT: &str = "
import sys
pages = bytearray(72 << 20)
for at in range(0, len(pages), 4096):
    pages[at] = 1 + at // 4096 % 255
print('ready', flush=True)
for line in sys.stdin:
    assert all(pages[at] == 1 + at // 4096 % 255 for at in range(0, len(pages), 4096))
    print('touched', flush=True)
";

/// A run of [`TOUCH_SCRIPT`], and aquifer's messages about it.
struct Touching {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    said: BufReader<ChildStderr>,
    so_far: String,
}

impl Touching {
    fn start(mut run: Command) -> Self {
        run.args(["python3", "-c", TOUCH_SCRIPT]);
        run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = run.spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let said = BufReader::new(child.stderr.take().unwrap());
        let mut touching = Self { child, input, output, said, so_far: String::new() };
        touching.prints("ready");
        touching
    }

    #[track_caller]
    fn prints(&mut self, word: &str) {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), word, "{}", self.so_far);
    }

    fn order(&mut self) {
        writeln!(self.input).unwrap();
    }

    /// Waits for a line that has one of these words.
    #[track_caller]
    fn says(&mut self, words: &[&str]) {
        loop {
            let mut line = String::new();
            let length = self.said.read_line(&mut line).unwrap();
            self.so_far.push_str(&line);
            assert_ne!(length, 0, "{words:?}: {}", self.so_far);
            if words.iter().any(|word| line.contains(word)) {
                return;
            }
        }
    }

    /// Waits for its end; returns the exit code and all messages of aquifer.
    fn end(mut self) -> (Option<i32>, String) {
        drop(self.input);
        std::io::Read::read_to_string(&mut self.said, &mut self.so_far).unwrap();
        (self.child.wait().unwrap().code(), self.so_far)
    }
}

#[test]
fn a_run_tells_of_a_lender_that_is_lost_and_of_its_pages() {
    let Some(_swap) = swap_of_its_own() else { return };
    let [dir, served] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let mut export = serve(served.path(), &["128M"]);
    let mut touching = Touching::start(run(dir.path(), &export, &["--json"]));
    touching.order();
    touching.prints("touched");
    export.end(Signal::KILL).unwrap();
    touching.order();
    let (code, said) = touching.end();
    assert_eq!(code, Some(125), "{said}");
    let lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for event in ["lender_lost", "page_lost"] {
        assert_eq!(
            lines.iter().filter(|line| line["event"]["event"] == event).count(),
            1,
            "{said}"
        );
    }
    let failure = &lines.last().unwrap()["error"];
    assert!(failure["why"].as_str().unwrap().contains("SIGBUS"), "{said}");
}

#[test]
fn a_run_tells_of_a_lender_that_is_away_and_back() {
    let Some(_swap) = swap_of_its_own() else { return };
    let [dir, served] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let pages = tempfile::tempdir_in(stores().unwrap()).unwrap();
    let socket = format!("unix:{}", served.path().join("lender").display());
    let words = ["128M", "--nbd", &socket, "--dir", pages.path().to_str().unwrap()];
    let mut export = serve(served.path(), &words);
    let mut touching = Touching::start(run(dir.path(), &export, &["--io-timeout", "forever"]));
    export.end(Signal::KILL).unwrap();
    touching.order();
    touching.says(&["pages unreachable: "]);
    let _back = serve(served.path(), &words);
    touching.says(&["pages reachable: "]);
    touching.prints("touched");
    let (code, said) = touching.end();
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn a_run_tells_of_the_agents_lenders_too() {
    if lacks_rights() || lacks_devices() {
        return;
    }
    let a = Spec::new("a").set("borrow", "io_timeout", "2s");
    let cluster = Cluster::that_swaps([a, Spec::new("b")]);
    let words = ["run", "--local", "24M", "--remote", "128M", "--priority", "32767", "--"];
    let mut touching = Touching::start(cluster["a"].aquifer(&words));
    cluster["b"].kill_agent();
    touching.order();
    touching.says(&["lender lost: b, lease "]);
    touching.says(&["page lost: "]);
    let (code, said) = touching.end();
    assert_eq!(code, Some(125), "{said}");
}
