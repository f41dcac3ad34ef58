//! `aquifer volume attach --direct`: a subsystem attached by the kernel's NVMe initiator.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use aquifer_blockdev::nvme::initiator::{self, HostIdentity, Options, Wish};
use aquifer_blockdev::nvme::{NvmeError, Root, SubsystemUri};
use aquifer_nvme::auth::Secret;
use aquifer_nvme::proto::Nqn;
use aquifer_page::{Bytes, VolumeId};
use clap::Args;
use serde::Serialize;

use crate::commands::Common;
use crate::failure::{Failure, OrFail, Result};
use crate::io_timeout::IoTimeout;
use crate::lender::Trust;
use crate::output;
use crate::progress::Progress;
use crate::volumes::Owner;

/// The arguments for the kernel's own initiator.
#[derive(Debug, Args)]
pub(super) struct Direct {
    /// Attach with the kernel's NVMe initiator, without a process
    #[arg(long, conflicts_with = "take_over")]
    pub(super) direct: bool,
    /// Number of connections; default one per processor, at most 4
    #[arg(long, value_name = "N", requires = "direct",
        value_parser = clap::value_parser!(u16).range(1..=1024))]
    queues: Option<u16>,
    /// Swap even over a network that can hang this host
    ///
    /// See "Networks that hang" below.
    #[arg(long, requires_all = ["direct", "swap"])]
    force: bool,
}

/// The answer of `aquifer volume attach --direct`.
#[derive(Debug, Serialize)]
struct Attached {
    volume: VolumeId,
    device: PathBuf,
    /// The driver, in the field where attached volumes have their backend.
    backend: &'static str,
    capacity: Bytes,
    swap: bool,
    controller: String,
    host_nqn: Nqn,
}

impl Direct {
    pub(super) fn run(
        self,
        common: &Common,
        uri: SubsystemUri,
        swap: Option<u16>,
        io_timeout: IoTimeout,
        trust: &Trust,
    ) -> Result<ExitCode> {
        let what = format!("attaching {uri}");
        trust.check_nvme(&uri)?;
        let fail = |error| failure(&what, error);
        let root = Root::default();
        let host = HostIdentity::find(&root, trust.host_nqn.clone()).map_err(fail)?;
        let mut options = Options { io_timeout: io_timeout.0, ..Options::default() };
        if let Some(queues) = self.queues {
            options.queues = queues.into();
        }
        if let Some(path) = &trust.dhchap_secret {
            (options.secret, options.lender_secret) = read_secrets(path)?;
        }
        let backend = uri.transport.initiator_module();
        let note = serde_json::to_value(Owner::Attach).or_fail(|| &what)?;
        let wish = Wish {
            id: VolumeId::random(),
            uri,
            host,
            options,
            swap: swap.is_some(),
            priority: swap,
            force: self.force,
            note,
        };
        let record = {
            let _progress = Progress::spinner(&what);
            initiator::attach(&root, &common.run_dir, &wish).map_err(fail)?
        };
        let attached = Attached {
            volume: record.id,
            device: record.device.unwrap_or_default(),
            backend,
            capacity: record.capacity,
            swap: record.swap,
            controller: record.controller.unwrap_or_default(),
            host_nqn: record.host.nqn,
        };
        output::answer(common.json, &attached, |attached| attached.device.display().to_string())?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Turns an error of the kernel's NVMe initiator or target into a command's failure.
pub(crate) fn failure(what: &str, error: NvmeError) -> Failure {
    let failure = Failure::new(what, error.why);
    match error.help {
        Some(help) => failure.help(help),
        None => failure,
    }
}

/// Reads this host's DH-HMAC-CHAP secret and, from the second line, the lender's.
fn read_secrets(path: &Path) -> Result<(Option<String>, Option<String>)> {
    let what = || format!("reading the secrets in {}", path.display());
    let text = fs::read_to_string(path).or_fail(what)?;
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut next = || {
        let line = lines.next();
        let checked = line.map(|line| line.parse::<Secret>().map(|_| line.to_owned()));
        checked.transpose().or_fail(what)
    };
    let (own, lenders) = (next()?, next()?);
    if own.is_none() {
        return Err(Failure::new(what(), "the file is empty")
            .help("write the output of 'nvme gen-dhchap-key' into it"));
    }
    Ok((own, lenders))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_checked_before_the_kernel_sees_them() {
        const GOOD: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("secret");
        let read = |text: &str| {
            fs::write(&file, text).unwrap();
            read_secrets(&file)
        };
        assert_eq!(read(&format!("{GOOD}\n")).unwrap(), (Some(GOOD.to_owned()), None));
        assert_eq!(
            read(&format!("{GOOD}\n\n{GOOD}")).unwrap(),
            (Some(GOOD.to_owned()), Some(GOOD.to_owned()))
        );
        assert!(read("").is_err() && read("password").is_err());
    }
}
