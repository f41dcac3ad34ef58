//! Times of the stages of resizes in the guest's kernel (Bielski et al. 2018, Table I), by probes at the beginning and end of its
//! functions, in an instance of the kernel's tracing of our own: what others trace is left alone.

mod parse;
mod stages;

use std::fs::{self, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::message::Stage;
use stages::{IN, KNOWN, Known, OUT};

/// What our probes and our instance are called.
const NAME: &str = "aquifer";

/// Room for events, in KiB a processor: some ten thousand.
const ROOM: &str = "1024";

/// What was measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Measured {
    pub(crate) stages: Vec<Stage>,
    /// Names of the stages that this kernel does not show, or not all of.
    pub(crate) missing: Vec<String>,
}

/// Measures stages while it is on. Whatever it sets up, it removes.
#[derive(Debug)]
pub(crate) struct Tracer {
    /// Where tracefs is.
    dir: PathBuf,
    on: Option<On>,
}

#[derive(Debug)]
struct On {
    missing: Vec<String>,
    mounted: bool,
}

impl Tracer {
    /// For the kernel whose root directory is `root`; removes what an agent that was killed has left.
    pub(crate) fn new(root: &Path) -> Self {
        let tracer = Self { dir: root.join("sys/kernel/tracing"), on: None };
        tracer.clean();
        tracer
    }

    /// Starts to measure, from nothing; the stages that this kernel does not show.
    ///
    /// # Errors
    /// If the kernel does not trace, or not for us.
    pub(crate) fn start(&mut self) -> io::Result<&[String]> {
        self.stop();
        let mounted = self.mount()?;
        // From here on, so that whatever fails is cleaned up after.
        self.on = Some(On { missing: Vec::new(), mounted });
        match self.set_up() {
            Ok(missing) => Ok(&self.on.insert(On { missing, mounted }).missing),
            Err(error) => {
                self.stop();
                Err(error)
            }
        }
    }

    /// What was measured since it was started, unless some stage goes on still; everything is missing if it is not on.
    ///
    /// # Errors
    /// If the kernel does not say.
    pub(crate) fn read(&self, even_if_one_goes_on: bool) -> io::Result<Option<Measured>> {
        let Some(on) = &self.on else {
            return Ok(Some(Measured { stages: Vec::new(), missing: all() }));
        };
        let told = parse::parse(&fs::read_to_string(self.instance().join("trace"))?);
        if told.open && !even_if_one_goes_on {
            return Ok(None);
        }
        let missing = if told.lost > 0 { all() } else { on.missing.clone() };
        Ok(Some(Measured { stages: told.stages, missing }))
    }

    /// Forgets what was measured so far, and goes on.
    ///
    /// # Errors
    /// If the kernel does not let it.
    pub(crate) fn forget(&self) -> io::Result<()> {
        // To open it for writing is all that it takes.
        fs::write(self.instance().join("trace"), "")
    }

    /// Whether it measures.
    pub(crate) fn is_on(&self) -> bool {
        self.on.is_some()
    }

    /// Stops, and removes what was set up.
    pub(crate) fn stop(&mut self) {
        let Some(on) = self.on.take() else { return };
        self.clean();
        if on.mounted {
            let _ = unmount(&self.dir, UnmountFlags::empty());
        }
    }

    fn instance(&self) -> PathBuf {
        self.dir.join("instances").join(NAME)
    }

    fn mount(&self) -> io::Result<bool> {
        if self.dir.join("kprobe_events").exists() {
            return Ok(false);
        }
        mount("tracefs", &self.dir, "tracefs", MountFlags::empty(), None)?;
        Ok(true)
    }

    fn set_up(&self) -> io::Result<Vec<String>> {
        let missing: Vec<_> = KNOWN.iter().filter(|known| !self.probe(known)).collect();
        let names = missing.iter().map(|known| known.name.to_owned()).collect();
        if missing.len() == KNOWN.len() {
            return Ok(names);
        }
        let instance = self.instance();
        fs::create_dir(&instance)?;
        fs::write(instance.join("buffer_size_kb"), ROOM)?;
        // One for all processors: a task may begin on one and end on another.
        fs::write(instance.join("trace_clock"), "mono")?;
        fs::write(instance.join("events").join(NAME).join("enable"), "1")?;
        Ok(names)
    }

    /// Puts probes at a stage; whether this kernel has a function for it.
    fn probe(&self, known: &Known) -> bool {
        if known.functions.iter().any(|function| self.probe_function(known.name, function).is_ok())
        {
            return true;
        }
        // The compiler may have made a special one of it.
        self.special(known)
            .is_some_and(|function| self.probe_function(known.name, &function).is_ok())
    }

    fn probe_function(&self, stage: &str, function: &str) -> io::Result<()> {
        self.order(&format!("p:{NAME}/{IN}{stage} {function}"))?;
        self.order(&format!("r:{NAME}/{OUT}{stage} {function}"))
            .inspect_err(|_| drop(self.order(&format!("-:{NAME}/{IN}{stage}"))))
    }

    /// A function such as `offline_pages.constprop.0`.
    fn special(&self, known: &Known) -> Option<String> {
        let functions = fs::File::open(self.dir.join("available_filter_functions")).ok()?;
        let lines = BufReader::new(functions).lines().map_while(Result::ok);
        let functions = lines.filter_map(|line| line.split_whitespace().next().map(str::to_owned));
        functions.into_iter().find(|function| {
            let plain = function.split_once('.').map(|(plain, _)| plain);
            plain.is_some_and(|plain| known.functions.contains(&plain))
        })
    }

    /// Adds or removes a probe.
    fn order(&self, order: &str) -> io::Result<()> {
        // To open it in any other way removes everybody's probes.
        let mut file = OpenOptions::new().append(true).open(self.dir.join("kprobe_events"))?;
        file.write_all(order.as_bytes())
    }

    fn clean(&self) {
        let instance = self.instance();
        if instance.exists() {
            // A probe that is in use cannot be removed.
            let _ = fs::write(instance.join("events").join(NAME).join("enable"), "0");
            let _ = fs::remove_dir(&instance);
        }
        let Ok(probes) = fs::read_to_string(self.dir.join("kprobe_events")) else { return };
        for probe in ours(&probes) {
            let _ = self.order(&format!("-:{probe}"));
        }
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The names of all stages.
pub(crate) fn all() -> Vec<String> {
    stages::names().map(str::to_owned).collect()
}

/// Our probes among those of `kprobe_events`, each `GROUP/EVENT`.
fn ours(probes: &str) -> impl Iterator<Item = &str> {
    let names = probes.lines().filter_map(|line| line.split_once(':')?.1.split(' ').next());
    names.filter(|name| name.split_once('/').is_some_and(|(group, _)| group == NAME))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    #[test]
    fn only_our_probes_are_removed() {
        let probes = "p:kprobes/p_vfs_read_0 vfs_read\nr64:aquifer/out_onlining online_pages\n\
                      p:aquifer/in_onlining online_pages\np:aquiferous/x y\n";
        assert_eq!(
            ours(probes).collect::<Vec<_>>(),
            ["aquifer/out_onlining", "aquifer/in_onlining"]
        );
    }

    #[test]
    fn a_tracer_that_is_not_on_has_measured_nothing() {
        let root = tempfile::tempdir().unwrap();
        let tracer = Tracer::new(root.path());
        let measured = tracer.read(false).unwrap().unwrap();
        assert_eq!((measured.stages.len(), measured.missing.len()), (0, KNOWN.len()));
    }
}
