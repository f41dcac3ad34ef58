//! Programs that know nothing of regions and take orders, and that can tell whether their memory is what they wrote.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};

/// Maps the region, and does what it is told: `write SEED` all pages, `check SEED`, `punch FIRST COUNT`, `zero FIRST COUNT`, `fork`,
/// `direct SEED`: a disk reads all pages into the region, while another thread has pages leave.
/// One page of 64 is all zeroes. Pages are visited by chance.
pub const PROGRAM: &str = include_str!("program.py");

/// Allocates, checks and frees, without knowing of regions: `fill`, `check`, `free` (of all but every other block), `child`, `fork`.
pub const HEAP_PROGRAM: &str = include_str!("heap.py");

/// Maps the region, whose pages are of three kinds, one after the other: `fill SEED SEED SEED` has each kind be as all have it with that seed, `check SEED
/// SEED SEED`, `guess` writes a byte to each page, in an order by chance, and answers how many nanoseconds each of a kind took, as JSON.
pub const GUESSING_PROGRAM: &str = include_str!("guess.py");

/// A program in C that maps a region by the library: see its first lines.
const LIVES: &str = include_str!("lives.c");

/// Compiles a program in C that uses the library.
#[track_caller]
pub fn compile(source: &Path, program: &Path) {
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../capi/include");
    let built = Path::new(env!("CARGO_BIN_EXE_aquifer")).parent().unwrap();
    let compiled = Command::new("cc")
        .args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O2", "-pthread", "-o"])
        .args([program, source])
        .arg(format!("-I{}", include.display()))
        .arg(format!("-L{}", built.display()))
        .args(["-laquifer", &format!("-Wl,-rpath,{}", built.display())])
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}

/// The program in C that does what it is told, compiled.
pub fn lives(dir: &Path) -> PathBuf {
    let (source, program) = (dir.join("lives.c"), dir.join("lives"));
    if !program.exists() {
        std::fs::write(&source, LIVES).unwrap();
        compile(&source, &program);
    }
    program
}

/// One that runs. Dropping it kills it.
pub struct Program {
    pub child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Program {
    pub(super) fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (orders, answers) =
            (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut program = Self { child, orders, answers };
        assert_eq!(program.answer(), "ready");
        program
    }

    pub fn order(&mut self, order: &str) {
        writeln!(self.orders, "{order}").unwrap();
    }

    /// The same, where it may come to hang.
    #[track_caller]
    pub fn answers_in_time(&mut self) -> String {
        let mut fds = [PollFd::new(self.answers.get_ref(), PollFlags::IN)];
        let minute = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&minute)), Ok(1), "the program does not answer");
        self.answer()
    }

    /// What it does in time, and without finding anything wrong.
    #[track_caller]
    pub fn does_in_time(&mut self, order: &str) {
        self.order(order);
        let name = order.split(' ').next().unwrap();
        assert_eq!(self.answers_in_time(), format!("{name} 0"), "{order}");
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// What it does without finding anything wrong.
    pub fn does(&mut self, order: &str) {
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
