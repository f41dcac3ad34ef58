//! The first process of a demo's guest: it holds and checks as much memory as the demo asks for.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use aquifer_blockdev::swap;
use aquifer_page::PAGE_SIZE;
use aquifer_vm::initrd::ORDER;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use rustix::system::finit_module;
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};

/// The first word of a reply, which is `holds PART SEED MIB WRONG ERRORS`.
///
/// PART, SEED and MIB repeat the request. WRONG counts the bad chunks of all parts, ERRORS the
/// errors of the guest's kernel.
pub(super) const HOLDS: &str = "holds";

/// The path of the agent in the guest.
pub(super) const AGENT: &str = "/bin/aquifer-guest";

/// Pages of a chunk of 1 MiB.
const CHUNK: usize = (1 << 20) / PAGE_SIZE;

/// The least severe log level of the kernel that counts as an error: KERN_ERR (syslog(2)).
const ERROR: u32 = 3;

/// Obeys standard input for ever: each line gives a part of memory, the seed of its content, and
/// MiB. If there is a `swap` device, the guest's kernel swaps to it.
///
/// # Errors
/// If a mount, a module or the agent fails, or if the console fails.
pub fn run(swap: Option<&Path>) -> io::Result<()> {
    for (kind, path) in
        [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/run")]
    {
        fs::create_dir_all(path)?;
        mount(kind, path, kind, MountFlags::empty(), None)?;
    }
    for line in fs::read_to_string(ORDER)?.lines() {
        load(line)?;
    }
    if let Some(device) = swap {
        swap::on(device, None).map_err(io::Error::other)?;
    }
    Command::new(AGENT).arg("run").stdin(Stdio::null()).spawn()?;
    let stdin = io::stdin();
    // The terminal must not echo the requests.
    if let Ok(mut mode) = tcgetattr(&stdin) {
        mode.local_modes.remove(LocalModes::ECHO);
        tcsetattr(&stdin, OptionalActions::Now, &mode)?;
    }
    let mut held = Held::default();
    say([0; 3], &held)?;
    for line in stdin.lines() {
        let numbers = line?.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>();
        let Ok(Ok(told)) = numbers.map(<[u64; 3]>::try_from) else { continue };
        held.hold(told);
        say(told, &held)?;
    }
    Ok(())
}

/// Loads a module, given as its file and its parameters.
fn load(line: &str) -> io::Result<()> {
    let (file, parameters) = line.split_once(' ').unwrap_or((line, ""));
    let module = fs::File::open(format!("/modules/{file}"))?;
    match finit_module(module, &CString::new(parameters)?, 0) {
        Err(Errno::EXIST) => Ok(()),
        loaded => Ok(loaded?),
    }
}

/// A page, aligned as the guest's kernel aligns it, so that guests with the same content share it.
#[derive(Clone, Debug)]
#[repr(align(4096))]
struct Page([u64; PAGE_SIZE / 8]);

/// The parts that the process holds, by number.
#[derive(Debug, Default)]
struct Held(BTreeMap<u64, Part>);

/// Chunks of 1 MiB with content that follows from the seed and their index.
#[derive(Debug, Default)]
struct Part {
    seed: u64,
    chunks: Vec<Vec<Page>>,
}

impl Held {
    /// Resizes a part to so many MiB of this seed; a part of another seed is written anew.
    fn hold(&mut self, [part, seed, mib]: [u64; 3]) {
        let part = self.0.entry(part).or_default();
        part.chunks.truncate(mib as usize);
        if part.seed != seed {
            part.seed = seed;
            (0..).zip(&mut part.chunks).for_each(|(number, chunk)| fill(chunk, seed, number));
        }
        while (part.chunks.len() as u64) < mib {
            let mut chunk = vec![Page([0; PAGE_SIZE / 8]); CHUNK];
            fill(&mut chunk, seed, part.chunks.len() as u64);
            part.chunks.push(chunk);
        }
    }

    /// Returns how many chunks have wrong content.
    fn wrong(&self) -> usize {
        let of = |part: &Part| {
            let is_wrong =
                |(number, chunk): &(u64, &Vec<Page>)| !is_right(chunk, part.seed, *number);
            (0..).zip(&part.chunks).filter(is_wrong).count()
        };
        self.0.values().map(of).sum()
    }
}

/// Returns the first word of a chunk; each further word is one more than the word before.
fn first(seed: u64, number: u64) -> u64 {
    (seed << 32 | (number + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn fill(chunk: &mut [Page], seed: u64, number: u64) {
    let mut word = first(seed, number);
    for page in chunk {
        for place in &mut page.0 {
            *place = word;
            word = word.wrapping_add(1);
        }
    }
}

fn is_right(chunk: &[Page], seed: u64, number: u64) -> bool {
    let mut word = first(seed, number);
    // Compares every word without a branch in the loop, as emulated guests are slow.
    let mut differs = 0;
    for page in chunk {
        for held in &page.0 {
            differs |= held ^ word;
            word = word.wrapping_add(1);
        }
    }
    differs == 0
}

fn say([part, seed, mib]: [u64; 3], held: &Held) -> io::Result<()> {
    let (wrong, errors) = (held.wrong(), kernel_errors()?);
    let mut out = io::stdout().lock();
    writeln!(out, "{HOLDS} {part} {seed} {mib} {wrong} {errors}")?;
    out.flush()
}

/// Counts the errors in the kernel's log. The lowest three bits of a record's first number are its
/// level.
fn kernel_errors() -> io::Result<usize> {
    use std::io::Read as _;
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let mut log = fs::OpenOptions::new().read(true).custom_flags(nonblocking).open("/dev/kmsg")?;
    let (mut errors, mut record) = (0, [0; 8192]);
    loop {
        match log.read(&mut record) {
            Ok(length) => {
                let text = String::from_utf8_lossy(&record[..length]);
                let number = text.split(',').next().and_then(|number| number.parse::<u32>().ok());
                errors += usize::from(number.is_some_and(|number| number & 7 <= ERROR));
            }
            // EPIPE: the kernel overwrote records before this loop read them.
            Err(error) if error.raw_os_error() == Some(Errno::PIPE.raw_os_error()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(errors),
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_chunks_are_alike_unless_seed_and_number_are() {
        assert_ne!(first(0, 0), first(0, 1));
        assert_ne!(first(0, 1), first(1, 1));
        assert_ne!(first(0, 1), first(1, 0));
    }

    #[test]
    fn held_memory_is_checked_and_rewritten_for_another_seed() {
        let mut held = Held::default();
        held.hold([0, 7, 3]);
        held.hold([1, 8, 1]);
        let of_seed = |held: &Held, seed| held.0[&0].chunks[2][0].0[0] == first(seed, 2);
        assert!(held.wrong() == 0 && of_seed(&held, 7));
        held.hold([0, 9, 4]);
        assert!(held.wrong() == 0 && of_seed(&held, 9));
        held.0.get_mut(&0).unwrap().chunks[3][255].0[511] ^= 1;
        assert_eq!(held.wrong(), 1);
        held.hold([0, 9, 3]);
        assert_eq!(held.wrong(), 0);
    }
}
