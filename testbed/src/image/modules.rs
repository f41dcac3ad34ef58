//! Kernel modules, unpacked, and the order in which the guest loads them.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use aquifer_guest::Initrd;

use crate::command;
use crate::kernel::Prepared;

/// Puts in modules, each given as its name and, after a space, parameters, with those that they need.
pub(super) fn put<'a>(
    initrd: &mut Initrd,
    kernel: &Prepared,
    modules: impl Iterator<Item = &'a str>,
) -> Result<()> {
    let mut known = HashSet::new();
    let mut order = String::new();
    for module in modules {
        let (name, parameters) = module.split_once(' ').unwrap_or((module, ""));
        let files = kernel.module_files(name)?;
        let last = files.len().saturating_sub(1);
        for (index, path) in files.iter().enumerate() {
            if !known.insert(path.clone()) {
                continue;
            }
            let (file, content) = read(path)?;
            initrd.file(&format!("modules/{file}"), &content);
            order += &file;
            if index == last && !parameters.is_empty() {
                order = order + " " + parameters;
            }
            order.push('\n');
        }
    }
    initrd.file("modules/order", order.as_bytes());
    Ok(())
}

/// A module's file name without the ending of its compression, and its content without that.
fn read(path: &Path) -> Result<(String, Vec<u8>)> {
    let name = path.file_name().and_then(|name| name.to_str()).context("a module without a name")?;
    match name.strip_suffix(".xz") {
        Some(name) => Ok((name.to_owned(), command::bytes(Command::new("xz").arg("-dc").arg(path))?)),
        None => {
            Ok((name.to_owned(), fs::read(path).with_context(|| format!("cannot read {}", path.display()))?))
        }
    }
}
