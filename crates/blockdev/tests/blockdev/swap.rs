//! Tests of swap on the FUSE + loop backend: a process that exceeds its limit reads all its memory
//! back.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use aquifer_blockdev::backend::{Attached, Backend, FuseLoop, Options};
use aquifer_blockdev::swap::{self, SwapError};
use aquifer_page::Bytes;

use crate::common::cgroup::Cgroup;
use crate::common::ram_disk::RamDisk;
use crate::touch;

const LIMIT: u64 = 64 << 20;
const LOAD: Bytes = Bytes::mib(192);

/// Waits for the machine-wide right to turn swap on, and takes it; the open file holds it. The
/// kernel uses a swap device for all processes, so pages of one test would go to the device of
/// another.
fn the_kernels_swap() -> File {
    let path = std::env::temp_dir().join("aquifer-swap-tests.lock");
    let file = File::options().create(true).append(true).open(&path).unwrap();
    file.lock().unwrap();
    file
}

/// Swap on a disk in RAM. Dropping it turns swap off and detaches the device.
struct SwapDevice {
    disk: Arc<RamDisk>,
    device: Box<dyn Attached>,
    _right: File,
}

impl SwapDevice {
    fn new() -> Self {
        let right = the_kernels_swap();
        let disk = RamDisk::new(Bytes::mib(512));
        let options = Options { workers: 4, spare: 0, label: "aquifer-test".to_owned() };
        let device = FuseLoop.attach(disk.clone(), &options).unwrap();
        swap::format(device.path(), Bytes::mib(512), "aquifer", 1).unwrap();
        // The highest priority, so that the kernel uses it before other swap.
        swap::on(device.path(), Some(32_767)).unwrap();
        Self { disk, device, _right: right }
    }

    fn used(&self) -> Bytes {
        swap::usage(self.device.path()).unwrap().unwrap()
    }

    fn path(&self) -> PathBuf {
        self.device.path().to_owned()
    }
}

impl Drop for SwapDevice {
    fn drop(&mut self) {
        let off = swap::off(self.device.path(), |_| ());
        if !std::thread::panicking() {
            assert!(matches!(off, Ok(()) | Err(SwapError::Off { .. })), "{off:?}");
        }
    }
}

/// The load in a process of its own inside a cgroup. Dropping it kills the process.
struct Load {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Load {
    fn start(group: &Cgroup) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "swap::the_load_process"])
            .env(LOAD_VARIABLE, group.procs())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    /// Returns the next JSON line that the load prints.
    fn next(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(
                self.output.read_line(&mut line).unwrap() > 0,
                "the load ended early: {:?}",
                self.child.wait()
            );
            if let Some(at) = line.find('{') {
                return line.split_off(at);
            }
        }
    }

    fn verify(&mut self) {
        self.input.write_all(b"verify\n").unwrap();
        assert_eq!(
            self.next().trim(),
            format!(r#"{{"verified_pages":{},"wrong":0}}"#, LOAD.pages())
        );
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const LOAD_VARIABLE: &str = "AQUIFER_TEST_LOAD_GROUP";

/// Not a test: the process that [`Load::start`] starts. It enters its cgroup before it allocates
/// memory.
#[test]
fn the_load_process() {
    if let Some(procs) = std::env::var_os(LOAD_VARIABLE) {
        std::fs::write(procs, "0").unwrap();
        println!();
        assert_eq!(touch::run(LOAD, 2000, 1).unwrap(), 0);
    }
}

fn is_bound(path: &Path) -> bool {
    Path::new("/sys/block").join(path.file_name().unwrap()).join("loop").exists()
}

#[test]
fn a_process_over_its_limit_keeps_its_memory_through_swapoff() {
    let mut device = SwapDevice::new();
    let group = Cgroup::new("aquifer-test-swap", LIMIT);
    let mut load = Load::start(&group);
    load.next();
    load.next();
    assert!(device.used() > Bytes::mib(32), "only {} were swapped out", device.used());
    load.verify();

    group.set_limit(LIMIT * 8);
    let mut reported = Vec::new();
    swap::off(&device.path(), |progress| reported.push(progress)).unwrap();
    assert!(reported.iter().all(|progress| progress.remaining <= progress.total));
    assert!(reported.is_sorted_by(|a, b| a.remaining >= b.remaining), "{reported:?}");
    assert_eq!(swap::usage(&device.path()).unwrap(), None);
    load.verify();

    device.device.detach().unwrap();
    assert!(!is_bound(&device.path()));
}

#[test]
fn memory_of_a_killed_process_leaves_swap_and_volume() {
    let mut device = SwapDevice::new();
    let group = Cgroup::new("aquifer-test-kill", LIMIT);
    let mut load = Load::start(&group);
    load.next();
    assert!(device.used() > Bytes::mib(32), "only {} were swapped out", device.used());
    let stored = device.disk.stored();
    drop(load);
    drop(group);
    crate::common::wait_until("the discard of freed pages", || device.disk.stored() < stored / 4);

    swap::off(&device.path(), |_| ()).unwrap();
    device.device.detach().unwrap();
    assert!(!is_bound(&device.path()));
}

#[test]
fn a_device_with_swap_on_cannot_be_detached() {
    let mut device = SwapDevice::new();
    let refused = device.device.detach().unwrap_err().to_string();
    assert!(refused.contains(device.path().to_str().unwrap()), "{refused}");
    assert!(swap::usage(&device.path()).unwrap().is_some());
}

#[test]
fn turning_off_inactive_swap_names_the_device_and_the_reason() {
    let error = swap::off(Path::new("/dev/null"), |_| ()).unwrap_err().to_string();
    assert!(error.contains("/dev/null") && error.contains("/proc/swaps"), "{error}");
}

#[test]
fn a_device_without_a_header_is_refused_with_the_reason() {
    let disk = RamDisk::new(Bytes::mib(64));
    let options = Options { workers: 1, spare: 0, label: "aquifer-test".to_owned() };
    let device = FuseLoop.attach(disk, &options).unwrap();
    let error = swap::on(device.path(), None).unwrap_err().to_string();
    assert!(error.contains("no swap header"), "{error}");
}
