//! Programs that know nothing of regions and take orders, and that can tell whether their memory is what they wrote.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Maps the region, and does what it is told: `write SEED` all pages, `check SEED`, `punch FIRST COUNT`, `zero FIRST COUNT`, `fork`,
/// `direct SEED`: a disk reads all pages into the region, while another thread has pages leave.
/// One page of 64 is all zeroes. Pages are visited by chance.
pub const PROGRAM: &str = include_str!("program.py");

/// Allocates, checks and frees, without knowing of regions: `fill`, `check`, `free` (of all but every other block), `child`, `fork`.
pub const HEAP_PROGRAM: &str = include_str!("heap.py");

/// Maps the region, whose pages are of three kinds, one after the other: `fill SEED SEED SEED` has each kind be as all have it with that seed, `check SEED
/// SEED SEED`, `guess` writes a byte to each page, in an order by chance, and answers how many nanoseconds each of a kind took, as JSON.
pub const GUESSING_PROGRAM: &str = include_str!("guess.py");

/// One that runs. Dropping it kills it.
pub struct Program {
    pub child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Program {
    pub(super) fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (orders, answers) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut program = Self { child, orders, answers };
        assert_eq!(program.answer(), "ready");
        program
    }

    pub fn order(&mut self, order: &str) {
        writeln!(self.orders, "{order}").unwrap();
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
