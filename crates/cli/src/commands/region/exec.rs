//! `aquifer region exec`.

use std::ffi::OsString;
use std::fs::{File, OpenOptions, TryLockError};
use std::os::fd::{AsRawFd as _, IntoRawFd as _};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use aquifer_page::RegionName;
use aquifer_region::process::{Files, client};
use clap::Args;
use rustix::io::{FdFlags, fcntl_setfd};

use crate::commands::Common;
use crate::failure::{Failure, OrFail as _, Result};

/// Run a program that can map regions
///
/// The program needs no change. The preloaded libaquifer_preload.so tells the region's engine when
/// the program maps the region.
///
/// With --heap, jemalloc (Debian: libjemalloc2) allocates the program's heap in a region. Such a
/// program cannot fork. It can start others with vfork or posix_spawn; their memory is not in the
/// region.
#[derive(Debug, Args)]
pub struct Exec {
    /// Put the heap into this region, discarding its content
    ///
    /// The region's size limits the heap. By default the heap is in normal memory.
    #[arg(long, value_name = "NAME")]
    heap: Option<RegionName>,
    /// Program and its arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// An allocator that asks for heap memory by calls that the preloaded library sees.
const ALLOCATOR: &str = "libjemalloc.so.2";

/// The environment variable with jemalloc's options.
const OPTIONS: &str = "MALLOC_CONF";

/// The least heap for each jemalloc arena, in bytes: arenas cannot use the memory that another
/// keeps.
const FOR_AN_ARENA: u64 = 64 << 20;

/// Returns the options with which jemalloc uses all of a heap of `size` bytes and nothing else.
///
/// Without these options each arena reserves ever larger address ranges and never returns them.
/// Memory for which the heap has no room then comes from `sbrk`, outside the region. The user's own
/// options come last, and override these.
fn options(size: u64) -> OsString {
    let processors = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let arenas = (size / FOR_AN_ARENA).clamp(1, 4 * processors);
    let mut options = OsString::from(format!("dss:disabled,retain:false,narenas:{arenas}"));
    if let Some(others) = std::env::var_os(OPTIONS).filter(|others| !others.is_empty()) {
        options.push(",");
        options.push(others);
    }
    options
}

/// Returns the path of the preloaded library, which belongs to this program or to `aquifer` beside
/// it.
///
/// # Errors
/// If the library is missing.
pub fn preload_library() -> Result<PathBuf> {
    let what = || "finding the library to preload";
    aquifer_region::process::preload_library(&std::env::current_exe().or_fail(what)?).or_fail(what)
}

/// Preloads the library into `command`.
///
/// # Errors
/// If the library is missing.
pub fn with_preload(command: &mut Command) -> Result<()> {
    preload(command, preload_library()?.into_os_string());
    Ok(())
}

fn preload(command: &mut Command, mut preload: OsString) {
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    command.env("LD_PRELOAD", preload);
}

impl Exec {
    pub(super) fn run(self, common: &Common) -> Result<ExitCode> {
        let (program, arguments) = self.command.split_first().expect("clap demands one");
        let mut command = Command::new(program);
        command.args(arguments);
        match &self.heap {
            None => with_preload(&mut command)?,
            Some(name) => {
                let mut libraries = preload_library()?.into_os_string();
                libraries.push(":");
                libraries.push(ALLOCATOR);
                preload(&mut command, libraries);
                let region = whole(&Files::new(&super::directory(common)?, name))?;
                let what = || format!("passing region '{name}' to the program");
                command.env(OPTIONS, options(region.metadata().or_fail(what)?.len()));
                command
                    .env("AQUIFER_HEAP", format!("{}:{}", region.as_raw_fd(), std::process::id()));
                // The descriptor survives exec, so the region stays locked until the program ends.
                fcntl_setfd(&region, FdFlags::empty()).or_fail(what)?;
                let _ = region.into_raw_fd();
            }
        }
        let error = command.exec();
        Err(Failure::new(format!("running {}", program.display()), error))
    }
}

/// Opens and locks a region that no program maps, for use as a heap.
fn whole(files: &Files) -> Result<File> {
    let what = || format!("using region '{}' as a heap", files.name());
    let status = client::status(files).or_fail(what)?;
    let path = files.region();
    let region = OpenOptions::new().read(true).write(true).open(&path).or_fail(what)?;
    let by = match region.try_lock() {
        Ok(()) if status.programs.is_empty() => return Ok(region),
        Err(TryLockError::Error(error)) => return Err(Failure::new(what(), error)),
        // A program that has just locked the region is not in the engine's list yet.
        Err(TryLockError::WouldBlock) if status.programs.is_empty() => "a program".to_owned(),
        Ok(()) | Err(TryLockError::WouldBlock) => status.programs.join(", "),
    };
    Err(Failure::new(what(), format!("it is in use by {by}"))
        .help("a heap needs a region of its own: create one with 'aquifer region create'"))
}
