//! `aquifer region` as a program, with unmodified programs that map regions.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

use common::{Export, aquifer, eventually, stderr, stdout};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Maps the region, and does what it is told: `write SEED` all pages, `check SEED`, `punch FIRST COUNT`, `zero FIRST COUNT`, `fork`,
/// `direct SEED`: a disk reads all pages into the region, while another thread has pages leave.
/// One page of 64 is all zeroes. Pages are visited by chance.
const PROGRAM: &str = r#"
import ctypes, mmap, os, random, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open(sys.argv[1], os.O_RDWR)
size = os.fstat(fd).st_size
memory = mmap.mmap(fd, size, mmap.MAP_SHARED)
pages = list(range(size // 4096))
def content(seed, page):
    return bytes(4096) if page % 64 == 7 else (b"%08d %08d." % (seed, page) * 256)[:4096]
print("ready", flush=True)
for line in sys.stdin:
    order, *numbers = line.split()
    numbers = [int(number) for number in numbers]
    wrong = 0
    random.shuffle(pages)
    if order == "write":
        for page in pages:
            memory[page * 4096:page * 4096 + 4096] = content(numbers[0], page)
    elif order == "check":
        wrong = sum(memory[page * 4096:page * 4096 + 4096] != content(numbers[0], page) for page in pages)
    elif order == "punch":
        first, count = numbers
        call = libc.fallocate64
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        wrong = call(fd, 3, first * 4096, count * 4096)
    elif order == "zero":
        first, count = numbers
        wrong = sum(memory[page * 4096:page * 4096 + 4096] != bytes(4096) for page in range(first, first + count))
    elif order == "direct":
        with open(sys.argv[2], "wb") as disk:
            for page in range(len(pages)):
                disk.write(content(numbers[0], page))
        disk = os.open(sys.argv[2], os.O_RDONLY | os.O_DIRECT)
        reading = True
        def touch():
            while reading:
                memory[random.randrange(len(pages)) * 4096]
        toucher = threading.Thread(target=touch)
        toucher.start()
        view = memoryview(memory)
        for first in range(0, len(pages), 32):
            os.preadv(disk, [view[first * 4096:(first + 32) * 4096]], first * 4096)
        view.release()
        reading = False
        toucher.join()
    elif order == "fork":
        child = os.fork()
        if child == 0:
            try:
                memory[0]
            finally:
                os._exit(0)
        wrong = 0 if os.WIFSIGNALED(os.waitpid(child, 0)[1]) else 1
    print(order, wrong, flush=True)
"#;

/// Allocates, checks and frees, without knowing of regions: `fill`, `check`, `free` (of all but every other block), `child`, `fork`.
const HEAP_PROGRAM: &str = r#"
import hashlib, os, subprocess, sys, threading
def content(number):
    return hashlib.sha256(b"%d" % number).digest() * (number % 600)
blocks = []
print("ready", flush=True)
for line in sys.stdin:
    order, wrong = line.strip(), 0
    if order == "fill":
        threads = [threading.Thread(target=lambda: blocks.extend([(number, content(number)) for number in range(500)])) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    elif order == "check":
        wrong = sum(block != content(number) for number, block in blocks)
    elif order == "free":
        blocks = blocks[::2]
    elif order == "child":
        child = subprocess.run(["/usr/bin/python3", "-c", "print(len([0] * 3000000))"], stdout=subprocess.PIPE)
        wrong = int(child.stdout != b"3000000\n")
    elif order == "fork":
        try:
            wrong = os.fork() + 1
        except OSError:
            pass
    print(order, wrong, flush=True)
"#;

/// A lender, and a directory in which regions are made; all of them are gone at the end.
struct Setting {
    dir: tempfile::TempDir,
    lender: Export,
}

struct Program {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

fn lacks_regions() -> bool {
    let lacks = !rustix::process::geteuid().is_root();
    if lacks {
        eprintln!("skipped: needs root");
    }
    lacks
}

impl Setting {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = format!("unix:{}", dir.path().join("lender").display());
        let lender = Export::start(dir.path(), &["128M", "--nbd", &socket]);
        Self { dir, lender }
    }

    fn aquifer(&self, words: &[&str]) -> Output {
        aquifer(self.dir.path()).args(words).output().unwrap()
    }

    /// A command that works; what it answers.
    fn done(&self, words: &[&str]) -> Value {
        let output = self.aquifer(&[&["--json"], words].concat());
        assert!(output.status.success(), "{words:?}: {}", stderr(&output));
        serde_json::from_str(&stdout(&output)).unwrap()
    }

    fn create(&self, name: &str, more: &[&str]) -> PathBuf {
        let words =
            ["region", "create", name, "--size", "32M", "--cache", "8M", "--lender", self.lender.uri()];
        let created = self.done(&[&words, more].concat());
        PathBuf::from(created["file"].as_str().unwrap())
    }

    fn show(&self, name: &str) -> Value {
        self.done(&["region", "show", name])
    }

    fn start(&self, region: &Path) -> Program {
        let disk = self.dir.path().join("disk");
        let words = ["--", "python3", "-c", PROGRAM, region.to_str().unwrap(), disk.to_str().unwrap()];
        self.exec(&words)
    }

    fn exec(&self, words: &[&str]) -> Program {
        let mut child = aquifer(self.dir.path())
            .args(["region", "exec"])
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (orders, answers) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut program = Program { child, orders, answers };
        assert_eq!(program.answer(), "ready");
        program
    }

    fn mounts(&self) -> usize {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        mounts.lines().filter(|line| line.contains(self.dir.path().to_str().unwrap())).count()
    }

    /// Removes all regions that are left. False if that could not be.
    fn removes_all(&self) -> bool {
        let list = self.aquifer(&["--json", "region", "list"]);
        let list: Value = serde_json::from_slice(&list.stdout).unwrap_or_default();
        let mut regions = list.as_array().into_iter().flatten();
        let removed = |region: &Value| self.aquifer(&["region", "rm", region["name"].as_str().unwrap()]);
        regions.all(|region| removed(region).status.success()) && self.mounts() == 0
    }

    fn remove(&self, name: &str) {
        eventually("nobody maps it", || self.show(name)["programs"].as_array().unwrap().is_empty());
        self.done(&["region", "rm", name]);
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        // That a program is gone is noticed after a moment.
        let removed = (0..500).any(|_| {
            self.removes_all() || {
                sleep(Duration::from_millis(20));
                false
            }
        });
        assert!(removed || std::thread::panicking(), "regions are left in {}", self.dir.path().display());
    }
}

impl Program {
    fn order(&mut self, order: &str) {
        writeln!(self.orders, "{order}").unwrap();
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// What it does without finding anything wrong.
    fn does(&mut self, order: &str) {
        self.order(order);
        let name = order.split(' ').next().unwrap();
        assert_eq!(self.answer(), format!("{name} 0"), "{order}");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn kill(pid: &Value) {
    kill_process(Pid::from_raw(pid.as_i64().unwrap() as i32).unwrap(), Signal::KILL).unwrap();
}

#[test]
fn an_unmodified_program_has_its_memory_in_the_pool() {
    if lacks_regions() {
        return;
    }
    let setting = Setting::new();
    let region = setting.create("one", &[]);
    let mut program = setting.start(&region);
    program.does("write 1");
    program.does("check 1");
    let status = setting.show("one");
    let bytes = |of: &str| status["usage"][of].as_u64().unwrap();
    assert!(bytes("resident") <= 8 << 20 && bytes("remote") > 20 << 20, "{status}");
    assert!(status["programs"][0].as_str().unwrap().starts_with("python3"), "{status}");
    assert!(status["counts"]["remote_faults"].as_u64().unwrap() > 1000, "{status}");

    // In use, it stays.
    let refused = setting.aquifer(&["region", "rm", "one"]);
    assert!(
        !refused.status.success() && stderr(&refused).contains("in use by python3"),
        "{}",
        stderr(&refused)
    );

    // The limit changes while it is in use.
    setting.done(&["region", "resize-cache", "one", "4M"]);
    assert!(setting.show("one")["usage"]["resident"].as_u64().unwrap() <= 4 << 20);
    program.does("check 1");

    // What the program discards is discarded.
    program.does("punch 100 5000");
    program.does("zero 100 5000");
    // Its children would see zeroes, so they see nothing.
    program.does("fork");

    // A disk reads into what leaves meanwhile.
    program.does("direct 3");
    program.does("check 3");

    // What is in a region outlives the program.
    program.does("write 2");
    kill(&Value::from(program.child.id()));
    drop(program);
    let mut program = setting.start(&region);
    program.does("check 2");
    drop(program);
    setting.remove("one");
    eventually("the tmpfs is gone", || setting.mounts() == 0);
    eventually("the lender has its memory back", || {
        let files =
            fs::read_dir(setting.lender.pages()).unwrap().map(|entry| entry.unwrap().metadata().unwrap());
        files.map(|file| std::os::unix::fs::MetadataExt::blocks(&file) * 512).sum::<u64>() < 1 << 20
    });
}

#[test]
fn engines_that_are_killed_under_load_lose_nothing() {
    if lacks_regions() {
        return;
    }
    let setting = Setting::new();
    for (number, policy) in ["clock", "sieve", "random"].into_iter().enumerate() {
        let region = setting.create(policy, &["--policy", policy]);
        let mut program = setting.start(&region);
        for round in 0..4 {
            program.order(&format!("write {}", 10 * number + round));
            for _ in 0..3 {
                let pid = setting.show(policy)["pid"].clone();
                sleep(Duration::from_millis(60));
                kill(&pid);
                eventually("another serves", || {
                    let shown = setting.aquifer(&["--json", "region", "show", policy]);
                    serde_json::from_slice::<Value>(&shown.stdout).is_ok_and(|status| status["pid"] != pid)
                });
            }
            assert_eq!(program.answer(), "write 0");
            program.does(&format!("check {}", 10 * number + round));
        }
        drop(program);
        setting.remove(policy);
    }
}

/// Kills the processes of a region, the one that would start another engine first.
fn kill_processes(setting: &Setting, name: &str) {
    let engine = setting.show(name)["pid"].clone();
    let stat = fs::read_to_string(format!("/proc/{engine}/stat")).unwrap();
    let keeper = stat.rsplit(") ").next().unwrap().split(' ').nth(1).unwrap().parse::<i64>().unwrap();
    [Value::from(keeper), engine].iter().for_each(kill);
    eventually("nothing serves it", || !setting.aquifer(&["region", "show", name]).status.success());
}

#[test]
fn what_killed_processes_left_is_served_again_or_removed() {
    if lacks_regions() {
        return;
    }
    let setting = Setting::new();
    let mut program = setting.start(&setting.create("left", &[]));
    program.does("write 1");
    program.order("check 1");
    kill_processes(&setting, "left");
    assert!(stdout(&setting.aquifer(&["region", "list"])).contains("nothing serves it"));
    let refused = setting.aquifer(&["region", "show", "left"]);
    assert!(stderr(&refused).contains("'aquifer region start left'"), "{}", stderr(&refused));

    setting.done(&["region", "start", "left"]);
    assert_eq!(program.answer(), "check 0");
    let refused = setting.aquifer(&["region", "start", "left"]);
    assert!(stderr(&refused).contains("is served already"), "{}", stderr(&refused));
    program.does("check 1");

    kill_processes(&setting, "left");
    drop(program);
    setting.done(&["region", "rm", "left"]);
    eventually("the tmpfs is gone", || setting.mounts() == 0);
    let refused = setting.aquifer(&["region", "start", "left"]);
    assert!(stderr(&refused).contains("there is no region 'left'"), "{}", stderr(&refused));
}

#[test]
fn it_is_known_where_each_page_is() {
    if lacks_regions() {
        return;
    }
    let setting = Setting::new();
    let region = setting.create("known", &["--prefetch", "off"]);
    let mut program = setting.start(&region);
    program.does("write 1");
    drop(program);
    eventually("nobody maps it", || setting.show("known")["programs"].as_array().unwrap().is_empty());
    let pages = |more: &[&str]| {
        let found = setting.done(&[&["region", "pages", "known"], more].concat());
        let mut states = Vec::new();
        for run in found["pages"].as_array().unwrap() {
            assert_eq!(run["first"].as_u64().unwrap(), states.len() as u64);
            states.resize(states.len() + run["count"].as_u64().unwrap() as usize, run["state"].clone());
        }
        (states, found["extents"].clone())
    };
    let (states, extents) = pages(&[]);
    let count = |of: &str| states.iter().filter(|state| *state == of).count() as u64 * 4096;
    let usage = setting.show("known")["usage"].clone();
    assert_eq!(
        (count("remote"), count("zero")),
        (usage["remote"].as_u64().unwrap(), usage["zero"].as_u64().unwrap())
    );
    assert_eq!(count("resident") + count("dirty"), usage["resident"].as_u64().unwrap());
    assert!(count("remote") > 20 << 20 && count("dirty") > 0, "{usage}");
    assert!(extents[0]["lease"]["lender"].is_string() && extents[0]["from"] == 0, "{extents}");

    setting.done(&["region", "drop", "known", "--first", "64", "--count", "100"]);
    let after = pages(&[]).0;
    let same = |range: std::ops::Range<usize>| after[range.clone()] == states[range];
    assert!(same(0..64) && same(164..states.len()) && after[64..164].iter().all(|state| state == "zero"));
    let mut program = setting.start(&region);
    program.does("zero 64 100");
    let refused = setting.aquifer(&["region", "pages", "known", "--first", "9000", "--count", "1"]);
    assert!(stderr(&refused).contains("has 8192 pages"), "{}", stderr(&refused));
}

#[test]
fn a_program_waits_for_a_lender_that_is_away() {
    if lacks_regions() {
        return;
    }
    let setting = Setting::new();
    let region = setting.create("away", &[]);
    let mut program = setting.start(&region);
    program.does("write 5");
    kill_process(Pid::from_child(&setting.lender.child), Signal::STOP).unwrap();
    program.order("check 5");
    eventually("it is shown that faults wait", || {
        stdout(&setting.aquifer(&["region", "show", "away"])).contains("WAITING")
    });
    assert!(stdout(&setting.aquifer(&["region", "list"])).contains("WAIT for a lender"));
    kill_process(Pid::from_child(&setting.lender.child), Signal::CONT).unwrap();
    assert_eq!(program.answer(), "check 0");
}

#[test]
fn a_program_that_is_not_to_wait_is_told_so() {
    if lacks_regions() {
        return;
    }
    let setting = Setting::new();
    let region = setting.create("short", &["--give-up", "300ms", "--prefetch", "off"]);
    let mut program = setting.start(&region);
    program.does("write 6");
    setting.done(&["region", "persist", "short"]);
    // Pages of zeroes lenders do not have.
    assert!(setting.show("short")["usage"]["dirty"].as_u64().unwrap() < 256 << 10);
    kill_process(Pid::from_child(&setting.lender.child), Signal::STOP).unwrap();
    program.order("check 6");
    let end = program.child.wait().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&end), Some(7), "{end}");
    kill_process(Pid::from_child(&setting.lender.child), Signal::CONT).unwrap();
    assert!(setting.show("short")["counts"]["given_up"].as_u64().unwrap() > 0);
    // What is there is as it was, for the next one.
    setting.start(&region).does("check 6");
}

#[test]
fn an_emulated_link_takes_its_time_and_needs_no_lender() {
    if lacks_regions() {
        return;
    }
    let setting = Setting::new();
    let words = ["region", "create", "what-if", "--size", "32M", "--cache", "8M", "--emulate-link", "200us"];
    let created = setting.done(&words);
    let mut program = setting.start(Path::new(created["file"].as_str().unwrap()));
    program.does("write 7");
    program.does("check 7");
    let status = setting.show("what-if");
    let median = status["latency"]["p50_us"].as_f64().unwrap();
    assert!(median >= 198.0, "{status}");
    // What was with the engine is gone with it, and nobody is told zeroes instead.
    kill(&status["pid"]);
    eventually("it is not served any more", || {
        !setting.aquifer(&["region", "show", "what-if"]).status.success()
    });
    drop(program);
    setting.done(&["region", "rm", "what-if"]);
}

#[test]
fn what_cannot_be_is_refused_with_the_reason() {
    if lacks_regions() {
        return;
    }
    let setting = Setting::new();
    let uri = setting.lender.uri().to_owned();
    let says = |words: &[&str], what: &str| {
        let output = setting.aquifer(words);
        assert!(!output.status.success() && stderr(&output).contains(what), "{words:?}: {}", stderr(&output));
    };
    let create = |name: &'static str, size: &'static str| {
        ["region", "create", name, "--size", size, "--cache", "4M", "--lender"]
    };
    says(&[&create("big", "1G")[..], &[&uri]].concat(), "less than it could need");
    says(&[&create("../x", "16M")[..], &[&uri]].concat(), "cannot be a region name");
    says(&[&create("away", "16M")[..], &["nbd+unix:///?socket=/nowhere"]].concat(), "/nowhere");
    says(&["region", "show", "none"], "there is no region 'none'");
    setting.create("twice", &[]);
    says(&[&create("twice", "16M")[..], &[&uri]].concat(), "there is a region 'twice' already");
    // Without the shim a program sees the file, and what is not here as zeroes: only root may.
    let mode = fs::metadata(setting.dir.path().join("regions")).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode.permissions()) & 0o777, 0o700);
    // A private mapping would see zeroes.
    let region = setting.dir.path().join("regions/twice");
    let output = aquifer(setting.dir.path())
        .args(["region", "exec", "--", "python3", "-c"])
        .arg("import mmap,os,sys; mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0, mmap.MAP_PRIVATE)")
        .arg(&region)
        .output()
        .unwrap();
    assert!(!output.status.success() && stderr(&output).contains("mapped shared"), "{}", stderr(&output));
    setting.remove("twice");
}

#[test]
fn the_demo_finds_every_value_and_leaves_nothing() {
    if lacks_regions() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let picture = dir.path().join("region.png");
    let words = ["--json", "demo", "region", "--cache", "32M", "--picture"];
    let output = aquifer(dir.path()).args(words).arg(&picture).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    let number = |of: &str| summary[of].as_f64().unwrap();
    assert!(number("values_written") > 50_000.0 && number("values_wrong") == 0.0, "{summary}");
    assert_eq!(number("values_verified"), number("values_written"));
    assert_eq!((number("local_bytes"), number("region_bytes")), (f64::from(32 << 20), f64::from(128 << 20)));
    assert!(number("faults") > 10_000.0 && number("fault_p50_us") > 0.0, "{summary}");
    assert!(fs::read(&picture).unwrap().starts_with(b"\x89PNG"));
    fs::remove_file(&picture).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn what_a_program_allocates_can_be_in_a_region() {
    if lacks_regions() {
        return;
    }
    let setting = Setting::new();
    setting.create("heap", &[]);
    setting.done(&["region", "resize-cache", "heap", "4M"]);
    let words = ["--heap", "heap", "--", "/usr/bin/python3", "-c", HEAP_PROGRAM];
    for _ in 0..2 {
        let mut program = setting.exec(&words);
        ["fill", "check"].iter().for_each(|order| program.does(order));
        let status = setting.show("heap");
        assert!(status["usage"]["remote"].as_u64().unwrap() > 8 << 20, "{status}");

        kill(&status["pid"]);
        ["check", "free", "check", "child", "fork", "check"].iter().for_each(|order| program.does(order));

        let second = setting.aquifer(&["region", "exec", "--heap", "heap", "--", "true"]);
        assert!(stderr(&second).contains("in use: python3"), "{}", stderr(&second));
        drop(program);
        eventually("nobody maps it", || setting.show("heap")["programs"].as_array().unwrap().is_empty());
    }
}

#[test]
fn caches_share_a_limit_and_have_of_it_what_they_need() {
    if lacks_regions() {
        return;
    }
    let setting = Setting::new();
    setting.done(&["region", "limit", "12M"]);
    let [one, two] = ["one", "two"].map(|name| setting.create(name, &["--group", "blue"]));
    let cache = |name: &str| setting.show(name)["usage"]["cache"].as_u64().unwrap() >> 20;
    // The first has all that it was to have; of what is left, the second.
    assert_eq!((cache("one"), cache("two")), (8, 4));

    let mut programs = [setting.start(&one), setting.start(&two)];
    programs[0].does("write 1");
    for busy in [1, 0, 1] {
        let name = ["one", "two"][busy];
        programs[busy].does("write 1");
        eventually("the one that is busy has the most", || {
            programs[busy].does("check 1");
            let (caches, limits) = ([cache("one"), cache("two")], setting.done(&["region", "limit"]));
            let quotas = ["one", "two"].map(|name| limits["quotas"][name]["bytes"].as_u64().unwrap());
            assert!(quotas.iter().sum::<u64>() <= 12 << 20, "{limits}");
            caches[busy] >= 7 && caches[1 - busy] < 5
        });
        // One whose engine dies has what it had.
        kill(&setting.show(name)["pid"]);
        programs[busy].does("check 1");
        assert!(cache(name) >= 7);
    }
    programs[0].does("check 1");

    setting.done(&["region", "limit", "--group", "blue", "6M"]);
    assert!(cache("one") + cache("two") <= 6);
    let resident = |name: &str| setting.show(name)["usage"]["resident"].as_u64().unwrap();
    assert!(resident("one") + resident("two") <= 6 << 20);
    programs.iter_mut().for_each(|program| program.does("check 1"));
    let refused = setting.aquifer(&["region", "limit", "--group", "blue", "400K"]);
    assert!(stderr(&refused).contains("2 regions need 256KiB each"), "{}", stderr(&refused));

    setting.done(&["region", "limit", "none"]);
    setting.done(&["region", "limit", "--group", "blue", "none"]);
    assert_eq!((cache("one"), cache("two")), (8, 8));
    programs.iter_mut().for_each(|program| program.does("check 1"));
}

#[test]
fn a_program_in_c_uses_a_region_by_the_library() {
    if lacks_regions() {
        return;
    }
    let setting = Setting::new();
    let region = setting.create("c", &[]);
    let capi = Path::new(env!("CARGO_MANIFEST_DIR")).join("../capi");
    let built = Path::new(env!("CARGO_BIN_EXE_aquifer")).parent().unwrap();
    let program = setting.dir.path().join("pages");
    let compiled = Command::new("cc")
        .args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O2", "-o"])
        .args([&program, &capi.join("examples/pages.c")])
        .arg(format!("-I{}", capi.join("include").display()))
        .arg(format!("-L{}", built.display()))
        .args(["-laquifer", &format!("-Wl,-rpath,{}", built.display())])
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", stderr(&compiled));

    let output = Command::new(&program).arg(&region).output().unwrap();
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    let said = stdout(&output);
    let words: Vec<_> = said.split_whitespace().collect();
    let number =
        |of: &str| words[words.iter().position(|word| *word == of).unwrap() + 1].parse::<u64>().unwrap();
    let pages = ["zero", "remote", "resident", "dirty"].map(number);
    assert_eq!((pages.iter().sum::<u64>(), pages[0]), (8192, 2048), "{said}");
    assert_eq!((number("cache"), pages[3]), (4 << 20, 0), "{said}");
    assert!(pages[2] <= 1024 && pages[1] > 5000 && said.contains("at unix:"), "{said}");

    let refused = Command::new(&program).arg(setting.dir.path().join("regions/none")).output().unwrap();
    assert!(
        stderr(&refused).contains("mapping the region: there is no region 'none'"),
        "{}",
        stderr(&refused)
    );
}
