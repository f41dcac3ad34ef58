//! Where the VMs of this host and their definitions are.

use std::path::{Path, PathBuf};

use aquifer_page::RegionName;
use aquifer_vm::definition::{DIRECTORY, Definitions};
use aquifer_vm::process::Files;
use clap::Args;

use crate::commands::Common;
use crate::failure::{OrFail, Result};

/// The default of --vm-dir, and the variable that sets it.
pub(in crate::commands) const VM_DIR: &str = DIRECTORY;
pub(in crate::commands) const VM_DIR_VARIABLE: &str = "AQUIFER_VM_DIR";

/// Where definitions are.
#[derive(Debug, Args)]
pub(super) struct VmDir {
    /// Directory (VM_DIR) of the definitions of VMs
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        env = VM_DIR_VARIABLE,
        default_value = VM_DIR
    )]
    vm_dir: PathBuf,
}

/// The VMs of this host and their definitions.
#[derive(Debug)]
pub(super) struct Place<'a> {
    pub(super) common: &'a Common,
    pub(super) run_dir: PathBuf,
    pub(super) definitions: Definitions,
}

impl VmDir {
    pub(super) fn place(self, common: &Common) -> Result<Place<'_>> {
        let absolute = |path: &Path| std::path::absolute(path).or_fail(|| "finding the VMs");
        let definitions = Definitions::of(&absolute(&self.vm_dir)?);
        Ok(Place { common, run_dir: absolute(&common.run_dir)?, definitions })
    }
}

impl Place<'_> {
    /// Returns the files of a VM.
    pub(super) fn files(&self, name: &RegionName) -> Files {
        Files::new(&self.run_dir, name)
    }
}
