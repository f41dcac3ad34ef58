//! Programs that obey commands and can tell whether their memory has changed. Unmodified programs
//! do not know regions.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};

/// A program that maps the region and obeys commands.
///
/// The commands are `write SEED [FIRST COUNT]` and `check SEED [FIRST COUNT]`, for all pages or for
/// these, `punch FIRST COUNT`, `zero FIRST COUNT`, `fork`, and `direct SEED`. With `direct`, a disk
/// reads all pages into the region while another thread causes evictions. One page of 64 is all
/// zeroes. Pages are visited in random order.
pub const MEMORY_PROGRAM: &str = include_str!("program.py");

/// A program that allocates, checks and frees without knowing regions.
///
/// The commands are `fill`, `check`, `free` (all but every other block), `child` and `fork`.
pub const HEAP_PROGRAM: &str = include_str!("heap.py");

/// A program that maps a region with pages of three kinds in turn.
///
/// `fill SEED SEED SEED` fills each kind with the common content of its seed; `check SEED SEED
/// SEED` compares it. `guess` writes a byte to each page, in random order. Its answer is the time
/// of each write in nanoseconds, by kind, as JSON.
pub const GUESSING_PROGRAM: &str = include_str!("guess.py");

/// A program in C that maps a region by the library: see its first lines.
const LIVES_SOURCE: &str = include_str!("lives.c");

/// Compiles a program in C that uses the library.
#[track_caller]
pub fn compile(source: &Path, program: &Path) {
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../libaquifer/include");
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

/// Compiles the program in C that obeys commands, and returns its path.
pub fn lives(dir: &Path) -> PathBuf {
    let (source, program) = (dir.join("lives.c"), dir.join("lives"));
    if !program.exists() {
        std::fs::write(&source, LIVES_SOURCE).unwrap();
        compile(&source, &program);
    }
    program
}

/// A running program; its drop kills it.
pub struct Program {
    pub child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Program {
    pub fn start(command: &mut Command) -> Self {
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

    /// Returns the answer of a program that might hang; fails after a minute.
    #[track_caller]
    pub fn answers_in_time(&mut self) -> String {
        let mut fds = [PollFd::new(self.answers.get_ref(), PollFlags::IN)];
        let minute = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&minute)), Ok(1), "the program does not answer");
        self.answer()
    }

    /// Asserts that the program obeys in time, and finds nothing wrong.
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

    /// Asserts that the program obeys, and finds nothing wrong.
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
