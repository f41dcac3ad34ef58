//! The hardware of hosts, from the command line.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use aquifer_page::Bytes;
use aquifer_testbed::{Kernel, Spec};
use clap::Args;

/// What all hosts of a command have.
#[derive(Debug, Args)]
pub(crate) struct Hardware {
    /// Debian's kernel: 6.1 or 6.12
    #[arg(long, value_name = "VERSION", default_value = "6.12")]
    kernel: Kernel,
    /// RAM of each host
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    memory: Bytes,
    /// CPUs of each host
    #[arg(long, value_name = "N", default_value_t = 1)]
    cpus: u32,
    /// A disk of each host, /dev/vda once the module virtio_blk is loaded; empty at each boot
    #[arg(long, value_name = "SIZE", default_value = "0")]
    disk: Bytes,
    /// Load a kernel module and its dependencies at boot, as in --module 'brd rd_nr=1'
    #[arg(long = "module", value_name = "NAME")]
    modules: Vec<String>,
    /// Copy a file, and the shared libraries it needs, into the hosts
    #[arg(long = "file", value_name = "HERE:THERE", value_parser = file)]
    files: Vec<(PathBuf, String)>,
}

impl Hardware {
    /// Describes a host with this hardware.
    pub(crate) fn spec(&self, name: &str) -> Spec {
        let spec =
            Spec::new(name).kernel(self.kernel).memory(self.memory).cpus(self.cpus).disk(self.disk);
        let spec = spec.modules(self.modules.iter().map(String::as_str));
        self.files.iter().fold(spec, |spec, (here, there)| spec.file(here, there))
    }
}

fn file(text: &str) -> Result<(PathBuf, String)> {
    let (here, there) = text.rsplit_once(':').context("the value must be HERE:THERE")?;
    Ok((here.into(), there.to_owned()))
}
