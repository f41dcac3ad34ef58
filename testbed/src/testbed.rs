//! Several hosts and the switch between them.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::ops::Index;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};

use crate::accelerator;
use crate::host::{Ground, Host, address};
use crate::image::{self, Contents};
use crate::kernel::{Kernel, Prepared};
use crate::shell::Shell as _;
use crate::spec::Spec;
use crate::switch::Switch;

/// The most hosts, as many as there are addresses.
const MAX_HOSTS: usize = 250;

/// Running hosts. Dropping them pulls all plugs.
#[derive(Debug)]
pub struct Testbed {
    hosts: Vec<Host>,
}

impl Testbed {
    /// Starts all hosts at once, and waits until they run commands. Hosts reach each other by name,
    /// and nothing else.
    ///
    /// # Errors
    /// If the specifications are invalid, a kernel, a module or a file is not available, or a host
    /// does not boot.
    pub fn start(specs: impl IntoIterator<Item = Spec>) -> Result<Self> {
        let specs: Vec<_> = specs.into_iter().collect();
        ensure!(
            (1..=MAX_HOSTS).contains(&specs.len()),
            "a testbed has 1 to {MAX_HOSTS} hosts, not {}",
            specs.len()
        );
        specs.iter().try_for_each(Spec::check)?;
        for (index, spec) in specs.iter().enumerate() {
            let twice = specs[..index].iter().any(|other| other.name == spec.name);
            ensure!(!twice, "two hosts cannot both be '{}'", spec.name);
        }
        let testbed = Self { hosts: set_up(specs)? };
        testbed.hosts.iter().try_for_each(Host::power_on)?;
        testbed.hosts.iter().try_for_each(Host::wait_until_up)?;
        Ok(testbed)
    }

    /// Returns all hosts, in the order of their specifications.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Returns the host of that name.
    ///
    /// # Errors
    /// If there is no such host.
    pub fn host(&self, name: &str) -> Result<&Host> {
        let found = self.hosts.iter().find(|host| host.name() == name);
        found.with_context(|| {
            let names: Vec<_> = self.hosts.iter().map(Host::name).collect();
            format!("there is no host '{name}': there are {}", names.join(", "))
        })
    }

    /// Writes every host's console to `DIR/HOST.console`. From each host that is on, it also copies
    /// those of the files in `paths` that exist to `DIR/HOST.NAME`.
    ///
    /// # Errors
    /// If this machine cannot write a file.
    pub fn collect_logs(&self, dir: &Path, paths: &[&str]) -> Result<()> {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        for host in &self.hosts {
            let target = |name: &str| dir.join(format!("{host}.{name}"));
            fs::write(target("console"), host.console())
                .with_context(|| format!("cannot write to {}", dir.display()))?;
            for path in paths.iter().filter(|_| host.is_on()) {
                let name = path.rsplit('/').next().unwrap_or(path);
                if let Ok(content) = host.read(path) {
                    fs::write(target(name), content)?;
                }
            }
        }
        Ok(())
    }
}

impl Index<&str> for Testbed {
    type Output = Host;

    /// # Panics
    /// If there is no such host.
    fn index(&self, name: &str) -> &Host {
        self.host(name).unwrap_or_else(|error| panic!("{error}"))
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.hosts.iter().for_each(|host| eprintln!("{}", host.console_tail()));
        }
    }
}

fn set_up(specs: Vec<Spec>) -> Result<Vec<Host>> {
    let switch = Switch::new(specs.len());
    let mut hosts = "127.0.0.1 localhost".to_owned();
    for (port, spec) in specs.iter().enumerate() {
        let _ = write!(hosts, "\n{} {}", address(port), spec.name);
    }
    let mut images = Images::default();
    let with_ground = |(port, spec): (usize, Spec)| {
        let (kernel, image) = images.of(&spec)?;
        let accelerator = accelerator::find(&kernel)?;
        let ground = Ground {
            kernel,
            image,
            accelerator,
            switch: switch.clone(),
            port,
            hosts: hosts.clone(),
        };
        Ok(Host::new(spec, ground))
    };
    specs.into_iter().enumerate().map(with_ground).collect()
}

/// Finished images; hosts with the same kernel and contents share one.
#[derive(Default)]
struct Images {
    made: Vec<(Kernel, Contents, Prepared, Arc<File>)>,
}

impl Images {
    fn of(&mut self, spec: &Spec) -> Result<(Prepared, Arc<File>)> {
        let alike = self
            .made
            .iter()
            .find(|(kernel, contents, ..)| *kernel == spec.kernel && *contents == spec.contents);
        if let Some((.., prepared, image)) = alike {
            return Ok((prepared.clone(), image.clone()));
        }
        let prepared = spec.kernel.prepare()?;
        let made = image::build(&spec.contents, &prepared);
        let image = Arc::new(
            made.with_context(|| format!("cannot make the file system of host {}", spec.name))?,
        );
        self.made.push((spec.kernel, spec.contents.clone(), prepared.clone(), image.clone()));
        Ok((prepared, image))
    }
}
