//! Times of the stages of resizes in the guest's kernel (\[Bielski18\], Table I).
//!
//! Probes at the entry and the return of kernel functions measure them. The probes write to a
//! tracing instance of their own, so that other users' traces are unaffected.

mod parse;
mod stages;

use std::fs::{self, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::message::Stage;
use stages::{IN, KNOWN, Known, OUT};

/// Name of the agent's probe group and tracing instance.
const NAME: &str = "aquifer";

/// Size of the trace buffer, in KiB a processor: enough for some ten thousand events.
const ROOM: &str = "1024";

/// The measured times.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Measured {
    pub(crate) stages: Vec<Stage>,
    /// Names of the stages that this kernel does not show, or not completely.
    pub(crate) missing: Vec<String>,
}

/// A measurement of the stages. A tracer removes everything that it sets up.
#[derive(Debug)]
pub(crate) struct Tracer {
    /// The directory of tracefs.
    dir: PathBuf,
    on: Option<On>,
}

#[derive(Debug)]
struct On {
    missing: Vec<String>,
    mounted: bool,
}

impl Tracer {
    /// Makes a tracer for the root directory `root`, and removes the remains of a killed agent.
    pub(crate) fn new(root: &Path) -> Self {
        let tracer = Self { dir: root.join("sys/kernel/tracing"), on: None };
        tracer.clean();
        tracer
    }

    /// Starts measuring afresh; returns the stages that this kernel does not show.
    ///
    /// # Errors
    /// If the kernel does not trace, or does not permit it.
    pub(crate) fn start(&mut self) -> io::Result<&[String]> {
        self.stop();
        let mounted = self.mount()?;
        // Set first, so that `stop` cleans up after any failure.
        self.on = Some(On { missing: Vec::new(), mounted });
        match self.set_up() {
            Ok(missing) => Ok(&self.on.insert(On { missing, mounted }).missing),
            Err(error) => {
                self.stop();
                Err(error)
            }
        }
    }

    /// Returns the times since the start, or `None` if a stage is in progress. If the tracer is
    /// off, everything is missing.
    ///
    /// # Errors
    /// If the trace cannot be read.
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

    /// Discards the times so far, and goes on.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn forget(&self) -> io::Result<()> {
        // Opening the file for writing empties the buffer.
        fs::write(self.instance().join("trace"), "")
    }

    /// Returns whether the tracer measures.
    pub(crate) fn is_on(&self) -> bool {
        self.on.is_some()
    }

    /// Stops, and removes the probes and the instance.
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
        // One clock for all processors: a task may enter a function on one and return on another.
        fs::write(instance.join("trace_clock"), "mono")?;
        fs::write(instance.join("events").join(NAME).join("enable"), "1")?;
        Ok(names)
    }

    /// Sets the probes of a stage; returns whether this kernel has a function for it.
    fn probe(&self, known: &Known) -> bool {
        if known.functions.iter().any(|function| self.probe_function(known.name, function).is_ok())
        {
            return true;
        }
        // The compiler may have specialized the function.
        self.special(known)
            .is_some_and(|function| self.probe_function(known.name, &function).is_ok())
    }

    fn probe_function(&self, stage: &str, function: &str) -> io::Result<()> {
        self.order(&format!("p:{NAME}/{IN}{stage} {function}"))?;
        self.order(&format!("r:{NAME}/{OUT}{stage} {function}"))
            .inspect_err(|_| drop(self.order(&format!("-:{NAME}/{IN}{stage}"))))
    }

    /// Finds a specialized function such as `offline_pages.constprop.0`.
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
        // Without append mode, opening this file removes all probes, also those of other users.
        let mut file = OpenOptions::new().append(true).open(self.dir.join("kprobe_events"))?;
        file.write_all(order.as_bytes())
    }

    fn clean(&self) {
        let instance = self.instance();
        if instance.exists() {
            // An enabled probe cannot be removed.
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

/// Returns the names of all stages.
pub(crate) fn all() -> Vec<String> {
    stages::names().map(str::to_owned).collect()
}

/// Returns the agent's probes among those of `kprobe_events`, each as `GROUP/EVENT`.
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
